"""Head and softmax at the positions that are read, whole and sliced, against verl's logits of all positions."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from verl.utils import tensordict_utils as tu, torch_functional
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from marl.cluster.workers.policy_worker import of_responses
from marl.platform import sliced_head
from marl.platform.adapters import ADAPTED, GPUAdapterEngine
from marl.platform.engine import CPUEngineWithLMHead, GPUEngineWithLMHead
from marl.platform.head import SelectiveHead, log_probs_and_entropy
from marl.platform.sliced_head import Tail, sliced_log_probs
from tests.head_engine import SIZES, a_step, engine_of, forward, micro_batch

CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8),
    "cohere": CohereConfig(**SIZES, logit_scale=0.3),
    "granite": GraniteConfig(**SIZES, logits_scaling=0.7),
}
TAILS = {"gemma2": Tail(1.0, 2.0), "cohere": Tail(0.3), "granite": Tail(1 / 0.7)}


def make(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 0.1)
    return model


def slice_everything(monkeypatch):
    for name, value in {"SLICED_VOCABULARY": 0, "WHOLE_BYTES": 0, "SLICE_BYTES": 1, "MIN_SLICE": 64}.items():
        monkeypatch.setattr(sliced_head, name, value)


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_that_of_logits_at_all_positions(monkeypatch, name, packed, sliced):
    expected = a_step(FSDPEngineWithLMHead, make(name), micro_batch(packed))
    if sliced:
        slice_everything(monkeypatch)
    cls = GPUEngineWithLMHead if name == "qwen2" else CPUEngineWithLMHead  # the same but for the width of short rows
    got = a_step(cls, make(name), micro_batch(packed))
    assert float(expected[2].norm()) > 0.01
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-6, rtol=1e-6)  # sums in another order


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_step_on_a_gpu_makes_every_tensor_where_its_inputs_are(monkeypatch, packed, sliced):
    """Without a GPU: what names no device lands on ``meta``, where nothing of a step can be computed with it."""
    expected, batch = a_step(FSDPEngineWithLMHead, make("gemma2"), micro_batch(packed)), micro_batch(packed)
    if sliced:
        slice_everything(monkeypatch)
    model, mask = make("gemma2"), batch["loss_mask"].values().bool()
    weights, positions = torch.linspace(-1, 1, 6), torch.arange(len(mask))[mask]
    with torch.device("meta"):
        outputs = forward(GPUEngineWithLMHead, model, batch)
        log_probs, entropy = (of_responses(outputs[key], batch).values()[positions] for key in ("log_probs", "entropy"))
        ((weights * log_probs).mean() - 0.1 * entropy.mean()).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for mine, theirs in zip((log_probs, entropy, gradients), expected, strict=False):
        torch.testing.assert_close(mine, theirs, atol=3e-6, rtol=1e-6)  # sums in another order


def test_on_a_gpu_verls_head_stays_where_its_cross_entropy_is_fast(monkeypatch):
    """Without flash attention's kernel, and where ``determinism=strict`` forbids it, verl loops over the tokens of packed rows."""

    def selects(offloads=False):
        engine = engine_of(make("qwen2"), GPUEngineWithLMHead)
        engine.model_config.enable_activation_offload = offloads
        _, args = engine.prepare_model_inputs(micro_batch(True))
        return args.get("reading") is not None

    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    monkeypatch.delenv("VERL_DISABLE_FLASH_ATTN_CE", raising=False)
    assert not selects()
    monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", "1")
    assert selects()
    monkeypatch.delenv("VERL_DISABLE_FLASH_ATTN_CE")
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    assert selects() and not selects(offloads=True)


def operations(cls, answer):
    """Operations of a forward and a backward pass over packed rows, one of which has an answer of so many tokens."""
    model, batch = make("qwen2"), micro_batch(True, mask=((1,) * answer, (1, 1, 1), (0, 0)))
    forward(cls, model, batch)  # the first one measures the head
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        forward(cls, model, batch)["log_probs"].values().sum().backward()
    return sum(event.name.startswith("aten::") for event in profile.events())


def test_a_gpu_starts_no_kernels_for_each_token():
    """A kernel costs a GPU some microseconds, whatever it computes; verl's pass over packed rows starts several for every token."""
    assert operations(GPUEngineWithLMHead, 10) == operations(GPUEngineWithLMHead, 100)
    assert operations(FSDPEngineWithLMHead, 100) - operations(FSDPEngineWithLMHead, 10) > 5 * 90


def test_gpus_have_engines_of_their_own(monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is GPUEngineWithLMHead
    assert EngineRegistry.get_engine_cls(ADAPTED, "fsdp2") is GPUAdapterEngine
    assert issubclass(GPUAdapterEngine, GPUEngineWithLMHead)


def test_a_head_whose_logits_verl_reads_is_left_alone():
    """Fused kernels, for one, give no logits to measure."""
    batch, engine = micro_batch(True), engine_of(make("qwen2"))
    tu.assign_non_tensor(batch, calculate_sum_pi_squared=True)
    _, args = engine.prepare_model_inputs(batch)
    assert args["reading"] is None and "head" not in vars(engine)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_model_does_to_its_logits_is_measured(monkeypatch, name):
    slice_everything(monkeypatch)
    tail, expected = SelectiveHead(make(name)).tail, TAILS.get(name, Tail())
    assert (tail.scale, tail.cap) == (pytest.approx(expected.scale, rel=1e-6), pytest.approx(expected.cap, rel=1e-6))


class Squaring(Qwen2ForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.square()
        return output


def with_lora_on_its_head(name):
    return get_peft_model(make(name), LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False))


def squaring(name):
    return Squaring(CONFIGS[name])


@pytest.mark.parametrize("make_odd", [with_lora_on_its_head, squaring])
def test_other_heads_are_the_models_own(monkeypatch, make_odd):
    """Adapters on the head, and logits that are neither scaled nor capped."""
    steps = []
    for cls in (FSDPEngineWithLMHead, CPUEngineWithLMHead):
        torch.manual_seed(2)
        steps.append(a_step(cls, make_odd("qwen2"), micro_batch(False)))
        slice_everything(monkeypatch)
    assert SelectiveHead(make_odd("qwen2")).tail is None
    for theirs, mine in zip(*steps, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-6, rtol=1e-6)  # sums in another order


def entering_the_head(model, batch):
    sizes = []
    handle = model.get_output_embeddings().register_forward_hook(lambda *parts: sizes.append(parts[1][0].shape[:2]))
    outputs = forward(CPUEngineWithLMHead, model, batch)
    handle.remove()
    return sizes[-1].numel(), outputs


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_head_sees_counted_tokens_alone(packed):
    """Neither prompts, nor text between answers, nor padding; in multiples of four rows, as the hf server's heads compute."""
    batch = micro_batch(packed)
    size, outputs = entering_the_head(make("qwen2"), batch)
    assert size == 8 and int(batch["loss_mask"].values().sum()) == 6
    assert torch.equal(of_responses(outputs["log_probs"], batch).values() != 0, batch["loss_mask"].values().bool())
    size, outputs = entering_the_head(make("qwen2"), micro_batch(packed, mask=((0, 1, 0), (0,), (0, 0))))
    assert size == 4 and int((outputs["log_probs"].values() != 0).sum()) == 1


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_a_capped_log_prob_in_half_precision_does_not_depend_on_the_number_of_tokens(monkeypatch, name):
    """Few tokens were capped in bf16 and many, in slices, in full precision: a ratio of up to 1.13 where nothing had changed."""

    def log_probs():
        batch = micro_batch(True)
        output = forward(CPUEngineWithLMHead, make(name).bfloat16(), batch)
        return of_responses(output["log_probs"], batch).values()

    monkeypatch.setattr(sliced_head, "SLICED_VOCABULARY", 0)
    few = log_probs()
    slice_everything(monkeypatch)
    assert few.any() and torch.allclose(few, log_probs(), atol=1e-5, rtol=0)


def test_a_batch_that_counts_no_token_has_a_zero_gradient():
    model, batch = make("qwen2"), micro_batch(False, mask=((0, 0), (0,), (0, 0)))
    outputs = forward(CPUEngineWithLMHead, model, batch)
    (outputs["log_probs"].values().sum() + outputs["entropy"].values().sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_what_the_loss_counts_beyond_its_mask_of_tokens_is_read_too():
    batch = micro_batch(False)
    batch["response_mask"] = torch.nested.nested_tensor_from_jagged(
        torch.ones_like(batch["loss_mask"].values()), batch["responses"].offsets()
    )
    outputs = forward(CPUEngineWithLMHead, make("qwen2"), batch)
    assert of_responses(outputs["log_probs"], batch).values().all()


def heads(dtype=torch.float32, bias=True):
    torch.manual_seed(3)
    head = torch.nn.Linear(48, 1000, bias=bias)
    torch.nn.init.normal_(head.weight, 0, 0.1)
    hidden = torch.randn(37, 48)
    return head.to(dtype), hidden.to(dtype).requires_grad_(), torch.randint(1000, (37,))


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("tail", [Tail(), Tail(0.5, 4.0)], ids=["plain", "capped"])
def test_slices_have_the_gradients_of_the_whole(monkeypatch, tail, dtype, bound):
    slice_everything(monkeypatch)
    temperature, weights = torch.linspace(0.5, 2, 37), torch.linspace(-1, 1, 37)[:, None] * torch.tensor([1.0, -0.3])
    results = []
    for sliced in (False, True):
        head, hidden, labels = heads(dtype)
        if sliced:
            columns = sliced_log_probs(hidden, head, labels, temperature, tail, True)
        else:
            logits = head(hidden).float()
            logits = logits if tail == Tail() else 4 * (0.5 * logits / 4).tanh()
            columns = log_probs_and_entropy(logits, labels, temperature, True)
        (columns * weights / 37).sum().backward()
        results.append((columns.detach(), hidden.grad, head.weight.grad, head.bias.grad))
    for mine, theirs in zip(*reversed(results), strict=True):
        assert mine.dtype == theirs.dtype and float(theirs.norm()) > 0.01
        torch.testing.assert_close(mine, theirs, atol=bound, rtol=bound)


def test_slices_have_the_gradients_of_verls_fused_head(monkeypatch):
    slice_everything(monkeypatch)
    results = []
    for ours in (False, True):
        head, hidden, labels = heads(bias=False)
        if ours:
            columns = sliced_log_probs(hidden, head, labels, torch.full((37,), 0.7), Tail(), True)
        else:
            columns = torch.stack(FusedLinearForPPO(chunk_size=8)(hidden, head.weight, labels, temperature=0.7), -1)
        (columns * torch.linspace(-1, 1, 74).view(37, 2)).mean().backward()
        results.append((columns.detach(), hidden.grad, head.weight.grad))
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


LARGE = """
import resource, torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, Qwen2Config
from verl.utils import tensordict_utils as tu
from marl.platform.engine import CPUEngineWithLMHead
from marl.utils.ragged import jagged
from tests.head_engine import SIZES, forward
torch.manual_seed(0)
config = Qwen2Config(**SIZES | dict(vocab_size=150_000, hidden_size=16, num_hidden_layers=1, max_position_embeddings=2048))
model = AutoModelForCausalLM.from_config(config)
ids = torch.randint(150_000, (2, 1024)).tolist()
rows = {"prompts": [row[:1] for row in ids], "responses": [row[1:] for row in ids], "input_ids": ids}
rows |= {"loss_mask": [[1] * 1023] * 2, "position_ids": [range(1024)] * 2}
batch = TensorDict({key: jagged(value, torch.long) for key, value in rows.items()}, batch_size=[2])
batch["temperature"] = torch.ones(2)
tu.assign_non_tensor(batch, use_remove_padding=False, calculate_entropy=True)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
outputs = forward(CPUEngineWithLMHead, model, batch)
(outputs["log_probs"].values().mean() - 0.1 * outputs["entropy"].values().mean()).backward()
print(peak() - before)
"""


@pytest.mark.slow
def test_a_real_vocabulary_stays_small():
    """2,046 tokens x 150,000: one copy of the logits is 1,171 MB, verl keeps several."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=240, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 350
