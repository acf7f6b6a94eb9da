"""Copies of configurations."""

import pickle
from dataclasses import dataclass, field
from enum import Enum

import pytest
from omegaconf import OmegaConf

from marl.cluster.layout import policy_configs
from marl.config.copies import copied, untyped
from marl.learners.happo import HAPPO


class Shape(Enum):
    round = "round"


@dataclass
class Typed:
    shape: Shape = Shape.round
    sizes: list[int] = field(default_factory=lambda: [1, 2])


def holder(typed):
    config = OmegaConf.create({"typed": OmegaConf.structured(typed), "size": "${typed.sizes}", "open": {"a": {"b": 1}}})
    OmegaConf.set_struct(config, True)
    OmegaConf.set_struct(config.open, False)
    return config


def must_be_alike(copy, config):
    assert copy == OmegaConf.create(config) and copy is not config
    assert OmegaConf.to_yaml(copy) == OmegaConf.to_yaml(config)
    assert OmegaConf.get_type(copy.typed) is OmegaConf.get_type(config.typed) and copy.typed.shape is Shape.round
    assert OmegaConf.is_struct(copy) and not OmegaConf.is_struct(copy.open)
    copy.open.a.b, copy.open.new, copy.typed.sizes[0] = 7, 8, 9
    assert (config.open.a.b, config.typed.sizes[0]) == (1, 1) and "new" not in config.open
    assert copy["size"] == [9, 2] and config["size"] == [1, 2], "what refers to a key refers to the copy's"


def test_a_copy_has_the_types_and_flags_and_is_independent():
    config = holder(Typed)
    must_be_alike(copied(config), config)


def test_a_type_that_cannot_be_imported_is_copied_too():
    @dataclass
    class Local(Typed):
        more: int = 3

    config = holder(Local)
    must_be_alike(copied(config), config)


def test_a_value_that_cannot_be_pickled_is_copied_as_it_says_itself():
    class Shared:
        def __reduce_ex__(self, protocol):
            raise TypeError("not to be pickled")

        def __deepcopy__(self, memo):
            return self

    config = OmegaConf.create({"shared": Shared(), "own": [1]}, flags={"allow_objects": True})
    copy = copied(config)
    copy.own[0] = 2
    assert copy.shared is config.shared and config.own == [1]


def test_a_composed_configuration_is_copied_with_its_types(compose_config):
    config = compose_config("learner=happo", "+policies.carol.actor.optim.lr=5")
    folder = config.trainer.default_local_dir  # from here on this run's, with its time in it
    copy = copied(config)
    assert copy == config and OmegaConf.get_type(copy.learner) is HAPPO.Config
    assert copy.trainer.default_local_dir == folder


def must_be_plain(copy, config):
    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert OmegaConf.to_container(pickle.loads(pickle.dumps(copy))) == plain
    assert list(types_in(copy)) == list(types_in(OmegaConf.create(plain)))
    copy.new = copy.open_group.new = 1


def types_in(node):
    """The types of groups, and those of values."""
    if not OmegaConf.is_config(node):
        yield type(node._value())
        return
    yield OmegaConf.get_type(node)
    if not node._is_none():
        for key in range(len(node)) if OmegaConf.is_list(node) else node:
            yield from types_in(node._get_node(key))


@pytest.mark.parametrize("where", ["typed", "within.group", "within.list"])
def test_a_group_typed_by_a_local_class_becomes_plain(where):
    class Colour(Enum):
        red = 1

    @dataclass
    class Local(Typed):
        colour: Colour = Colour.red
        missing: str | None = None

    config = OmegaConf.create(
        {"within": {"list": [1, [None]], "group": None}, "open_group": {"is": "${within}"}, "one": [{"two": None}]}
    )
    value = OmegaConf.structured(Local)
    OmegaConf.update(config, where, [{"a": value}] if where.endswith("list") else value)
    config.shape = Colour.red
    OmegaConf.set_struct(config, True)
    OmegaConf.resolve(config)
    before = OmegaConf.to_yaml(config)
    must_be_plain(untyped(config), config)
    assert OmegaConf.to_yaml(config) == before


@pytest.mark.parametrize("name", ["quickstart", "marl"])
def test_every_value_of_a_shipped_configuration_is_kept(compose_config, name):
    config = compose_config("+open_group={}", "runner=debate", "learner=mappo", name=name)
    OmegaConf.resolve(config)
    must_be_plain(untyped(config), config)


def test_what_a_worker_changes_is_its_policys_alone(compose_config):
    config = compose_config("+policies.carol.actor.optim.lr=5")
    before = OmegaConf.to_yaml(config)
    alice, carol = policy_configs(config, ["alice", "carol"], "run", 9).values()
    alice.actor_rollout_ref.rollout.n = alice.data.train_batch_size = 77
    alice.trainer.n_gpus_per_node = 8
    assert 77 not in (carol.actor_rollout_ref.rollout.n, carol.data.train_batch_size)
    assert carol.trainer.n_gpus_per_node != 8 and OmegaConf.to_yaml(config) == before
