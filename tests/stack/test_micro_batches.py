"""Micro-batches of sorted rows give what verl's own cutting gives: losses, gradients, norms, weights and outputs."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from marl.batch.rows import rows_of
from marl.platform.micro_batches import cuts, even_cuts
from marl.utils.ragged import jagged
from tests.stack.builders import gradient, parameters

PROMPTS = (30, 3, 12, 7, 25, 4, 9, 16, 5, 28, 6, 11)
ANSWERS = (2, 9, 1, 14, 6, 3, 11, 5, 8, 1, 4, 12)
BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=96"


def ragged_rows():
    """Rows of very unequal lengths, in no order."""
    draw = torch.Generator().manual_seed(0)
    prompts, answers = (
        [torch.randint(3, 20, (n,), generator=draw).tolist() for n in lengths] for lengths in (PROMPTS, ANSWERS)
    )
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    numbers = [torch.randn(n, generator=draw).tolist() for n in ANSWERS]
    mask = jagged([[1] * n for n in ANSWERS], torch.long)
    return TensorDict(
        {
            "prompts": jagged(prompts, torch.long), "responses": jagged(answers, torch.long),
            "input_ids": jagged(whole, torch.long), "position_ids": jagged([range(len(row)) for row in whole], torch.long),
            "response_mask": mask, "loss_mask": mask, "advantages": jagged(numbers, torch.float32),
            "temperature": torch.linspace(0.7, 1.3, len(PROMPTS)),
        },
        batch_size=[len(PROMPTS)],
    )  # fmt: skip


def as_verl_cuts(monkeypatch, engine):
    monkeypatch.setattr(engine, "forward_backward_batch", partial(FSDPEngine.forward_backward_batch, engine))


@pytest.fixture(params=[pytest.param("false", marks=pytest.mark.slow), "true"], ids=["padded", "packed"])
def live(request, alone):
    padding = f"model.use_remove_padding={request.param}"
    return alone(BUDGET, f"actor_rollout_ref.{padding}", "learner=ippo")


def actor(live):
    return live.trainer.policies["alice"].workers.worker.actor.engine


def micro_batches(monkeypatch, engine):
    """The lengths of the rows of every micro-batch, as they come."""
    found, step = [], engine.forward_step

    def watched(rows, **options):
        found.append(rows["input_ids"].offsets().diff().tolist())
        return step(rows, **options)

    monkeypatch.setattr(engine, "forward_step", watched)
    return found


def test_log_probs_gradients_and_losses_are_verls(live, monkeypatch):
    group, rows = live.trainer.policies["alice"], ragged_rows()
    output = live.wait(group.compute_log_prob(rows))
    rows["old_log_probs"] = output["log_probs"]
    ours, metrics = gradient(live, rows)
    as_verl_cuts(monkeypatch, actor(live))
    expected = live.wait(group.compute_log_prob(rows))
    for key in ("log_probs", "entropy"):
        assert output[key].offsets().equal(expected[key].offsets())
        torch.testing.assert_close(output[key].values(), expected[key].values(), atol=2e-6, rtol=0)
    theirs, their_metrics = gradient(live, rows)
    assert float(theirs.norm()) > 0.01 and float((ours - theirs).abs().max()) <= 1e-6
    assert metrics["loss"] == pytest.approx(their_metrics["loss"], abs=1e-6)


@pytest.mark.slow
def test_every_row_is_trained_once_with_rows_of_like_length(live, monkeypatch):
    rows, found = ragged_rows(), micro_batches(monkeypatch, actor(live))
    rows["old_log_probs"] = jagged([[-1.0] * n for n in ANSWERS], torch.float32)
    live.wait(live.trainer.policies["alice"].update_actor(rows))
    lengths = sorted((p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)), reverse=True)
    padded = not live.trainer.config.actor_rollout_ref.model.use_remove_padding
    ends = even_cuts(lengths, 96, padded, len(cuts(lengths, 96, padded)) - 1)
    assert found == [lengths[start:end] for start, end in pairwise(ends)] and len(found) > 2


@pytest.mark.slow
def test_weights_are_gathered_once_for_a_mini_batch(live, monkeypatch):
    engine, rows, sharded = actor(live), ragged_rows(), []
    rows["old_log_probs"] = jagged([[-1.0] * n for n in ANSWERS], torch.float32)

    def look():
        sharded.append({isinstance(parameter, DTensor) for parameter in engine.module.parameters()})

    step = engine.forward_step
    monkeypatch.setattr(engine, "forward_step", lambda *args, **options: look() or step(*args, **options))
    live.wait(live.trainer.policies["alice"].update_actor(rows))
    look()
    assert sharded[0] == sharded[-1] == {True} and len(sharded) > 3
    assert sharded[1:-1] == [{False}] * (len(sharded) - 2)


@pytest.mark.slow
def test_critics_read_and_learn_as_with_verls_cutting(live, monkeypatch):
    group, rows = live.trainer.critics.groups["alice"], ragged_rows()
    rows["read_at"] = jagged([[0, n - 1] for n in PROMPTS], torch.long)
    rows["value_mask"] = jagged([[1, 1]] * len(PROMPTS), torch.long)
    rows["returns"] = jagged([[n / 7, -n / 5] for n in ANSWERS], torch.float32)
    engine, results = group.workers.worker.engine, []
    found = micro_batches(monkeypatch, engine)
    for verls in (False, True):
        if verls:
            as_verl_cuts(monkeypatch, engine)
        rows["values"] = live.wait(group.compute_values(rows))
        kept = gradient_at_step(monkeypatch, engine)
        metrics = live.wait(group.update_critic(rows))
        results.append((rows["values"].values(), kept[0], torch.tensor(metrics["vf_loss"])))
    assert len(found) >= 12 and float(results[0][1].norm()) > 0.01
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "verls", [pytest.param(False, marks=pytest.mark.slow, id="sorted"), pytest.param(True, id="verl's, as on a GPU")]
)
def test_micro_batches_of_padding_alone_train_nothing(alone, monkeypatch, verls):
    """Five rows in two mini-batches are padded to six, and each is a micro-batch: verl's loss in bypass mode refuses the sixth,
    where other losses take it for 0."""
    words = ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=43", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    results, taken = [], rows_of(ragged_rows(), [0, 4, 9, 11, 0])
    taken["old_log_probs"] = taken["advantages"] * 0 - 3
    for bypass in ("false", "true"):
        live = alone(*words, f"algorithm.rollout_correction.bypass_mode={bypass}")
        if verls:
            as_verl_cuts(monkeypatch, actor(live))
        kept, found = gradient_at_step(monkeypatch, actor(live)), micro_batches(monkeypatch, actor(live))
        metrics = live.wait(live.trainer.policies["alice"].update_actor(taken))
        assert len(kept) == 2 and sorted(map(len, found)) == [1] * 6
        results.append((torch.stack(kept), metrics["actor/pg_loss"], metrics["actor/ppo_kl"]))
    assert min(float(gradient.norm()) for gradient in results[0][0]) > 0.01
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-7, rtol=0)
    assert results[1][1:] == pytest.approx(results[0][1:], abs=1e-6)


def gradient_at_step(monkeypatch, engine):
    """The gradient that the engine is about to apply; it is not applied."""
    kept = []

    def look():
        kept.append(torch.cat([p.grad.to_local().flatten().clone() for p in engine.module.parameters()]))
        return 0.0

    monkeypatch.setattr(engine, "optimizer_step", look)
    return kept


def test_weights_after_a_step_are_verls(alone, monkeypatch):
    rows, results = ragged_rows(), []
    rows["old_log_probs"] = jagged([[-1.0] * n for n in ANSWERS], torch.float32)
    for verls in (False, True):
        live = alone(BUDGET, "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "actor_rollout_ref.actor.optim.lr=1e-3")
        group, before = live.trainer.policies["alice"], parameters(live, "policies")
        if verls:
            as_verl_cuts(monkeypatch, actor(live))
        metrics = live.wait(group.update_actor(rows))
        results.append((metrics["grad_norm"], parameters(live, "policies")))
        assert any(float((new - old).abs().max()) > 1e-4 for new, old in zip(results[-1][1], before, strict=True))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5  # of 1e-3: Adam magnifies the rounding of gradients near 0
