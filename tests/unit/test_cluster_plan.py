"""``marl plan``: pools on a cluster that is not there, what does not fit, and a remedy that does."""

import re
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from marl.commands import plan
from marl.config.errors import ConfigError
from marl.config.placement import PoolSize
from marl.preflight.cluster_plan import Cluster, cluster_plan
from marl.preflight.memory_plan import Room, remedy_for_weights, room_for_weights
from marl.preflight.plan_report import peaks_of, pool_members
from marl.preflight.prepare import prepare


@pytest.fixture
def words(cold_assets, tmp_path):
    return [f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "--config-name=quickstart"]


@pytest.fixture
def setup(compose_config, cold_assets):
    return lambda *overrides: prepare(compose_config(f"assets={cold_assets}", *overrides))


@pytest.mark.parametrize(
    "words", ["", "8x80GB", "2x8x80", "2x0x80GB", "0x8x80GB", "2x8x0GB", "2x8x80GBs", "ax8x80GB", "1x1x1GB@0TFLOPS"]
)
def test_a_cluster_that_is_no_cluster_is_refused(words):
    with pytest.raises(
        ConfigError, match=r"--cluster .*expected machines x GPUs of each x memory of a GPU, as in 2x8x80GB"
    ):
        Cluster.of(words)


def test_a_cluster_is_read():
    assert Cluster.of("2x8x80GB") == Cluster(2, 8, 80e9) and Cluster.of("1x1x0.5gb").card == 0.5e9
    assert Cluster.of("2x8x80GB@400TFLOPS") == Cluster(2, 8, 80e9, 400e12)


def test_pools_are_placed_with_their_members_and_what_is_left(setup):
    pools = "resources.pools={big:{gpus:4,nodes:2,policies:[alice]},small:{policies:[carol],critics:[central]}}"
    text, problems = cluster_plan(setup("learner=mappo", pools), Cluster(2, 5, 80e9))
    assert problems == [] and "placement (free GPUs: 1):" in text
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert ["big", "alice", "2 x 4", "0,1"] in [row[:4] for row in rows]
    assert ["small", "carol,central critic", "1 x 1", "0"] in [row[:4] for row in rows]


def test_what_finds_no_machine_is_named_with_what_would(setup):
    text, (problem,) = cluster_plan(setup("trainer.n_gpus_per_node=4"), Cluster(1, 6, 80e9))
    assert "pool 'carol' asks for 1 x 4 ranks" in problem and "8 of 6 GPUs" in problem
    assert "resources.placement=colocated would" in problem and f"does not fit: {problem}" in text
    _, (wide,) = cluster_plan(setup("trainer.n_gpus_per_node=4"), Cluster(4, 2, 80e9))
    assert "fewer ranks a node and more nodes would" in wide


@pytest.mark.slow
def test_a_pool_that_is_too_large_for_its_gpus_gets_a_size_that_fits(setup):
    """The remedy is tried: that size fits, and the next smaller one does not."""
    options = ("actor_rollout_ref.rollout.max_num_seqs=1", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64")

    def peak(gpus):
        made = setup(*options, f"resources.pools={{p:{{gpus:{gpus},policies:[alice]}}}}")
        return peaks_of(*pool_members(made, None))["p"]

    sizes = {gpus: peak(gpus) for gpus in (1, 2, 3)}
    assert sizes[1] > sizes[2] > sizes[3]
    card = (sizes[2] + sizes[3]) / 2
    pool = "resources.pools={p:{gpus:1,policies:[alice]}}"
    _, problems = cluster_plan(setup(*options, pool), Cluster(1, 8, card))
    said = next(problem for problem in problems if "pool 'p'" in problem)
    assert "resources.pools.p={gpus:3,nodes:1} would fit" in said
    assert not any("'p'" in p for p in cluster_plan(setup(*options, pool, said.split()[-3]), Cluster(1, 8, card))[1])
    # of a pool that no key has named before, too
    assert setup(*options, "resources.pools.alice={gpus:3,nodes:1}").pools["alice"] == PoolSize(3, 1)


def test_members_of_named_pools_are_not_told_to_share_one(setup):
    named = "resources.pools={a:{gpus:4,policies:[alice]},b:{gpus:4,policies:[carol]}}"
    _, (problem,) = cluster_plan(setup(named), Cluster(1, 4, 80e9))
    assert "colocated" not in problem and "fewer ranks a node and more nodes would fit" in problem


def test_a_share_that_is_too_small_for_its_servers_weights_does_not_fit():
    size = SimpleNamespace(parameters=32.8e9)
    judge = {"dtype": "bfloat16", "gpu_memory_utilization": 0.6, "pipeline_model_parallel_size": 1, "engine_kwargs": {}}
    for name, ranks, room in (("vllm", 1, (65.6e9, 48e9)), ("vllm", 2, None), ("hf", 1, None)):
        rollout = OmegaConf.create(judge | {"name": name, "tensor_model_parallel_size": ranks})
        assert room_for_weights(rollout, size, 80e9) == (room and pytest.approx(room))


@pytest.fixture
def starved(setup, monkeypatch):
    """The error about servers' weights, where a GPU is so many times the weights of one."""
    monkeypatch.setattr("marl.cluster.session.fitting_platform", lambda device: None)

    def starved(times, *overrides):
        made = setup("hardware=gpu", *overrides)
        card = times * 2 * made.sizes["alice"].parameters
        return [said for said in cluster_plan(made, Cluster(1, 1, card))[1] if "the weights of its server" in said]

    return starved


def test_adapters_have_one_server_together(starved):
    (said,) = starved(1.25, "sharing=lora", "actor_rollout_ref.rollout.dtype=bfloat16")
    assert said.endswith("; actor_rollout_ref.rollout.gpu_memory_utilization above 0.8 would fit")


@pytest.mark.slow
def test_servers_that_share_a_gpu_get_shares_that_fit(starved):
    words = ("resources.placement=colocated", "actor_rollout_ref.rollout.dtype=bfloat16")
    said = starved(2.5, *words)
    assert (
        len(said) == 2 and "its own pool, as resources.placement=separate does, or each a share of its own: " in said[0]
    )
    shares = re.findall(r"(policies\.\S+) above ([\d.]+)", said[0])
    assert [name.split(".")[1] for name, _ in shares] == ["alice", "carol"] and said[0].split("; ")[1] == said[1].split(
        "; "
    )[1]
    assert starved(2.5, *words, *(f"+{key}={float(share) + 0.01}" for key, share in shares)) == []
    assert all(problem.endswith("as resources.placement=separate does") for problem in starved(2.1, *words))


def test_a_share_of_nothing_has_a_remedy_too():
    rollout = OmegaConf.create({"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1})
    said = remedy_for_weights(Room(8e9, 0.0), rollout, 80e9, 0.9, 8, "policies.a")
    assert said == "policies.a.rollout.gpu_memory_utilization above 0.1 would fit"


def test_a_pool_that_no_number_of_ranks_saves_says_so(setup):
    _, problems = cluster_plan(setup(), Cluster(1, 4, 1e3))
    assert len(problems) == 2 and all("more ranks do not help" in problem for problem in problems)


@pytest.mark.slow
def test_the_command_prints_the_plan_and_its_code_says_whether_it_fits(words, capsys):
    assert plan.main(["--cluster", "1x2x80GB", *words]) == 0
    said = capsys.readouterr().out
    assert "a step: " in said and "memory of one rank" in said and "placement (free GPUs: 0)" in said
    assert plan.main([*words, "--cluster=1x1x80GB"]) == 1 and "does not fit: pool" in capsys.readouterr().out
    assert plan.main(["--cluster", "eight", *words]) == 2 and "as in 2x8x80GB" in capsys.readouterr().err
    assert plan.main(["--cluster"]) == 2


def test_without_a_cluster_the_plan_is_of_this_machine(words, capsys):
    assert plan.main(words) == 0 and "placement" not in capsys.readouterr().out


def test_the_cluster_is_taken_out_of_the_words():
    assert plan.split(["a=1", "--cluster", "1x1x1GB", "b=2"]) == (["a=1", "b=2"], "1x1x1GB")
    assert plan.split(["--cluster=1x1x1GB"]) == ([], "1x1x1GB") and plan.split(["a=1"]) == (["a=1"], None)
