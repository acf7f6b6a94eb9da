"""The benchmarks' profiler: categories by the stack, and CPU seconds that add up."""

import time

import pytest

from benchmarks.profile import OURS, main, table
from benchmarks.sampler import Sampler, category_of, label, owner_of, root_of

VERL = f"{root_of('verl')}workers/engine/fsdp/transformer_impl.py"
TORCH = "/home/marl/site-packages/torch/nn/modules/module.py"
"""A folder of this name makes nothing ours."""
QWEN = "/home/marl/site-packages/transformers/models/qwen2/modeling_qwen2.py"
HF = f"{root_of('marl')}rollout/hf.py"
DECODING = f"{root_of('marl')}rollout/decoding.py"
TRAINER = f"{root_of('marl')}marl_trainer.py"


@pytest.mark.parametrize(
    ("category", "outwards"),
    [
        ("forward", [(TORCH, "_call_impl"), (QWEN, "forward"), (VERL, "forward_step"), (TRAINER, "step")]),
        ("sampling", [(TORCH, "_call_impl"), (QWEN, "forward"), (DECODING, "step"), (HF, "_serve"), (TRAINER, "step")]),
        ("backward", [("/x/torch/_tensor.py", "backward"), (VERL, "forward_backward_batch"), (TRAINER, "step")]),
        ("backward", [(QWEN, "forward"), ("/x/torch/_tensor.py", "backward"), (VERL, "forward_backward_batch")]),
        ("optimizer", [("/x/torch/optim/adamw.py", "step"), (VERL, "optimizer_step"), (TRAINER, "step")]),
        ("verl", [(TORCH, "unbind"), (VERL, "prepare_model_inputs"), (TRAINER, "step")]),
        ("ours", [("/x/asyncio/tasks.py", "wait"), (HF, "_serve"), (VERL, "forward_step")]),
        ("other", [("/x/asyncio/base_events.py", "_run_once")]),
    ],
)
def test_the_category_of_a_stack(category, outwards):
    assert category_of(outwards) == category


def test_time_in_libraries_is_the_callers():
    assert label(owner_of([(TORCH, "unbind"), (VERL, "forward_step"), (HF, "_serve")])) == (
        "verl/workers/engine/fsdp/transformer_impl.py:forward_step"
    )
    assert label(owner_of([("/x/asyncio/base_events.py", "_run_once")])) == "other"


def test_seconds_add_up_though_a_long_call_is_interrupted_once():
    """``sorted`` takes many intervals; the signal waits for its end."""
    numbers = [i * 7919 % 1_000_003 for i in range(400_000)]
    sampler, started = Sampler(), time.thread_time()
    with sampler.on():
        for _ in range(3):
            sorted(numbers)
    spent = time.thread_time() - started
    assert 0.5 * spent < sampler.seconds.total() <= spent
    assert sampler.functions.keys() == {("other", "other")}, "a test is none of the owners"


def test_the_table_has_shares_of_all_time():
    sampler = Sampler()
    sampler.seconds.update({"forward": 3.0, "ours": 1.0})
    sampler.functions.update({("forward", "a.py:f"): 3.0, ("ours", "b.py:g"): 0.75, ("ours", "c.py:h"): 0.25})
    lines = table(sampler, steps=2, most=2).splitlines()
    assert lines[:3] == ["2.000 CPU s a step", " 75.0 %  forward", " 25.0 %  ours"]
    assert [line.split()[-1] for line in lines[-2:]] == ["a.py:f", "b.py:g"]


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["trl_tiny"])
    assert "ours_1024" in capsys.readouterr().err and "ours_tiny_ray" not in OURS
