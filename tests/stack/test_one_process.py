"""Everything in one process, without Ray: equal to a run through Ray, and the place to look closely at gradients."""

import functools
import gc
import itertools
import sys
import threading
import time
import weakref

import pytest
import ray
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from marl.cluster.workers.policy_worker import PolicyWorker
from marl.learners.grpo import GRPO
from marl.main import run
from marl.runners.debate import Debate
from marl.runners.episode import LiveEpisode
from marl.utils import garbage
from tests.builders import slow_but
from tests.stack.builders import VARIED, gradient, numbers, prepared
from tests.stack.conftest import SMALL


def test_a_step_is_that_of_a_run_through_ray(live, alone):
    """From a checkpoint of that run: each number, and the weights that the step leaves."""
    there = live.trainer
    live.step()
    live.wait(there.save())
    saved = there.folder / f"global_step_{there.step_number}"
    here = alone("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    here.wait(here.trainer.resume())
    here.wait(here.trainer.sync_weights())
    assert here.trainer.step_number == there.step_number
    batch, results, digests = next(iter(there.loader)), [], []
    for one in (live, here):
        one.trainer.step_number += 1
        results.append(numbers([one.wait(one.trainer.step(batch))])[0])
        digests.append([one.wait(group.weight_digest(seed=0)) for group in one.trainer.policies.values()])
    assert len(results[0]) > 10 and results[0] == results[1], "to the last bit"
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_its_results_are_those_of_a_run_through_ray(cluster, compose_config, cold_assets, tmp_path, placement):
    results = []
    for number, where in enumerate(("resources.one_process=true", f"resources.placement={placement}")):
        steps = []
        config = compose_config(
            f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path / str(number)}", "trainer.total_training_steps=3",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=1", "learner=mappo", where, *SMALL,
        )  # fmt: skip
        run(config, lambda step, total, metrics, steps=steps: steps.append(metrics))
        results.append(numbers(steps))
    assert len(results[0]) == 3 and len(results[0][0]) > 10
    assert results[0] == results[1], "to the last bit"


@pytest.mark.slow
def test_a_clock_that_is_set_back_changes_no_length(alone, monkeypatch):
    live, clock = alone(), itertools.count(time.time(), -3600.0)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    metrics = live.step()
    phases = [metrics[f"timing_s/{phase}"] for phase in ("collect", "log_probs", "update")]
    assert min(phases) > 0 and sum(phases) <= metrics["timing_s/step"] < 60
    assert 0 <= metrics["perf/overhead_share"] < 1 and metrics["perf/turns_per_second"] > 0


@pytest.mark.slow
def test_steps_leave_nothing_behind(alone, monkeypatch):
    """Tensors go with the step; what else it leaves in cycles is collected in the next one. Keys and values of a thousand steps
    would fill a machine."""
    monkeypatch.setattr(garbage, "SHARE", 1e9)  # at each chance
    monkeypatch.setattr(garbage, "_next", 0.0)
    live, held, episodes = alone(), [], []
    for _ in range(4):
        live.step()
        found = gc.get_objects()
        tensors = {x.data_ptr(): x.nbytes for x in found if type(x) is torch.Tensor}
        held.append(sum(tensors.values()))
        episodes.append(sum(type(x) is LiveEpisode for x in found))
        del found
    assert held[3] <= 1.1 * held[1], held
    assert episodes[3] <= 16, episodes


def parts_of(trainer):
    """Weak references to a trainer, its groups and the models of its workers and servers."""
    policies, critics = trainer.policies.values(), trainer.critics.groups.values()
    models = [policy.workers.worker.actor.engine.module for policy in policies]
    models += [policy.servers.server_handles[0]._target.model for policy in policies]
    models += [critic.workers.worker.engine.module for critic in critics]
    return [weakref.ref(part) for part in (trainer, *policies, *critics, *models)]


@pytest.mark.slow
def test_what_a_run_leaves_behind_is_collected(compose_config, cold_assets, tmp_path):
    """Runs of one process follow one another without its memory growing."""
    config = compose_config(
        f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "learner=mappo", "resources.one_process=true", *SMALL,
    )  # fmt: skip
    parts = parts_of(run(config))
    gc.collect()
    assert [type(part()).__name__ for part in parts if part() is not None] == []


def stop_in(monkeypatch, cls, name):
    """Put a breakpoint where a method begins; its registration with verl stays."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def stopping(*arguments, **options):
        breakpoint()
        return method(*arguments, **options)

    stopping.__code__ = stopping.__code__.replace(co_qualname=f"{cls.__name__}.{name}")
    monkeypatch.setattr(cls, name, stopping)


def test_it_needs_no_ray_and_a_breakpoint_stops_it_anywhere(alone, monkeypatch):
    """The driver asks Ray for nothing; a worker, a runner and a learner run in its thread."""

    def refuse(*arguments, **options):
        raise AssertionError("Ray was asked")

    for name in ("init", "get", "put", "wait"):
        monkeypatch.setattr(ray, name, refuse)
    seen, thread = set(), threading.get_ident()
    for cls, name in ((GRPO, "assign_credit"), (PolicyWorker, "update_actor"), (Debate, "peers")):
        stop_in(monkeypatch, cls, name)

    def hook(*arguments, **options):
        seen.add((sys._getframe(1).f_code.co_qualname, threading.get_ident()))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    live = alone()
    seen.clear()  # the checks before the start played the runner in a thread of their own
    live.step()
    assert seen == {(name, thread) for name in ("Debate.peers", "GRPO.assign_credit", "PolicyWorker.update_actor")}


WAYS_TO_FAIL = """
import os, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == 1:
        time.sleep(1000)
    if extra_info["index"] == 2:
        sys.exit(3)
    return float(extra_info["index"])
"""


def test_a_reward_function_that_hangs_or_exits_fails_its_texts_alone(alone, tmp_path):
    (tmp_path / "mine.py").write_text(WAYS_TO_FAIL)
    where = f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"
    live = alone(where, "runner=single_turn", "judge.timeout_s=0.2", "judge.processes=1")
    episodes = live.wait(live.trainer.controller.measure(live.tasks(), 1, 1))
    scores = [episode.turns[0].score for episode in episodes]
    assert [score.value for score in scores] == [0.0, 0.0, 0.0, 3.0]
    failures = [score.failure or "" for score in scores]
    assert "judge.timeout_s=0.2" in failures[1] and "SystemExit: 3" in failures[2]


@pytest.mark.parametrize("padding", slow_but(["false", "true"], "true"))
def test_packed_turns_have_the_gradient_of_unpacked_ones(alone, padding):
    live = alone(f"actor_rollout_ref.model.use_remove_padding={padding}", "actor_rollout_ref.rollout.n=4")
    apart, packed = prepared(live), prepared(live, pack=True)
    assert len(packed) < len(apart), "some turns share a row"
    tokens = [len(rows["input_ids"].values()) for rows in (apart, packed)]
    assert tokens[1] < 0.75 * tokens[0]
    (first, _), (second, _) = gradient(live, apart), gradient(live, packed)
    assert float(first.norm()) > 0.01 and float((first - second).abs().max()) <= 1e-6


@pytest.mark.parametrize(
    "override",
    [
        pytest.param(
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64", marks=pytest.mark.slow
        ),  # many micro-batches
        "actor_rollout_ref.model.use_remove_padding=true",
        pytest.param("actor_rollout_ref.model.enable_gradient_checkpointing=true", marks=pytest.mark.slow),
    ],
)
def test_how_a_batch_is_cut_and_laid_out_changes_no_gradient(alone, override):
    plain = alone()
    rows = prepared(plain)
    expected, _ = gradient(plain, rows)
    other = alone(override)
    got, _ = gradient(other, rows)
    assert float(expected.norm()) > 0.01 and float((got - expected).abs().max()) <= 2e-6


@pytest.mark.parametrize(
    "mode",
    slow_but(sorted(set(POLICY_LOSS_REGISTRY) - {"bypass_mode", "clip_cov", "kl_cov"}), "geo_mean"),
)
def test_the_number_of_micro_batches_changes_no_losss_gradient(alone, mode):
    """``clip_cov`` and ``kl_cov`` choose tokens within a micro-batch, as docs/configuration.md says."""
    loss = "actor_rollout_ref.actor.policy_loss"
    words = [f"{loss}.loss_mode={mode}", *([f"+{loss}.dro_beta=0.1"] if mode == "dro" else [])]
    plain = alone(*words)
    rows = prepared(plain)
    expected, _ = gradient(plain, rows)
    got, _ = gradient(alone(*words, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64"), rows)
    assert float(expected.norm()) > 0.01
    assert float((got - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    "server,low,high", [("bfloat16", 0.0, 0.05), pytest.param("float32", 1e-4, 0.5, marks=pytest.mark.slow)]
)
def test_in_bfloat16_servers_and_trainer_stay_near(alone, server, low, high):
    """A trainer in half precision and a server in full precision differ; both in half, hardly."""
    half = "{param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"
    live = alone(
        f"actor_rollout_ref.actor.fsdp_config.mixed_precision={half}",
        f"actor_rollout_ref.rollout.dtype={server}",
        *VARIED,
    )
    metrics = [live.step(), live.step()][-1]
    assert low <= metrics["agent/alice/log_prob_gap_max"] < high and metrics["agent/alice/grad_norm"] > 0


def test_actors_and_critics_step_all_their_parameters_in_one_call(alone):
    trainer = alone("learner=mappo").trainer
    engines = [group.workers.worker.actor.engine for group in trainer.policies.values()]
    engines += [group.workers.worker.engine for group in trainer.critics.groups.values()]
    assert len(engines) >= 3 and all(engine.optimizer.param_groups[0]["fused"] for engine in engines)


@pytest.mark.slow
def test_one_key_puts_trainer_and_server_in_bf16_over_full_weights(alone):
    live = alone("precision=bf16", "+policies.carol.precision=fp32", "learner=mappo")
    live.step()
    metrics, groups = live.step(), live.trainer.policies
    engines = {name: group.workers.worker.actor.engine for name, group in groups.items()}
    assert {name: engine._autocast_dtype for name, engine in engines.items()} == {
        "alice": torch.bfloat16,
        "carol": torch.float32,
    }
    assert {p.dtype for engine in engines.values() for p in engine.module.parameters()} == {torch.float32}
    served = {name: group.servers.server_handles[0]._target.model.dtype for name, group in groups.items()}
    assert served == {"alice": torch.bfloat16, "carol": torch.float32}
    (critic,) = live.trainer.critics.groups.values()
    assert critic.workers.worker.engine._autocast_dtype == torch.bfloat16
    assert groups["alice"].gap_alarm > 0.1 > groups["carol"].gap_alarm
    assert metrics["agent/alice/log_prob_gap_max"] <= 0.05 and metrics["agent/carol/log_prob_gap_max"] <= 1e-5
    assert metrics["agent/alice/grad_norm"] > 0 and metrics["agent/carol/grad_norm"] > 0


@pytest.mark.parametrize("mode", slow_but(sorted(set(POLICY_LOSS_REGISTRY) - {"bypass_mode"}), "kl_cov"))
def test_every_loss_of_verl_runs_by_its_key_and_for_one_policy_alone(alone, mode):
    needed = ["+policies.alice.actor.policy_loss.dro_beta=0.1"] if mode == "dro" else []
    live = alone(f"+policies.alice.actor.policy_loss.loss_mode={mode}", *needed, *VARIED)
    assert live.trainer.policies["carol"].actor.policy_loss.loss_mode == "vanilla"
    live.step()
    metrics = live.step()
    assert metrics["agent/alice/grad_norm"] > 0 and metrics["agent/carol/grad_norm"] > 0


@pytest.mark.slow
def test_sequences_weigh_alike_or_by_their_tokens(alone):
    """One answer of one token and one of three: 1:3 under token-mean, 1:1 under seq-mean-token-mean."""
    norms = {}
    for mode in ("token-mean", "seq-mean-token-mean"):
        live = alone(f"actor_rollout_ref.actor.loss_agg_mode={mode}", "actor_rollout_ref.actor.entropy_coeff=0")
        rows = prepared(live)
        lengths = rows["responses"].offsets().diff()
        _, metrics = gradient(live, rows)
        means = torch.stack([row.mean() for row in rows["advantages"].unbind()])
        weights = lengths / lengths.sum() if mode == "token-mean" else torch.full_like(means, 1 / len(means))
        norms[mode] = (metrics["actor/pg_loss"], -float((weights * means).sum()))
    for got, expected in norms.values():
        assert got == pytest.approx(expected, abs=1e-6)
    assert norms["token-mean"] != norms["seq-mean-token-mean"]
