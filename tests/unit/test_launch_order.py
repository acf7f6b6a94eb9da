"""The order in which pools are started, with stand-ins for Ray and verl's worker groups."""

from contextlib import ExitStack

import pytest

from marl.cluster.launch import start_workers
from marl.cluster.layout import Part
from marl.preflight.prepare import prepare


class StandIn:
    """Accepts any arguments."""

    def __init__(self, *_, **__):
        pass

    def release(self):
        pass

    def spawn(self, keys):
        return dict.fromkeys(keys, self)


@pytest.fixture
def started(compose_config, cold_assets, monkeypatch):
    """The ranks of a node of each pool, in the order in which they are allocated."""
    nodes = []

    class Pool(StandIn):
        def __init__(self, process_on_nodes, **_):
            nodes.append(process_on_nodes)

    monkeypatch.setattr("marl.cluster.pools.Pool", Pool)
    for name in ("RayWorkerGroup", "RayClassWithInitArgs"):
        monkeypatch.setattr(f"verl.single_controller.ray.{name}", StandIn)
    monkeypatch.setattr("verl.single_controller.ray.base.create_colocated_worker_cls", StandIn)
    monkeypatch.setattr("ray.remote", lambda worker: worker)

    def started(*overrides):
        setup = prepare(compose_config(f"assets={cold_assets}", *overrides))
        parts = [Part(name, pool, StandIn, {}) for name, pool in setup.pool_by_policy.items()]
        parts += [Part(name, pool, StandIn, {}, is_critic=True) for name, pool in setup.pool_by_critic.items()]
        with ExitStack() as cleanup:
            names = [part.key for part, _ in start_workers(setup.config, parts, cleanup)]
        return nodes, names

    return started


def test_the_widest_pools_start_first_and_equal_ones_in_the_runs_order(started):
    """Ray gives a node to the emptiest machine: small pools that came first could leave no machine with room for a wide one."""
    pools = "resources.pools={small:{gpus:1,policies:[alice]},wide:{gpus:4,policies:[carol]},deep:{gpus:2,nodes:3,critics:[central]}}"
    nodes, names = started("learner=mappo", pools)
    assert nodes == [[4], [2, 2, 2], [1]] and names == ["carol", "central_critic", "alice"]


@pytest.mark.slow
def test_members_of_one_pool_start_together(started):
    assert started("resources.placement=colocated") == ([[1]], ["alice", "carol"])
