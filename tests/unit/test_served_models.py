"""Models that the hf server takes, with what each has of its own, and those that it refuses by name before a run starts."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma3Config,
    LlamaConfig,
    NemotronConfig,
    OPTConfig,
    Phi3Config,
    StableLmConfig,
)

from marl.config.errors import ConfigError
from marl.preflight.checks import check_decodable
from marl.rollout.attention import ATTENTION
from marl.rollout.decoding import decode
from marl.rollout.hf_model import check_attention, check_positions, length_dependent, longest_of
from marl.rollout.requests import Request

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0 + 2 * i for i in range(4)]}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def phi(**more):
    return Phi3Config(**SIZES, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=1024,
                      original_max_position_embeddings=64, rope_parameters=LONG, **more)  # fmt: skip


def dynamic(**more):
    return LlamaConfig(**SIZES, intermediate_size=64, max_position_embeddings=64, rope_parameters=DYNAMIC, **more)


@pytest.mark.parametrize("make", [phi, dynamic])
def test_angles_that_depend_on_the_longest_conversation_are_refused_where_one_may_be_so_long(make):
    """Keys that were kept under the angles of short ones, beside those of long ones, would be neither's."""
    rollout = SimpleNamespace(max_model_len=65)
    said = rf"rope_type={make().rope_parameters['rope_type']}, whose angles change beyond 64 tokens.*grow to 65: .*max_model_len=64"
    with pytest.raises(ValueError, match=said):
        check_positions(make(), "/some/where", longest_of(rollout, make()))
    with pytest.raises(ConfigError, match=r"^policies.a.model.path=/some/where: /some/where has rope_type="):
        check_decodable(make(), "/some/where", "policies.a.model", rollout)
    check_decodable(make(), "/some/where", "policies.a.model", SimpleNamespace(max_model_len=64))
    assert longest_of(SimpleNamespace(max_model_len=None), make()) == make().max_position_embeddings


@pytest.mark.parametrize(
    ("rope", "found"),
    [
        (None, []),
        ({}, []),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, []),
        ({"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}, [("longrope", 64)]),
        (DYNAMIC | {"original_max_position_embeddings": 8}, [("dynamic", 128)]),
    ],
    ids=str,
)
def test_the_length_from_which_angles_change_is_that_of_each_kind_of_layer(rope, found):
    assert [*length_dependent(SimpleNamespace(rope_parameters=rope, max_position_embeddings=128))] == found


def test_a_model_without_a_largest_position_is_refused_for_its_attention():
    """Nothing is asked of its length before."""
    with pytest.raises(ConfigError, match=r"attention of its own \(model_type=bloom\): use vllm or sglang"):
        check_decodable(BloomConfig(), "/some/where", "policies.a.model", SimpleNamespace(max_model_len=None))


@pytest.mark.parametrize("make", [phi, dynamic])
def test_within_that_length_an_answer_is_the_trainers_whatever_is_beside_it(make):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make(attn_implementation=ATTENTION)).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(0, 300, (count,), generator=generator).tolist()) for count in (9, 40)]
    requests = [Request(prompt, 20, seed) for seed, prompt in enumerate(prompts)]
    assert decode(model, requests, 0, str)[0].token_ids == decode(model, requests[:1], 0, str)[0].token_ids
    assert gap(model, requests[1], decode(model, requests, 0, str)[1]) < 1e-5


def gap(model, request, answer):
    """The largest difference between an answer's log-probs and those of transformers' own forward pass."""
    ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
    model.config._attn_implementation = "sdpa"
    with torch.inference_mode():
        log_probs = model(ids).logits.float().log_softmax(-1)
    model.config._attn_implementation = ATTENTION
    start = len(request.prompt_ids)
    read = log_probs[0, start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
    return float((read - torch.tensor(answer.log_probs)).abs().max())


@pytest.mark.parametrize("kind", [FalconConfig, NemotronConfig], ids=lambda kind: kind.model_type)
def test_a_model_with_a_class_for_each_attention_is_refused(kind):
    with pytest.raises(
        ValueError, match=rf"an attention of its own \(model_type={kind.model_type}\): use vllm or sglang"
    ):
        check_attention(kind(**SIZES), "/some/where")


@pytest.mark.parametrize(
    "config",
    [
        OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64),
        StableLmConfig(**SIZES, intermediate_size=64, num_key_value_heads=4),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_ask_the_cache_for_its_length_answer(config):
    check_attention(config, "/some/where")
    config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    request = Request(tuple(range(5, 15)), 12, seed=1)
    assert gap(model, request, decode(model, [request, Request((7, 8), 5, seed=2)], 0, str)[0]) < 1e-5


def test_the_longest_conversation_of_a_model_with_images_is_its_texts():
    assert (
        longest_of(SimpleNamespace(max_model_len=None), Gemma3Config())
        == Gemma3Config().get_text_config().max_position_embeddings
    )
