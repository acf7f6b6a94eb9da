"""Everything in one process, without Ray: equal to a run through Ray, and the place to look closely at gradients."""

import os
import subprocess
import sys

import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from marl.controller.batching import joint_batch
from marl.learners import spread
from marl.main import run
from tests.stack.builders import gradient, numbers
from tests.stack.conftest import SMALL


@pytest.mark.parametrize("learner", ["mappo"])
def test_its_results_are_those_of_a_run_through_ray(cluster, compose_config, cold_assets, tmp_path, learner):
    results = []
    for number, where in enumerate(("resources.one_process=true", "resources.placement=separate")):
        steps = []
        config = compose_config(
            f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path / str(number)}", "trainer.total_training_steps=3",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=1", f"learner={learner}", where, *SMALL,
        )  # fmt: skip
        run(config, lambda step, total, metrics, steps=steps: steps.append(metrics))
        results.append(numbers(steps))
    assert len(results[0]) == 3 and len(results[0][0]) > 10
    assert results[0] == results[1], "to the last bit"


def test_it_needs_no_ray(tmp_path, cold_assets):
    """The driver has started no cluster, and a breakpoint in a worker, a runner and a learner stops it."""
    code = f"""
import sys, ray, marl.main as main
from marl.learners.grpo import GRPO
from marl.modules.workers.policy_worker import PolicyWorker
from marl.runners.debate import Debate
seen = set()
sys.breakpointhook = lambda *a, **k: seen.add(sys._getframe(1).f_code.co_qualname)
def stop(cls, name):
    original = getattr(cls, name)
    exec(f"def {{name}}(self, *a, **k):\\n    breakpoint()\\n    return original(self, *a, **k)", space := dict(original=original))
    space[name].__qualname__ = f"{{cls.__name__}}.{{name}}"
    space[name].__code__ = space[name].__code__.replace(co_qualname=f"{{cls.__name__}}.{{name}}")
    for key in vars(original): setattr(space[name], key, vars(original)[key])
    setattr(cls, name, space[name])
for cls, name in ((GRPO, "assign_credit"), (PolicyWorker, "update_actor"), (Debate, "peers")): stop(cls, name)
code = main.main(["--config-name", "quickstart", "assets={cold_assets}", "trainer.default_local_dir={tmp_path}",
    "resources.one_process=true", "trainer.total_training_steps=1", *{SMALL!r}])
assert code == 0 and not ray.is_initialized()
print(sorted(seen))
"""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-1] == "['Debate.peers', 'GRPO.assign_credit', 'PolicyWorker.update_actor']"


def prepared(live, pack=False, policy="alice"):
    """Rows of one policy, ready to train, with a different advantage for every turn."""
    trainer = live.trainer
    batch = joint_batch(live.episodes(), ["alice", "carol"], trainer.temperatures, pack_turns=pack)
    rows = batch.rows[policy]
    rows["advantages"] = spread(torch.linspace(-1, 1, batch.mask_ERA.numel()).view(batch.mask_ERA.shape), rows)
    rows["old_log_probs"] = live.wait(trainer.policies[policy].compute_log_prob(rows))["log_probs"]
    return rows


@pytest.mark.parametrize("padding", ["false", "true"])
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
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",  # many micro-batches, one gradient
        "actor_rollout_ref.model.use_remove_padding=true",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    ],
)
def test_how_a_batch_is_cut_and_laid_out_changes_no_gradient(alone, override):
    plain = alone()
    rows = prepared(plain)
    expected, _ = gradient(plain, rows)
    other = alone(override)
    got, _ = gradient(other, rows)
    assert float(expected.norm()) > 0.01 and float((got - expected).abs().max()) <= 2e-6


@pytest.mark.parametrize("server,low,high", [("bfloat16", 0.0, 0.05), ("float32", 1e-4, 0.5)])
def test_in_bfloat16_servers_and_trainer_stay_near(alone, server, low, high):
    """A trainer in half precision and a server in full precision differ; both in half, hardly."""
    half = "{param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"
    live = alone(
        f"actor_rollout_ref.actor.fsdp_config.mixed_precision={half}", f"actor_rollout_ref.rollout.dtype={server}"
    )
    metrics = [live.step(), live.step()][-1]
    assert low <= metrics["agent/alice/log_prob_gap_max"] < high and metrics["agent/alice/grad_norm"] > 0


@pytest.mark.parametrize("mode", sorted(set(POLICY_LOSS_REGISTRY) - {"bypass_mode"}))
def test_every_loss_of_verl_runs_by_its_key_and_for_one_policy_alone(alone, mode):
    needed = ["+policies.alice.actor.policy_loss.dro_beta=0.1"] if mode == "dro" else []
    live = alone(f"+policies.alice.actor.policy_loss.loss_mode={mode}", *needed)
    assert live.trainer.policies["carol"].actor.policy_loss.loss_mode == "vanilla"
    live.step()
    metrics = live.step()
    assert metrics["agent/alice/grad_norm"] > 0 and metrics["agent/carol/grad_norm"] > 0


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
