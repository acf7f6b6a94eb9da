"""Weights that a policy and its reference exchange."""

from types import SimpleNamespace

import pytest
import torch

from marl.cluster.workers.policy_worker import PolicyWorker


def worker(reference, policy):
    """Stand-in for a policy's worker: two models, each of one rank."""
    files = SimpleNamespace(release=lambda: None)
    engines = (SimpleNamespace(module=module, checkpoint_manager=files) for module in (reference, policy))
    parts = (SimpleNamespace(engine=engine) for engine in engines)
    return SimpleNamespace(**dict(zip(("ref", "actor"), parts, strict=True)))


def layer(value, name="a"):
    return torch.nn.ParameterDict({name: torch.full((2,), float(value)), "last": torch.full((2,), float(value))})


def test_policy_and_reference_exchange_and_renew():
    own = worker(layer(1), layer(2))
    PolicyWorker.exchange_reference(own)
    assert own.ref.engine.module["a"].tolist() == [2, 2] and own.actor.engine.module["last"].tolist() == [1, 1]
    PolicyWorker.renew_reference(own)
    assert own.ref.engine.module["a"].tolist() == own.actor.engine.module["a"].tolist() == [1, 1]


@pytest.mark.parametrize("method", ["exchange_reference", "renew_reference"])
def test_models_of_two_kinds_are_refused_before_any_weight_changes(method):
    own = worker(layer(1, "a"), layer(2, "b"))
    with pytest.raises(ValueError, match="the reference has a where the policy has b"):
        getattr(PolicyWorker, method)(own)
    assert own.ref.engine.module["last"].tolist() == [1, 1] and own.actor.engine.module["last"].tolist() == [2, 2]
