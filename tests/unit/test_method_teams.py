"""Runs of methods beside ``rl``, opened again: they are evaluated and served as any other, and not replayed."""

import json

import pytest
from omegaconf import open_dict

from marl.config.errors import ConfigError
from marl.config.identity import plain_of
from marl.config.rules.training import references_are_the_policys
from marl.evaluation.recorded_run import RecordedRun
from marl.evaluation.source import Source
from marl.evaluation.team import answers_alone, of_run
from tests.composing import compose

METHODS = {
    "sft": ["method=sft"],
    "spin": ["method=spin", "trainer.ref_update_freq=1"],
    "rl": ["actor_rollout_ref.actor.use_kl_loss=true", "trainer.ref_update_freq=1"],
}


@pytest.fixture(scope="module")
def saved():
    return {name: plain_of(compose(*words)) for name, words in METHODS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_team_answers_whatever_method_trained_it(saved, tmp_path, name):
    config = of_run(Source(tmp_path, 1, saved[name]), [], [])
    with open_dict(config):
        answers_alone(config)
    references_are_the_policys(config)
    assert list(config.agents) == ["alice", "carol"] and config.method.name == "rl"


@pytest.mark.parametrize("name", METHODS)
def test_only_what_was_played_by_its_policies_is_replayed(saved, tmp_path, name):
    (tmp_path / "run.json").write_text(json.dumps({"config": saved[name]}))
    if name == "rl":
        assert RecordedRun.at(tmp_path).settings["seed"] == saved[name]["seed"]
        return
    with pytest.raises(ConfigError, match=f"method={name}; marl replay plays runs of method=rl"):
        RecordedRun.at(tmp_path)
