"""Models and tokenizers of policies before the start: loaded once for all policies without settings of their own."""

import json
import shutil

import pytest

from marl.modules import pretrained
from marl.preflight import checks, model_checks
from marl.preflight.prepare import prepare

OTHER_THINKING = "+policies.eve.thinking={start: '<a>', end: '</a>'}"


@pytest.mark.parametrize(
    ("own", "apart"),
    [((), set()), (("+policies.bob.actor.optim.lr=1e-3", OTHER_THINKING), {"bob", "eve"})],
    ids=["all alike", "two of their own"],
)
def test_policies_without_settings_of_their_own_are_loaded_once(compose_config, cold_assets, monkeypatch, own, apart):
    tokenizers, counted, encoders = [], [], {}
    load, count = pretrained.load_tokenizer, model_checks.size_of
    monkeypatch.setattr(checks, "check_prompts", lambda config, given: encoders.update(given) or [])
    monkeypatch.setattr(pretrained, "load_tokenizer", lambda *model: tokenizers.append(model) or load(*model))
    monkeypatch.setattr(model_checks, "size_of", lambda *model: counted.append(model) or count(*model))
    team = ("+agents.bob={}", "+agents.eve={}", "+agents.dan={}", "learner=grpo")
    setup = prepare(compose_config(f"assets={cold_assets}", *team, *own))
    assert len(tokenizers) == len(counted) == 1 + len(apart)
    assert list(encoders) == list(setup.sizes) == ["alice", "carol", "bob", "eve", "dan"]
    assert {name for name in encoders if encoders[name] is not encoders["alice"]} == apart
    assert len({id(encoder) for encoder in encoders.values()}) == 1 + len(apart)
    assert (encoders["eve"].thinking is None) == ("eve" not in apart)


def test_a_policy_with_its_own_model_has_its_own_size(compose_config, cold_assets, wider_model):
    setup = prepare(
        compose_config(f"assets={cold_assets}", f"+policies.carol.model.path={wider_model}", "learner=grpo")
    )
    assert setup.sizes["carol"].parameters != setup.sizes["alice"].parameters


@pytest.fixture
def wider_model(cold_assets, tmp_path):
    """The embedded model with an MLP twice as wide; its old weights are not read."""
    folder = tmp_path / "other"
    shutil.copytree(next(path.parent for path in cold_assets.rglob("config.json")), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    return folder
