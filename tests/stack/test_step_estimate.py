"""The work that a plan counts is what an update does: torch's own count of it, and the seconds that it takes."""

import time
from itertools import pairwise
from statistics import median

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from marl.batch.rows import rows_of
from marl.modules import pretrained
from marl.platform.micro_batches import cuts, even_cuts
from marl.platform.shapes import MIN_WIDTH
from marl.preflight.model_checks import size_of
from marl.preflight.plan_report import work_by_pool
from marl.preflight.prepare import prepare
from marl.preflight.step_estimate import Row, forward, training
from tests.stack.builders import prepared

PLAIN = ("actor_rollout_ref.model.enable_gradient_checkpointing=false", "controller.pack_turns=false")


def padded(rows, budget):
    """Rows as a CPU reads them: in micro-batches of at most so many tokens, each padded to the longest of its micro-batch."""
    ordered = sorted(rows, key=lambda row: -row.length)
    lengths = [row.length for row in ordered]
    boundaries = even_cuts(lengths, budget, True, len(cuts(lengths, budget, True)) - 1)
    groups = [ordered[start:end] for start, end in pairwise(boundaries)]
    return [Row(max(MIN_WIDTH, group[0].length), row.answer) for group in groups for row in group]


def counted(group, rows):
    """Operations of a forward pass over rows, and of an update."""
    size = size_of(pretrained.load_config(group.config.actor_rollout_ref.model, "model"), "model.path")
    lengths, answers = (rows[key].offsets().diff().tolist() for key in ("input_ids", "responses"))
    shapes = padded(list(map(Row, lengths, answers)), group.actor.ppo_max_token_len_per_gpu)
    update = group.actor.ppo_epochs * sum(training(size, row, False) for row in shapes)
    return sum(forward(size, row) for row in shapes), update


@pytest.mark.slow
@pytest.mark.parametrize("budget", [8192, 200])
def test_an_update_and_a_forward_pass_are_counted_within_15_percent(alone, budget):
    live = alone(*PLAIN, f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget}")
    rows, group = prepared(live), live.trainer.policies["alice"]
    lengths = rows["input_ids"].offsets().diff()
    rows = rows_of(rows, [*range(len(rows)), *[int(lengths.argmin())] * 8])
    assert lengths.max() > 1.5 * lengths.min(), "lengths are mixed"
    with FlopCounterMode(display=False) as read:
        live.wait(group.compute_log_prob(rows))
    with FlopCounterMode(display=False) as updated:
        live.wait(group.update_actor(rows))
    assert counted(group, rows) == pytest.approx((read.get_total_flops(), updated.get_total_flops()), rel=0.15)


def longest(episodes, prompt, answer):
    """The same episodes, as if every prompt and every answer were as long as it may be."""
    for turn in (turn for episode in episodes for turn in episode.turns):
        turn.prompt_ids = (turn.prompt_ids * prompt)[:prompt]
        turn.response_ids, turn.log_probs = (turn.response_ids * answer)[:answer], (turn.log_probs * answer)[:answer]
        turn.response_mask = [1] * answer
    return episodes


def test_a_plan_counts_the_longest_rows_within_15_percent(alone):
    live = alone(*PLAIN, "controller.old_log_probs=trainer")
    group, rollout = live.trainer.policies["alice"], live.trainer.config.actor_rollout_ref.rollout
    rows = prepared(live, episodes=longest(live.episodes(), rollout.prompt_length, rollout.response_length))
    ((_, planned),) = work_by_pool(prepare(live.trainer.config))["alice"]
    with FlopCounterMode(display=False) as read:
        live.wait(group.compute_log_prob(rows))
    with FlopCounterMode(display=False) as updated:
        live.wait(group.update_actor(rows))
    counts = (read.get_total_flops(), updated.get_total_flops())
    assert (planned.log_probs, planned.update) == pytest.approx(counts, rel=0.15)


@pytest.fixture
def wide(cold_assets, tmp_path):
    """A model whose time is that of its products."""
    tokenizer = AutoTokenizer.from_pretrained(cold_assets / "model")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1536,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def matmul_rate(tokens):
    """Operations a second of one thread in a product of a layer's shape, in the thread's own time; the median of several."""
    x, weight = torch.randn(tokens, 512), torch.randn(1536, 512)
    taken = []
    for _ in range(5):
        started = time.thread_time()
        for _ in range(10):
            torch.nn.functional.linear(x, weight)
        taken.append(time.thread_time() - started)
    return 10 * 2 * tokens * 512 * 1536 / sorted(taken)[len(taken) // 2]


@pytest.mark.slow
def test_an_update_takes_the_estimated_seconds_within_15_percent(alone, wide):
    live = alone(*PLAIN, f"actor_rollout_ref.model.path={wide}")
    rows, group = prepared(live), live.trainer.policies["alice"]
    rows = rows_of(rows, [i for i in range(len(rows)) for _ in range(3)])
    tokens, ratios = len(rows["input_ids"].values()), []
    live.wait(group.update_actor(rows))  # which also makes the optimizer's state
    for _ in range(3):  # the rate beside each update: other work on the machine slows both
        rate, started = matmul_rate(tokens), time.process_time()
        live.wait(group.update_actor(rows))
        ratios.append(counted(group, rows)[1] / rate / (time.process_time() - started))
    assert median(ratios) == pytest.approx(1, rel=0.15), ratios
