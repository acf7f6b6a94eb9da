"""The work that a plan counts is what an update does: torch's own count of it."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from marl.batch.rows import rows_of
from marl.modules import pretrained
from marl.platform.shapes import key_width
from marl.preflight.model_checks import size_of
from marl.preflight.step_estimate import Row, forward, training
from tests.stack.builders import prepared


def test_an_update_and_a_forward_pass_are_counted_within_15_percent(alone):
    live = alone("actor_rollout_ref.model.enable_gradient_checkpointing=false", "controller.pack_turns=false")
    rows, group = prepared(live), live.trainer.policies["alice"]
    lengths = rows["input_ids"].offsets().diff().tolist()
    usual = max(set(lengths), key=lengths.count)  # the engine pads others to the longest of a micro-batch
    rows = rows_of(rows, [row for row, length in enumerate(lengths) if length == usual])
    assert len(rows) >= 4
    size = size_of(pretrained.load_config(group.config.actor_rollout_ref.model, "model"), "model.path")
    answers = rows["responses"].offsets().diff().tolist()
    shapes = [Row(key_width(usual), answer) for answer in answers]  # and all of them on a CPU
    with FlopCounterMode(display=False) as read:
        live.wait(group.compute_log_prob(rows))
    with FlopCounterMode(display=False) as updated:
        live.wait(group.update_actor(rows))
    assert sum(forward(size, row) for row in shapes) == pytest.approx(read.get_total_flops(), rel=0.15)
    epochs = group.actor.ppo_epochs
    counted = epochs * sum(training(size, row, False) for row in shapes)
    assert counted == pytest.approx(updated.get_total_flops(), rel=0.15)
