"""An environment of one's own, in one file, with an option: the document's."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from marl.config.keys import check_typed
from marl.envs import ENVIRONMENTS, make_environment
from marl.preflight.compatibility import check_facts, choose_credit
from marl.run_setup import Setup
from marl.runners import RUNNERS
from marl.utils.registry import Registry
from tests.builders import build_runner as build, play

WORDS = ("agents=schema", "runner=multi_turn", "runner.num_turns=8", "+agents.a={}")


@pytest.fixture
def hot_and_cold(monkeypatch, tmp_path):
    """The file that the document shows, imported."""
    monkeypatch.setattr(ENVIRONMENTS, "_entries", dict(ENVIRONMENTS._entries))
    blocks = re.findall(r"```python\n(.*?)```", Path("docs/runners.md").read_text(), re.DOTALL)
    (source,) = [block for block in blocks if "register_environment" in block]
    (tmp_path / "own_environment.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_environment", raising=False)
    importlib.import_module("own_environment")


def replies(environment, *answers):
    """Replies to a team of one agent after each of these answers; the right one is 4."""
    runner = build("multi_turn", num_turns=8, environment=environment)
    record = play(runner, lambda agent, round: answers[round - 1], agents=("a",))
    return [turn.observation[-1]["content"] for turn in record.turns[1:]], record.answer


def test_its_option_is_a_typed_key(hot_and_cold):
    assert replies("hot_and_cold", "9", "2", "3", "4") == (["Smaller.", "Larger.", "Larger."], "4")
    assert replies({"name": "hot_and_cold", "near": 1}, "9", "2", "3") == (["Smaller.", "Larger."], "3")


def test_it_is_configured_like_a_game(hot_and_cold, compose_config):
    config = compose_config(*WORDS, "runner.environment={name: hot_and_cold, near: 1}", name="marl")
    check_typed(config)
    choose_credit(config)
    check_facts(Setup.of(config))
    runner = RUNNERS.build(config.runner)
    assert make_environment(runner.config.environment).config.near == 1.0
    assert (
        RUNNERS.build(compose_config(*WORDS, "runner.environment=verifier", name="marl").runner).config.environment
        == "verifier"
    )


def test_every_episode_has_an_environment_of_its_own(hot_and_cold):
    assert make_environment("hot_and_cold") is not make_environment("hot_and_cold")


def test_a_built_in_one_has_options():
    assert replies({"name": "verifier", "wrong": "No."}, "5", "6", "4") == (["No."] * 2, "4")


@pytest.mark.parametrize(
    "environment,said",
    [
        ({}, None),
        ("verifer", "Did you mean 'verifier'"),
        ({"wrong": "No."}, r"runner\.environment=.*no name; expected one of hot_and_cold, verifier"),
        ({"name": "verifier", "worng": "No."}, r"runner\.environment\.worng: environment 'verifier' has no such key.*'wrong'"),
        ({"name": "hot_and_cold", "near": "far"}, r"runner\.environment\.near=far: .*Float"),
        (["verifier"], r"expected a name, or a group \{name: …, option: …\}"),
    ],
)  # fmt: skip
def test_invalid_environments_are_errors(hot_and_cold, environment, said):
    runner = build("multi_turn", environment=environment)
    if said is None:
        return runner.check(["a"])
    with pytest.raises(ValueError, match=said):
        runner.check(["a"])


def test_environments_are_described_by_their_registry():
    assert isinstance(ENVIRONMENTS, Registry)
    for name in ENVIRONMENTS.names():
        assert ENVIRONMENTS.described("runner.environment", {"name": name}).Config(name=name).name == name
