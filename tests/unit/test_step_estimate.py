"""Operations of a step, by hand, and what a plan says of them."""

from dataclasses import replace

import pytest

from marl.preflight.cluster_plan import Cluster, cluster_plan
from marl.preflight.memory_plan import ModelSize
from marl.preflight.prepare import prepare
from marl.preflight.step_estimate import Row, Work, forward, sampled, seconds, training, work_of

SIZE = ModelSize(1100, 200, 2, 16, 32, 8, 50, 400, multiplied=1000, query_width=16)
# 10 tokens x 800 weights x 2, 4 answer tokens x 200 x 2, 10 x 10 / 2 pairs x 2 layers x 4 x 16
ONCE = 16000 + 1600 + 6400


def test_a_forward_pass_by_hand():
    assert forward(SIZE, Row(10, 4)) == ONCE == 24000


def test_a_trainer_leaves_out_the_last_mlp_where_nothing_is_read():
    size = replace(SIZE, last_mlp=300)  # 6 tokens x 300 weights x 2
    assert forward(size, Row(10, 4)) == ONCE - 3600 and sampled(size, Row(10, 4)) == ONCE
    assert training(size, Row(10, 4), False) == 3 * (ONCE - 3600)
    work = work_of(
        size, 1, Row(10, 4), 1, turns=1, checkpointing=False, log_probs=True, reference=False, probe=Row(10, 4)
    )
    assert work == Work(ONCE, ONCE - 3600, 0, 3 * (ONCE - 3600), 2 * ONCE - 3600)


def test_a_backward_pass_is_twice_that_and_checkpointing_once_more():
    assert training(SIZE, Row(10, 4), False) == 3 * ONCE and training(SIZE, Row(10, 4), True) == 4 * ONCE


def test_the_phases_of_a_policy():
    options = {"turns": 7, "checkpointing": False, "log_probs": True, "reference": False}
    assert work_of(SIZE, 5, Row(10, 4), 2, **options) == Work(7 * ONCE, 5 * ONCE, 0, 30 * ONCE)
    probed = work_of(SIZE, 5, Row(10, 4), 2, **options, probe=Row(10, 4))
    assert probed.probe == 2 * ONCE and probed.total == (7 + 5 + 30 + 2) * ONCE


def test_members_of_a_pool_add_up_and_pools_work_at_the_same_time():
    work = {"shared": [Work(update=6.0), Work(sampling=2.0)], "own": [Work(update=3.0)]}
    assert seconds(work, {"shared": 2, "own": 1}, 2.0) == 2.0
    assert seconds(work, {"shared": 8, "own": 1}, 2.0) == 1.5


@pytest.fixture
def setup(compose_config, cold_assets):
    return lambda *overrides: prepare(compose_config(f"assets={cold_assets}", *overrides))


def test_a_plan_says_how_long_a_step_takes_at_a_rate(setup):
    text, _ = cluster_plan(setup(), Cluster(1, 2, 80e9))
    assert "work of a step at most, without critics, in 10^12 operations:" in text
    fast, _ = cluster_plan(setup(), Cluster(1, 2, 80e9, 400e12))
    assert "s at 400 x 10^12 a second and rank:" in fast


def numbers(text):
    (line,) = [line.split() for line in text.splitlines() if line.strip().startswith("alice ") and "." in line][:1]
    return [float(number) for number in line[1:6]]


def test_log_probs_of_servers_and_a_missing_reference_cost_nothing(setup):
    from marl.preflight.plan_report import work_text

    sampling, log_probs, reference, update, probe = numbers(work_text(setup("learner=grpo")))
    assert probe == 0 and log_probs == reference == 0 and update > 2.0 * sampling > 0
    keys = ("controller.old_log_probs=trainer", "actor_rollout_ref.actor.use_kl_loss=true")
    again = numbers(work_text(setup("learner=grpo", *keys)))
    once = pytest.approx(update / 3, abs=1e-6)
    assert again == [sampling, once, once, update, 0]


@pytest.mark.slow
def test_agents_that_are_not_trained_sample_too(setup):
    from marl.preflight.plan_report import work_by_pool

    trained = work_by_pool(setup())["carol"][0][1]
    frozen = work_by_pool(setup("agents.carol.trainable=false", "credit=own"))["carol"][0][1]
    assert frozen.sampling == trained.sampling > 0 and frozen.total == frozen.sampling
    half = work_by_pool(setup("learner.train_rounds=[1]", "credit=own"))["carol"][0][1]
    assert half.sampling == trained.sampling and half.update == trained.update / 2


@pytest.mark.slow
def test_a_probe_is_a_part_of_the_plan(setup):
    from marl.preflight.plan_report import peaks_of, pool_members, work_by_pool

    by_digest, by_probe = setup("actor_rollout_ref.rollout.response_length=20"), setup(
        "actor_rollout_ref.rollout.response_length=20", "resources.weight_check=probe"
    )  # fmt: skip
    ((_, work),) = work_by_pool(by_probe)["alice"]
    ((_, none),) = work_by_pool(by_digest)["alice"]
    assert none.probe == 0 and 0 < work.probe < 2 * work.sampling / by_probe.config.data.train_batch_size
    members, _ = pool_members(by_probe, None)
    ((_, memory),) = members["alice"]
    assert 0 < memory.probe < memory.working
    awake = peaks_of({"p": [("alice", replace(memory, activations=0, logits=0, server=1e9))]}, {"p": True})["p"]
    assert awake == memory.kept + 1e9 + memory.probe, "the servers are awake meanwhile"
