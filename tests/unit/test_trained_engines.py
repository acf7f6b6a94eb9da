"""What every engine's updates have in common: rates of learning, and embeddings that are trained."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

import marl.platform.adapters  # noqa: F401 - registers its engines
from marl.platform.engine import CPUEngineWithLMHead, CPUEngineWithValueHead, TrainedEngine

EOS = 2


@pytest.mark.parametrize("device", ["cpu", ("cuda", "nvidia")])
def test_every_engine_of_a_device_is_one(device):
    found = {
        (kind, backend): engines[device]
        for kind, backends in EngineRegistry._engines.items()
        for backend, engines in backends.items()
        if backend.startswith("fsdp") and device in engines
    }
    assert {("language_model", "fsdp2"), ("value_model", "fsdp2")} <= set(found)
    assert [name for name, cls in found.items() if not issubclass(cls, TrainedEngine)] == []


def warming(kind, warm_up, total=6, ratio=0.0, zero_indexed=True):
    """An engine with a schedule and a rate of 1."""
    engine = object.__new__(CPUEngineWithLMHead)
    engine.rank, engine.optimizer = 0, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    engine.optimizer_config = SimpleNamespace(
        total_training_steps=total, lr_warmup_steps=warm_up, lr_warmup_steps_ratio=ratio, lr_scheduler_type=kind,
        min_lr_ratio=0.0, num_cycles=0.5, zero_indexed_step=zero_indexed,
    )  # fmt: skip
    engine.lr_scheduler = engine._build_lr_scheduler(engine.optimizer)
    return engine


def rates(engine, steps):
    """The rate of each step's update, which is the one that is logged."""
    found = []
    for _ in range(steps):
        found.append(engine.optimizer.param_groups[0]["lr"])
        engine.optimizer.step()
        assert engine.lr_scheduler_step() == found[-1]
    return found


HALF_COSINE = [(1 + math.cos(math.pi * quarter / 4)) / 2 for quarter in range(5)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("constant", 5), [0.2, 0.4, 0.6, 0.8, 1, 1]),
        (("constant", 0), [1] * 6),
        (("constant", -1, 6, 0.5), [1 / 3, 2 / 3, 1, 1, 1, 1]),
        (("cosine", 2), [0.5, 1, *HALF_COSINE[:4]]),
        (("cosine", 2, 6, 0.0, False), [0.5, *HALF_COSINE]),
    ],
)
def test_a_warm_up_of_n_steps_begins_at_one_nth(settings, expected):
    assert rates(warming(*settings), 6) == pytest.approx(expected)


@pytest.mark.parametrize("steps", range(6))
def test_a_resumed_schedule_goes_on_where_it_stopped(steps):
    first, again = warming("cosine", 3), warming("cosine", 3)
    rates(first, steps)
    again.lr_scheduler.load_state_dict(first.lr_scheduler.state_dict())
    again.optimizer.load_state_dict(first.optimizer.state_dict())
    assert rates(again, 6 - steps) == rates(first, 6 - steps)


def embedding_gradients(monkeypatch, cls, ids, mask):
    """Gradients of a tiny model's embeddings, whose end token pads, as the engine builds it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, pad_token_id=EOS, eos_token_id=EOS
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    assert model.get_input_embeddings().padding_idx == EOS
    monkeypatch.setattr(FSDPEngine, "_build_module", lambda self: model)
    engine = object.__new__(cls)
    engine.model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]))
    built = engine._build_module()
    logits = built(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([mask])).logits
    read = torch.tensor(mask, dtype=torch.bool)
    logits[0, read].log_softmax(-1)[:, 1].sum().backward()
    return built.get_input_embeddings().weight.grad


@pytest.mark.parametrize("cls", [CPUEngineWithLMHead, CPUEngineWithValueHead])
def test_an_end_token_that_pads_is_trained_where_it_is_read(monkeypatch, cls):
    read = embedding_gradients(monkeypatch, cls, [0, EOS, 3], [1, 1, 1])
    assert read[EOS].abs().sum() > 1e-4
    padded = embedding_gradients(monkeypatch, cls, [0, EOS, 3, EOS, EOS], [1, 1, 1, 0, 0])
    torch.testing.assert_close(padded, read, atol=1e-7, rtol=1e-4)
    only_padding = embedding_gradients(monkeypatch, cls, [0, 3, EOS, EOS], [1, 1, 0, 0])
    assert not only_padding[EOS].any()
