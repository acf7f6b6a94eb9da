"""Sliced heads under FSDP: the gradients and steps of whole logits."""

import pytest
import torch

from marl.platform import sliced_head
from tests.builders import slow_but
from tests.stack.builders import gradient, parameters, prepared


@pytest.mark.parametrize("tied", slow_but([False, True], True), ids=["untied", "tied"])
def test_sliced_logits_have_the_gradient_and_the_step_of_whole_ones(alone, monkeypatch, tied):
    live = alone(
        f"+actor_rollout_ref.model.override_config.tie_word_embeddings={str(tied).lower()}",
        "actor_rollout_ref.actor.entropy_coeff=0.1", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    )  # fmt: skip
    rows, policy = prepared(live, pack=True), live.trainer.policies["alice"]
    engine = policy.workers.worker.actor.engine
    whole, before = gradient(live, rows)[0], live.wait(policy.compute_log_prob(rows))
    for name, value in {"SLICED_VOCABULARY": 0, "WHOLE_BYTES": 0, "SLICE_BYTES": 1, "MIN_SLICE": 64}.items():
        monkeypatch.setattr(sliced_head, name, value)
    calls, sliced = [], sliced_head._SlicedLogProbs.backward
    monkeypatch.setattr(
        sliced_head._SlicedLogProbs, "backward", staticmethod(lambda *args: calls.append(1) or sliced(*args))
    )
    del engine.head
    got, after = gradient(live, rows)[0], live.wait(policy.compute_log_prob(rows))
    assert calls and float(whole.norm()) > 0.01
    torch.testing.assert_close(got, whole, atol=1e-6, rtol=1e-6)
    for key in ("log_probs", "entropy"):
        torch.testing.assert_close(after[key].values(), before[key].values(), atol=1e-6, rtol=1e-6)
    first = parameters(live, "policies")
    live.wait(policy.update_actor(rows))
    assert any((a != b).any() for a, b in zip(first, parameters(live, "policies"), strict=True))
