"""Bounds of numbers, which stand beside the fields that they hold for."""

import math
import re
import typing
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass

import pytest
from omegaconf import II, OmegaConf

from marl.config import schema
from marl.config.errors import ConfigError
from marl.config.identity import leaves
from marl.config.keys import known_keys
from marl.config.values import NUMBERS, check_values
from marl.envs import ENVIRONMENTS, Environment, make_environment, register_environment
from marl.envs.games import GAMES, make_game
from marl.learners import CREDITS, LEARNERS
from marl.learners.base import Learner, register_learner
from marl.learners.credit_schemes import Credit
from marl.learners.ippo import IPPO
from marl.runners import RUNNERS
from marl.runners.base import Runner
from marl.utils.numbers import FINITE, SHARE, Number, bounded, bounds_of, count, out_of_bounds

REGISTRIES = (LEARNERS, CREDITS, RUNNERS, ENVIRONMENTS, GAMES)


def within(hint):
    """A type, and the types that it is made of."""
    yield hint
    for part in typing.get_args(hint):
        yield from within(part)


def configs(config):
    """A dataclass, and those that its fields hold."""
    yield config
    for hint in typing.get_type_hints(config).values():
        for part in within(hint):
            if is_dataclass(part):
                yield from configs(part)


def all_configs():
    ours = [cls for cls in vars(schema).values() if is_dataclass(cls) and cls.__module__ == schema.__name__]
    for registry in REGISTRIES:
        ours += [registry.get(name).Config for name in registry.names()]
    return dict.fromkeys(inner for config in ours if config.__module__.startswith("marl.") for inner in configs(config))


@pytest.mark.parametrize("config", all_configs(), ids=lambda config: f"{config.__module__}.{config.__qualname__}")
def test_every_number_of_ours_has_a_bound_beside_it(config):
    """One that has none is ``bounded(…, FINITE)``."""
    hints = typing.get_type_hints(config)
    numbers = {
        name for name, hint in hints.items() if {int, float} & {hint, *typing.get_args(hint)} and "[" not in str(hint)
    }
    assert numbers == set(bounds_of(config))


@pytest.mark.parametrize("config", all_configs(), ids=lambda config: f"{config.__module__}.{config.__qualname__}")
def test_defaults_are_within_their_bounds(config):
    numbers = bounds_of(config)
    for option in fields(config):
        if option.name in numbers and not str(option.default).startswith("${"):
            assert numbers[option.name].takes(option.default), option.name


@dataclass
class LearnerConfig(Learner.Config):
    scale: float = bounded(1.0, Number(0, 2, above=True))
    every: int = bounded(5, count(1, 9))
    cap: float | None = bounded(None, SHARE.or_null())


@dataclass
class CreditConfig(Credit.Config):
    scale: float = bounded(II("algorithm.gamma"), SHARE)


@dataclass
class Step:
    scale: float = bounded(0.0, SHARE)


@dataclass
class RunnerConfig(Runner.Config):
    scale: float = bounded(1.0, FINITE)
    first: Step = field(default_factory=Step)
    steps: list[Step] = field(default_factory=lambda: [Step(), Step()])
    named: dict[str, Step] = field(default_factory=lambda: {"a": Step()})


OUT_OF_BOUNDS = [
    ("learner", LearnerConfig, "scale", 0, "learner.scale=0.0: expected a finite number above 0 and at most 2"),
    ("learner", LearnerConfig, "scale", 2.5, "learner.scale=2.5: expected a finite number above 0 and at most 2"),
    ("learner", LearnerConfig, "scale", math.nan, "learner.scale=nan: expected a finite number above 0 and at most 2"),
    ("learner", LearnerConfig, "scale", math.inf, "learner.scale=inf: expected a finite number above 0 and at most 2"),
    ("learner", LearnerConfig, "every", 10, "learner.every=10: expected a whole number at least 1 and at most 9"),
    ("learner", LearnerConfig, "every", "0", "learner.every=0: expected a whole number at least 1 and at most 9"),
    ("learner", LearnerConfig, "cap", -1, "learner.cap=-1.0: expected a finite number at least 0 and at most 1, or null"),
    ("credit", CreditConfig, "scale", 1.5, "credit.scale=1.5: expected a finite number at least 0 and at most 1"),
    ("credit", CreditConfig, "alpha0", math.nan, "credit.alpha0=nan: expected a finite number"),
    ("runner", RunnerConfig, "scale", math.nan, "runner.scale=nan: expected a finite number"),
    ("runner", RunnerConfig, "first.scale", 3, "runner.first.scale=3.0: expected a finite number at least 0 and at most 1"),
    ("runner", RunnerConfig, "steps[1].scale", 3, "runner.steps[1].scale=3.0: expected a finite number at least 0 and at most 1"),
    ("runner", RunnerConfig, "named.a.scale", 3, "runner.named.a.scale=3.0: expected a finite number at least 0 and at most 1"),
]  # fmt: skip


@pytest.mark.parametrize("group,config,name,value,said", OUT_OF_BOUNDS)
def test_a_component_of_ones_own_is_refused_out_of_its_bounds(group, config, name, value, said):
    node = OmegaConf.create({"algorithm": {"gamma": 0.5}, group: OmegaConf.structured(config(name="own"))})
    assert list(out_of_bounds(node[group], group)) == []
    OmegaConf.update(node, f"{group}.{name}", value)
    assert list(out_of_bounds(node[group], group)) == [said]


def test_a_learner_in_one_file_is_checked_with_its_run(monkeypatch, compose_config, cold_assets):
    monkeypatch.setattr(LEARNERS, "_entries", dict(LEARNERS._entries))

    @register_learner("every_ninth")
    class EveryNinth(IPPO):
        @dataclass
        class Config(IPPO.Config):
            every: int = bounded(5, count(1, 9))

    def check(*words):
        config = compose_config(f"assets={cold_assets}", "learner=every_ninth", *words)
        OmegaConf.resolve(config)
        check_values(config)

    check("learner.every=9")
    with pytest.raises(ConfigError, match=r"^learner\.every=10: expected a whole number at least 1 and at most 9$"):
        check("learner.every=10")
    with pytest.raises(ConfigError, match=r"^learner\.gamma=nan: expected a finite number at least 0 and at most 1$"):
        check("learner.gamma=nan")


@pytest.mark.parametrize("value,right", [("0", False), ("-1", False), ("2.5", False), ("1", True), ("8", True)])
def test_a_validation_plays_each_task_a_whole_number_of_times(compose_config, cold_assets, value, right):
    key = "actor_rollout_ref.rollout.val_kwargs.n"
    config = compose_config(f"assets={cold_assets}", f"{key}={value}")
    OmegaConf.resolve(config)
    with nullcontext() if right else pytest.raises(ConfigError, match=rf"^{key}={value}: expected a whole number"):
        check_values(config)


@pytest.mark.parametrize(
    "value,said",
    [
        (5, "runner.environment.near=5.0: expected a finite number above 0 and at most 4"),
        (0, "runner.environment.near=0.0: expected a finite number above 0 and at most 4"),
        (math.nan, "runner.environment.near=nan: expected a finite number above 0 and at most 4"),
        (True, "'True' of type 'bool' could not be converted to Float"),
        ("far", "'far' of type 'str' could not be converted to Float"),
    ],
)
def test_an_environment_of_ones_own_is_refused_out_of_its_bounds(monkeypatch, value, said):
    monkeypatch.setattr(ENVIRONMENTS, "_entries", dict(ENVIRONMENTS._entries))

    @register_environment("nearly")
    class Nearly(Environment):
        @dataclass
        class Config(Environment.Config):
            near: float = bounded(1.0, Number(0, 4, above=True))

        async def reply(self, episode, turns):
            return None

    assert make_environment({"name": "nearly", "near": 4}).config.near == 4
    with pytest.raises(ValueError, match=re.escape(said)):
        make_environment({"name": "nearly", "near": value})


@pytest.mark.parametrize(
    "options,said",
    [
        ({"name": "halves", "scale": math.nan}, "runner.game.scale=nan: payoffs are divided by it; expected a number above 0"),
        ({"name": "halves", "invalid": math.inf}, "runner.game.invalid=inf: expected a finite number, or null"),
        ({"name": "collaborate", "r_ind": math.nan}, "runner.game.r_ind=nan: expected a finite number"),
    ],
)  # fmt: skip
def test_a_game_pays_numbers(options, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        make_game(options, 2)


NO_NUMBERS = [("scale", "far"), ("scale", [1]), ("scale", None), ("scale", True), ("every", True), ("every", 2.5)]


@pytest.mark.parametrize("name,value", NO_NUMBERS)
def test_what_is_no_number_never_gets_into_a_typed_field(name, value):
    """``'1'`` does: OmegaConf makes 1 of it, and that has to be within the bound."""
    with pytest.raises(ValueError, match="could not be converted|not supported|not Optional"):
        OmegaConf.structured(LearnerConfig(name="own"))[name] = value


@pytest.mark.parametrize("value", ["perhaps", 0.5, None, []])
def test_a_switch_of_ours_is_typed(value):
    with pytest.raises(ValueError):
        OmegaConf.structured(schema.ControllerConfig).train_truncated = value


def test_another_default_keeps_the_bound():
    @dataclass
    class Config(IPPO.Config):
        gamma: float = 0.5
        lam: float = bounded(0.5, FINITE)

    assert bounds_of(Config) == bounds_of(IPPO.Config) | {"lam": FINITE}


@pytest.mark.parametrize("value", [True, "1", 1.5, math.nan, None, [1]])
def test_what_is_no_whole_number(value):
    assert not count().takes(value)


@pytest.mark.parametrize("value", [False, "0.5", math.nan, math.inf, -math.inf, None, [1]])
def test_what_is_no_number(value):
    assert not FINITE.takes(value)
    assert FINITE.or_null().takes(value) is (value is None)


def test_a_number_is_checked_before_those_that_follow_it():
    """So that data.train_batch_size=0 is answered by that name."""
    known, order = dict(leaves(known_keys())), [*NUMBERS]
    followed = {key: re.findall(r"(?:\$\{|oc\.select:)(\w[\w.]+)", str(known.get(key))) for key in order}
    pairs = [(source, key) for key, sources in followed.items() for source in sources if source in NUMBERS]
    assert ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size") in pairs
    assert [pair for pair in pairs if order.index(pair[0]) > order.index(pair[1])] == []
