"""The short way through Llama-like models: scores of the model's own forward pass, bit for bit."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import GraniteConfig, GraniteForCausalLM

from marl.rollout.attention import ATTENTION, NEAR_ATTENTION, extended
from marl.rollout.plain_forward import LIKE_LLAMA, OwnForward, PlainForward, Rotary, forward_of, signed
from marl.rollout.slots import Slots

SIZES = {
    "vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 160, "max_position_embeddings": 512,
}  # fmt: skip


def make(kind, dtype=torch.float32, attention=ATTENTION, **options):
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES, attn_implementation=attention, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which begin as 0 and 1
            parameter.normal_(0, 0.2 + (parameter.dim() == 1))
    return model.to(dtype)


def scores(forward, seed=0, width=64):
    """Scores of prompts of 20 tokens, and of three tokens after them."""
    generator, cache = torch.Generator().manual_seed(seed), Slots(5, width)
    said = []
    for start, size in ((0, 20), (20, 1), (21, 1), (22, 1)):
        ids_BN = torch.randint(120, (5, size), generator=generator)
        positions_BN = (start + torch.arange(size)).repeat(5, 1)
        cache.aim(positions_BN, width)
        unseen = torch.arange(width) > positions_BN[..., None]
        mask = torch.zeros(5, size, width, dtype=forward.model.dtype).masked_fill(unseen, -torch.inf)
        said.append(forward(ids_BN, mask[:, None], positions_BN, cache))
    return torch.cat(said, 1)


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True, "hidden_act": "gelu"}])
@pytest.mark.parametrize("attention", [ATTENTION, NEAR_ATTENTION, "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LIKE_LLAMA)
@torch.inference_mode()
def test_scores_are_the_models_own_bit_for_bit(kind, dtype, attention, options):
    model = make(kind, dtype, attention, **options)
    own, plain = OwnForward(model), forward_of(model)
    assert type(plain) is PlainForward
    assert torch.equal(scores(plain), scores(own)) and scores(plain).std() > 0.1


@pytest.mark.parametrize("options", [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 32}])
@torch.inference_mode()
def test_biases_and_sizes_of_heads_are_the_models(options):
    model = make(LIKE_LLAMA[0], **options)
    assert torch.equal(scores(forward_of(model)), scores(OwnForward(model)))


ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", ROPES)
@torch.inference_mode()
def test_angles_are_the_models_own_in_caches_of_any_length(rope, dtype):
    model = make(LIKE_LLAMA[0], dtype, rope_parameters={"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]})
    own, rotary, x = model.model.rotary_emb, Rotary(model.model.rotary_emb), torch.zeros(1, dtype=dtype)
    for capacity in (40, 2000, 300):  # dynamic ones depend on the longest position, and turn back behind 512
        positions_BN = torch.randint(capacity, (6, 7), generator=torch.Generator().manual_seed(capacity))
        for mine, theirs in zip(rotary(x, positions_BN, capacity), signed(*own(x, positions_BN)), strict=True):
            assert mine.dtype == dtype and torch.equal(mine, theirs)


@torch.inference_mode()
def test_weights_that_change_are_read_anew():
    model = make(LIKE_LLAMA[1])
    plain = forward_of(model)
    before = scores(plain)
    model.load_state_dict({name: 1.05 * tensor for name, tensor in model.state_dict().items()})
    assert torch.equal(scores(plain), scores(OwnForward(model))) and not torch.equal(scores(plain), before)


def test_other_models_go_their_own_way():
    model = GraniteForCausalLM(GraniteConfig(**SIZES)).eval()
    assert type(forward_of(model)) is OwnForward


@pytest.mark.parametrize("kind", LIKE_LLAMA)
def test_a_model_with_layers_of_another_kind_goes_its_own_way(kind):
    """PEFT's layers have a ``weight``, the base's: what the adapter adds would be lost without an error."""
    model = make(kind)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False), model)
    assert type(forward_of(model)) is OwnForward
    assert not torch.equal(scores(forward_of(model)), scores(PlainForward(model)))


def test_a_single_query_has_other_rows_behind_it_or_copies():
    """Three rows where two key heads have one each; the last one's memory ends after two."""
    queries = torch.arange(8.0).view(1, 2, 2, 2)[:, :, :1]
    assert extended(queries, 2).data_ptr() == queries.data_ptr()
    assert extended(queries, 2).tolist() == [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]
    assert extended(queries, 3).tolist() == [[[[0, 1]] * 3, [[4, 5]] * 3]]


@pytest.mark.parametrize("kind", LIKE_LLAMA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_what_follows_the_last_tokens_is_what_follows_all_of_them(kind, dtype):
    model = make(kind, dtype)
    ids_BN = torch.randint(120, (5, 20), generator=torch.Generator().manual_seed(0))
    positions_BN = torch.arange(20).repeat(5, 1)
    mask = torch.zeros(20, 32, dtype=dtype).masked_fill(torch.arange(32) > torch.arange(20)[:, None], -torch.inf)
    last = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([19, 3, 7, 11, 0, 19])

    def scores(forward, *wanted):
        cache = Slots(5, 32)
        cache.aim(positions_BN, 32)
        said = forward(ids_BN, mask.repeat(5, 1, 1, 1), positions_BN, cache, *wanted)
        return said, [layer.stored for layer in cache.layers]

    every, stored = scores(PlainForward(model))
    for forward in (PlainForward(model), OwnForward(model)):
        said, kept = scores(forward, last)
        assert torch.equal(said[:, 0], every[last])
        assert all(
            torch.equal(a, b) for one, other in zip(stored, kept, strict=True) for a, b in zip(one, other, strict=True)
        )
