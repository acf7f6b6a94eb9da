"""Pools of unequal size: who lives where, what is refused, and on which machines they fit."""

import pytest
import ray

from marl.cluster.launch import check_cluster
from marl.cluster.layout import policy_configs
from marl.cluster.session import use_platform
from marl.config.errors import ConfigError
from marl.config.placement import PoolSize, Unplaceable, must_fit
from marl.config.rules import check
from marl.preflight.compatibility import check_facts, choose_credit
from marl.preflight.memory import batch_of
from marl.preflight.prepare import prepare
from marl.run_setup import Setup

UNEQUAL = "resources.pools={big:{gpus:4,nodes:2,policies:[alice]},small:{gpus:1,policies:[carol],critics:[central]}}"


@pytest.fixture
def setup(compose_config, cold_assets):
    def build(*overrides):
        config = compose_config(f"assets={cold_assets}", *overrides)
        check(config)
        choose_credit(config)
        made = Setup.of(config)
        check_facts(made)
        return made

    return build


def test_pools_have_their_own_sizes_and_members(setup):
    made = setup("learner=mappo", UNEQUAL)
    assert made.pools == {"big": PoolSize(4, 2), "small": PoolSize(1, 1)}
    assert made.pool_by_policy == {"alice": "big", "carol": "small"} and made.pool_by_critic == {"central": "small"}
    assert made.ranks_by_pool == {"big": 8, "small": 1}


CASES = {
    "a size left open is the run's": (
        ["resources.pools={p:{policies:[alice]}}", "trainer.n_gpus_per_node=2", "trainer.nnodes=3"],
        {"p": PoolSize(2, 3), "carol": PoolSize(2, 3)},
    ),
    "a key at a time": (
        ["+resources.pools.p.gpus=2", "+resources.pools.p.policies=[alice,carol]"],
        {"p": PoolSize(2, 1)},
    ),
    "others share a pool where they are colocated": (
        ["resources.placement=colocated", "learner=ippo", "resources.pools={p:{gpus:2,policies:[carol]}}"],
        {"shared": PoolSize(1, 1), "p": PoolSize(2, 1)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sizes(setup, case):
    overrides, pools = CASES[case]
    assert setup(*overrides).pools == pools


REFUSED = {
    "resources.pools={p:{policies:[carol]}} agents.carol.trainable=false credit=own "
    "+policies.carol.endpoint={base_url:'http://localhost:1/v1',model:m}": [
        "resources.pools.p.policies=['carol']: this run loads no policy 'carol'", "without policies of endpoints"
    ],
    "resources.pools={p:{policies:[alise]}}": ["resources.pools.p.policies=['alise']", "Did you mean 'alice'"],
    "resources.pools={p:{policies:[alice]},q:{policies:[alice]}}": ["resources.pools.q.policies: 'alice' is in resources.pools.p.policies too"],
    "resources.pools={p:{policies:[alice,alice]}}": ["'alice' is in resources.pools.p.policies too"],
    "resources.pools={p:{gpus:2}}": ["resources.pools.p: it has no members", "leave it out"],
    "resources.pools={p:{critics:[central]},q:{critics:[central]}} learner=mappo": [
        "resources.pools.q.critics: 'central' is in resources.pools.p.critics too"
    ],
    "resources.pools={p:{policies:[alice],critics:[centrl]}} learner=mappo": ["has no critic 'centrl'", "central"],
    "resources.pools={p:{policies:[alice],critics:[central]}}": ["has no critic 'central'; expected none"],
    "resources.pools={p:{gpus:3,policies:[alice]}} actor_rollout_ref.rollout.tensor_model_parallel_size=3": [
        "a policy's 1 ranks (trainer.nnodes x trainer.n_gpus_per_node) do not divide"
    ],
    "resources.pools={p:{gpus:3,policies:[alice,carol]}} +policies.carol.rollout.tensor_model_parallel_size=2": [
        "policies.carol", "3 ranks (resources.pools.p.gpus x nodes)", "3 % 2 = 1"
    ],
    "resources.pools={p:{gpus:6,nodes:2,policies:[alice,carol]}} actor_rollout_ref.rollout.tensor_model_parallel_size=4": [
        "servers of 4 ranks", "across machines of 6 ranks each", "resources.pools.p.gpus x nodes", "servers of 2"
    ],
    "resources.pools={p:{gpus:8,nodes:3,policies:[alice,carol]}} actor_rollout_ref.rollout.tensor_model_parallel_size=12": [
        "servers of 12 ranks", "fill whole machines"
    ],
    "resources.pools={p:{gpus:0,policies:[alice]}}": ["resources.pools.p.gpus=0", "at least 1"],
    "resources.pools={p:{gpus:65,policies:[alice]}}": ["resources.pools.p.gpus=65", "at most 64"],
    "resources.pools={p:{gpus:2,policies:[alice]}} resources.one_process=true": ["one rank", "resources.pools.p.gpus=2"],
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_placed_is_refused_with_a_remedy(setup, words):
    with pytest.raises(ConfigError) as caught:
        setup(*words.split())
    assert all(part in str(caught.value) for part in REFUSED[words]), caught.value


def test_a_policys_workers_servers_and_batches_have_its_pools_size(setup):
    config = setup("learner=mappo", UNEQUAL, "trainer.n_gpus_per_node=2").config
    alice, carol = policy_configs(config, ["alice", "carol"], "run", 5).values()
    assert (alice.trainer.n_gpus_per_node, alice.trainer.nnodes) == (4, 2)
    assert (carol.trainer.n_gpus_per_node, carol.trainer.nnodes) == (1, 1)
    assert alice.actor_rollout_ref.rollout.n_gpus_per_node == 4
    assert config.trainer.n_gpus_per_node == 2, "a copy"
    batch = {policy.policy: policy for policy in batch_of(config, {"alice": 2, "carol": 2}).policies}
    assert (batch["alice"].ranks, batch["alice"].servers, batch["carol"].ranks) == (8, 8, 1)


def test_wide_nodes_are_placed_first_and_where_the_least_remains():
    must_fit({"one": PoolSize(1, 1), "six": PoolSize(6, 1), "four": PoolSize(4, 2), "two": PoolSize(2, 1)}, [8, 8, 1])
    must_fit({}, [])


def test_nodes_that_fit_on_no_machine_are_named():
    with pytest.raises(Unplaceable, match=r"pool 'b' asks for 2 x 5 ranks.*leave free is 2, 3 by machine"):
        must_fit({"a": PoolSize(6, 1), "b": PoolSize(5, 2)}, [8, 8])


def test_a_cluster_with_enough_ranks_on_machines_that_are_too_small_is_refused(
    compose_config, cold_assets, monkeypatch
):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 4.0}}] * 2)
    use_platform("cpu")
    words = "resources.pools={wide:{gpus:5,policies:[alice]}}"
    with pytest.raises(
        ConfigError, match=r"pool 'wide' asks for 1 x 5 ranks.*machines of 4, 4 CPU.*Use fewer ranks a node"
    ):
        check_cluster(prepare(compose_config(f"assets={cold_assets}", words)))
    check_cluster(prepare(compose_config(f"assets={cold_assets}", words.replace("5", "3"))))
