"""``resources.placement=auto``: pools by hand, and the same run from what its plan prints."""

import re

import pytest
from omegaconf import OmegaConf

from marl.config.errors import ConfigError
from marl.config.placement import PoolSize
from marl.config.policies import own_settings
from marl.config.schema import Placement
from marl.preflight.auto_placement import Engine, Group, Member, cluster_of, found, members_of, names_of
from marl.preflight.cluster_plan import Cluster
from marl.preflight.memory_plan import Memory
from marl.preflight.plan_report import plan_text
from marl.preflight.prepare import prepare


def member(name, gigabytes, work=1.0, working=0.0, **options):
    """A model whose weights shards divide among the ranks, and whose working memory they do not."""

    def memory(ranks):
        return Memory(weights=gigabytes * 1e9 / ranks, activations=working * 1e9)

    return Member(name, False, memory, work, **({"most_ranks": 64} | options))


def placed(members, machines, gpus, card):
    groups, sizes = found(members, Cluster(machines, gpus, card * 1e9))
    pools = {name: [member.name for member in group] for name, group in zip(names_of(groups), groups, strict=True)}
    return {name: (pools[name], size.gpus, size.nodes) for name, size in zip(pools, sizes, strict=True)}


A, B = member("a", 10), member("b", 10)


@pytest.mark.parametrize(
    "members,machines,expected",
    [
        ([A, B], (1, 2, 16), {"a": (["a"], 1, 1), "b": (["b"], 1, 1)}),
        ([A, B], (1, 4, 16), {"a": (["a"], 2, 1), "b": (["b"], 2, 1)}),
        # three times the work, three times the ranks
        ([member("a", 10, work=3), B], (1, 4, 16), {"a": (["a"], 3, 1), "b": (["b"], 1, 1)}),
        # one GPU holds both
        ([A, B], (1, 1, 32), {"shared": (["a", "b"], 1, 1)}),
        # what is kept is divided among the ranks, what works is not
        ([member("a", 30, working=2), B], (1, 4, 12), {"a": (["a"], 3, 1), "b": (["b"], 1, 1)}),
        # the two with the least work share, in the place of the first
        ([A, member("c", 10, work=9), B], (1, 2, 24), {"shared_1": (["a", "b"], 1, 1), "c": (["c"], 1, 1)}),
        # a server of two ranks
        ([member("a", 10, per_server=2), B], (1, 3, 16), {"a": (["a"], 2, 1), "b": (["b"], 1, 1)}),
        # the third rank would be half of a server
        ([member("a", 10, per_server=2)], (1, 3, 16), {"a": (["a"], 2, 1)}),
        # a node's ranks are on one machine: 3 ranks do not divide over two machines
        ([member("a", 40)], (2, 2, 16), {"a": (["a"], 2, 2)}),
        # with six ranks, the second server would lie across the machines
        ([member("a", 40, per_server=2)], (2, 3, 16), {"a": (["a"], 2, 2)}),
        # a third rank would have no row
        ([member("a", 10, most_ranks=2)], (1, 8, 16), {"a": (["a"], 2, 1)}),
    ],
)  # fmt: skip
def test_pools_by_hand(members, machines, expected):
    assert placed(members, *machines) == expected


def test_a_critic_is_a_member_and_alone_named_as_one():
    critic = Member("central", True, lambda ranks: Memory(weights=10e9 / ranks), 1.0, 64)
    assert set(placed([A, critic], 1, 2, 16)) == {"a", "central_critic"}


def test_servers_that_sleep_need_no_place_while_others_work():
    def memory(ranks):
        return Memory(activations=6e9, server=6e9)

    asleep, awake = (Member("a", False, memory, 1.0, 64, sleeps=sleeps) for sleeps in (True, False))
    assert placed([asleep], 1, 1, 10) == {"a": (["a"], 1, 1)}
    with pytest.raises(ConfigError, match="a need 12.0 GB a rank on all 1 ranks, each has 10.0 GB"):
        placed([awake], 1, 1, 10)


@pytest.mark.parametrize("members,said", [([A, B], "a, b need 20.0 GB"), ([member("a", 90), B], "a need 90.0 GB")])
def test_what_has_no_place_is_named_with_what_it_needs(members, said):
    with pytest.raises(ConfigError, match=rf"resources.placement=auto: {said} a rank on all 1 ranks, each has 16.0 GB"):
        placed(members, 1, 1, 16)


@pytest.fixture
def config(compose_config, cold_assets):
    return lambda *overrides: compose_config(f"assets={cold_assets}", *overrides)


def test_the_plan_prints_the_pools_as_a_key_that_makes_them(config):
    auto = prepare(config("resources.placement=auto", "learner=mappo"), Cluster(1, 4, 80e9))
    assert set(auto.pool_by_policy) == {"alice", "carol"} and set(auto.pool_by_critic) == {"central"}
    assert sum(auto.ranks_by_pool.values()) <= 4 and auto.config.resources.placement is Placement.separate
    (words,) = re.findall(r"^resources\.pools=.*$", plan_text(auto), re.MULTILINE)
    again = prepare(config(words, "learner=mappo"))
    assert again.pools == auto.pools and again.pool_by_policy == auto.pool_by_policy
    assert again.pool_by_critic == auto.pool_by_critic


def test_engines_that_reserve_memory_share_a_gpu_where_there_is_one(config, monkeypatch):
    """Each server's share of a GPU is that of all, so that two fit into one that would hold three halves."""
    monkeypatch.setattr("marl.cluster.session.fitting_platform", lambda device: None)
    words = ("hardware=gpu", "resources.placement=auto", "actor_rollout_ref.rollout.gpu_memory_utilization=.75")
    one = prepare(config(*words), Cluster(1, 1, 80e9))
    assert one.pools == {"shared": PoolSize(1, 1)}
    assert own_settings(one.config, "alice").rollout.gpu_memory_utilization == pytest.approx(0.375)
    two = prepare(config(*words), Cluster(1, 2, 80e9))
    assert set(two.pools) == {"alice", "carol"}
    assert own_settings(two.config, "alice").rollout.gpu_memory_utilization == 0.75


ROLLOUT = OmegaConf.create({"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1})


def server(name, weights, share=0.5, shares=True, need=None):
    """A policy on an engine that reserves a share of its GPU; the memory of its trainer is nothing."""
    engine = Engine(ROLLOUT, weights * 1e9, (need or weights) * 1e9, share)
    return member(name, 0, work=weights, shares=shares, engine=engine)


def test_weights_must_fit_into_their_servers_share():
    assert placed([server("a", 4)], 1, 1, 10) == {"a": (["a"], 1, 1)}
    said = (
        r"placement=auto: the weights of a's server need 6.0 GB a rank, but its share of a GPU is 5.0 of 10.0 GB; policies.a."
        r"rollout.tensor_model_parallel_size=2 would fit, and so would policies.a.rollout.gpu_memory_utilization above 0.6$"
    )
    with pytest.raises(ConfigError, match=said):
        placed([server("a", 6)], 1, 2, 10)
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=4 would fit$"):
        placed([server("a", 12)], 1, 8, 10)


@pytest.mark.parametrize(
    "weights,gpus,remedy",
    [
        (6, 1, "GB; policies.a.rollout.gpu_memory_utilization above 0.6 would fit$"),  # two ranks have no place
        (12, 2, "GB; use a larger cluster or a smaller model$"),
    ],
)
def test_no_more_ranks_are_suggested_than_there_are_gpus(weights, gpus, remedy):
    with pytest.raises(ConfigError, match=remedy):
        placed([server("a", weights)], 1, gpus, 10)


@pytest.mark.parametrize(
    "members,said",
    [
        # half of 10 GB, divided by need: 2.5 GB for each
        ([server("a", 3), server("b", 2, need=3)], 
         r"a's server need 3.0 GB a rank, .* as 2 share it, is 2.5 of 10.0 GB; use a larger cluster, or give each a share of its "
         r"own: policies.b.rollout.gpu_memory_utilization above 0.2, policies.a.rollout.gpu_memory_utilization above 0.3$"),
        # b takes .3 of the GPU for itself, and leaves .2
        ([server("a", 3), server("b", 2, 0.3, shares=False)], r"a's server need 3.0 GB .* is 2.0 of 10.0 GB; use a larger cluster, or"),
        # together they take the whole GPU
        ([server("a", 4.5), server("b", 4.5)], r"a's server need 4.5 GB .* is 2.5 of 10.0 GB; use a larger cluster$"),
        # b takes all that there is
        ([server("a", 3), server("b", 2, 0.5, shares=False)], r"b, a must share a GPU, and .* leaves nothing for a's server; lower or unset"),
    ],
)  # fmt: skip
def test_members_that_would_starve_each_other_do_not_share_a_gpu(members, said):
    assert set(placed(members, 1, 2, 10)) == {"a", "b"}
    with pytest.raises(ConfigError, match=said):
        placed(members, 1, 1, 10)


@pytest.mark.slow
def test_the_weights_are_the_models(config, monkeypatch):
    monkeypatch.setattr("marl.cluster.session.fitting_platform", lambda device: None)
    words = ("hardware=gpu", "resources.placement=auto", "actor_rollout_ref.rollout.dtype=float32")
    setup = prepare(config(*words), Cluster(1, 2, 80e9))
    (first, _) = members_of(setup, 80e9)
    assert first.engine.weights == 4 * setup.sizes["alice"].parameters and first.engine.share == 0.6


def test_without_a_described_cluster_it_is_the_runs_own(config):
    setup = prepare(config("resources.placement=auto", "trainer.n_gpus_per_node=2"))
    assert setup.pools == {"alice": PoolSize(1, 1), "carol": PoolSize(1, 1)}
    one = prepare(config("resources.placement=auto", "resources.one_process=true"))
    assert one.pools == {"shared": PoolSize(1, 1)}


def test_gpus_that_are_not_here_must_be_described(config, monkeypatch):
    monkeypatch.setattr("marl.preflight.auto_placement.card_bytes", lambda device: None)
    elsewhere = config("trainer.device=cuda")
    with pytest.raises(ConfigError, match=r"needs to know a GPU's memory.*marl plan --cluster 2x8x80GB"):
        cluster_of(elsewhere)


def test_pools_have_names_of_their_own():
    critic = Member("a", True, lambda ranks: Memory(), 1.0, 64)
    assert names_of([Group([member("a_critic", 1)]), Group([critic])]) == ["a_critic", "a_critic_pool"]
