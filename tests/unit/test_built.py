"""Objects from sections of a configuration are those that verl builds, down to the types within them."""

from dataclasses import fields, is_dataclass

import pytest
from omegaconf import MissingMandatoryValue, OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from marl.config.errors import ConfigError
from marl.config.targets import built
from marl.preflight.verl_settings import must_be_buildable
from tests.composing import compose


def described(value):
    """A value and the types of all that is within: equal dataclasses may hold 1 and 1.0, a list and a tuple. Of other objects only the
    type."""
    if is_dataclass(value):
        return type(value), [(field.name, described(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, dict):
        return dict, [(key, described(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [described(item) for item in value]
    return type(value), value if isinstance(value, str | int | float | None) else ...


@pytest.mark.parametrize("words", [(), ("hardware=gpu",)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", ["quickstart", "game", "marl"])
@pytest.mark.parametrize(
    "section",
    ["actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.checkpoint_engine", "critic"],
)
def test_sections_of_shipped_configurations_are_those_of_verl(name, words, section):
    config = compose(*words, name=name)
    OmegaConf.resolve(config)
    node = OmegaConf.select(config, section)
    if section == "critic":  # its model's reads files, its level is ours
        node = OmegaConf.masked_copy(node, [key for key in node if key not in ("model", "level")])
    assert is_dataclass(built(node)) and described(built(node)) == described(omega_conf_to_dataclass(node))


@pytest.mark.parametrize("section", ["actor_rollout_ref.model", "critic.model"])
def test_models_read_the_same_files(section, cold_assets):
    node = OmegaConf.select(compose(f"assets={cold_assets}"), section)
    mine, verls = built(node), omega_conf_to_dataclass(node)
    assert described(mine) == described(verls)
    assert (
        mine.hf_config.to_dict() == verls.hf_config.to_dict()
        and mine.tokenizer.get_vocab() == verls.tokenizer.get_vocab()
    )


def test_objects_within_lists_and_dicts_are_built_and_values_resolved():
    optim = {"_target_": "verl.workers.config.FSDPOptimizerConfig", "lr": "${rate}"}
    whole = OmegaConf.create({
        "rate": 0.5,
        "engine": {"_target_": "verl.workers.config.MtpConfig", "method": [{"first": optim}, None, optim]},
    })  # fmt: skip
    mine, verls = built(whole.engine), omega_conf_to_dataclass(whole.engine)
    assert described(mine) == described(verls)
    assert mine.method[0]["first"].lr == mine.method[2].lr == 0.5 and mine.method[1] is None
    assert mine.method[0]["first"] is not mine.method[2]


def test_a_section_is_left_as_it_was_and_shares_nothing_with_its_object():
    config = compose()
    before = OmegaConf.to_container(config, resolve=False)
    first, second = built(config.actor_rollout_ref.actor), built(config.actor_rollout_ref.actor)
    first.optim.total_training_steps = 7
    assert second.optim.total_training_steps != 7 and OmegaConf.to_container(config, resolve=False) == before


def test_a_missing_value_is_an_error():
    section = OmegaConf.create({"_target_": "verl.workers.config.FSDPOptimizerConfig", "lr": "???"})
    with pytest.raises(MissingMandatoryValue, match="lr"):
        built(section)


def test_a_class_that_rejects_its_settings_is_named_and_a_missing_value_stays_one():
    section = OmegaConf.create({"_target_": "verl.workers.config.FSDPOptimizerConfig", "speed": 1})
    with pytest.raises(ConfigError, match="actor.optim: verl.*FSDPOptimizerConfig rejects it: TypeError: .*'speed'"):
        must_be_buildable("actor.optim", section)
    with pytest.raises(MissingMandatoryValue, match="lr"):
        must_be_buildable("actor.optim", OmegaConf.create({"_target_": section._target_, "lr": "???"}))
