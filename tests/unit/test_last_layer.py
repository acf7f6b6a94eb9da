"""The last layer's MLP at the positions that are read, against verl's at all positions."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2Config
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from marl.platform.engine import CPUEngineWithLMHead
from marl.platform.last_layer import last_mlp
from tests.head_engine import SIZES, a_step, forward, micro_batch


def make(config=None):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or Qwen2Config(**SIZES))


def recomputing():
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_it_sees_counted_tokens_alone(packed):
    model, sizes, batch = make(), [], micro_batch(packed)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda *parts: sizes.append(parts[1][0].shape[:2].numel()))
    forward(CPUEngineWithLMHead, model, batch)
    first, last = sizes[-2:]
    assert last == 8 and int(batch["loss_mask"].values().sum()) == 6 and first >= len(batch["input_ids"].values())


@pytest.mark.parametrize("make_model", [make, recomputing])
@pytest.mark.parametrize("mask,prompts", [(((1, 1, 0, 1), (1, 1)), (1, 5)), (((1,), (0, 0)), (1, 2))])
def test_a_step_is_that_of_all_positions(make_model, mask, prompts):
    """With layers that the backward pass computes again, and with fewer tokens than rows that are computed."""
    mask, prompts = (*mask, (0,)), (*prompts, 2)
    steps = [
        a_step(cls, make_model(), micro_batch(True, mask, prompts))
        for cls in (FSDPEngineWithLMHead, CPUEngineWithLMHead)
    ]
    assert float(steps[0][2].norm()) > 0.01
    for theirs, mine in zip(*steps, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-6, rtol=1e-6)  # sums in another order


def test_a_forward_pass_of_which_nothing_is_expected_computes_all():
    model, ids = make(), torch.arange(24).view(2, 12)
    forward(CPUEngineWithLMHead, model, micro_batch(False))
    assert torch.equal(model(ids).logits, make()(ids).logits)


def test_experts_are_left_alone():
    """They are chosen for a batch, and count what they were chosen for."""
    assert last_mlp(make()) is not None
    assert last_mlp(make(MixtralConfig(**SIZES, num_local_experts=2))) is None
