"""The cache of conversations where it is full, and where one context ends inside another's: bounds, order, answers."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from marl.rollout.attention import ATTENTION
from marl.rollout.decoding import Engine, SingleReader, decode
from marl.rollout.prefixes import Prefixes
from marl.rollout.reader import ModelReader
from marl.rollout.requests import Request

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Layers, keys and values, heads, numbers, bytes of each."""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, num_key_value_heads=2, max_position_embeddings=512, attn_implementation=ATTENTION, **sizes
        )
    ).eval()


@pytest.fixture
def tokens():
    """Random sequences of so many tokens."""
    generator = torch.Generator().manual_seed(1)
    return lambda count: tuple(torch.randint(0, 300, (count,), generator=generator).tolist())


def engine_of(model, kept_tokens):
    return Engine(SingleReader(model, Prefixes(TOKEN_BYTES * kept_tokens), 0), torch.device("cpu"), lambda ids: "", 64)


def answers(engine, *requests):
    drafts = [engine.add(request) for request in requests]
    while engine.busy:
        engine.step()
    return [tuple(draft.answer.token_ids) for draft in drafts]


def test_a_full_cache_keeps_the_conversations_of_now(model, tokens):
    """Those of former ones, however often they were used, make room."""
    engine = engine_of(model, 1200)
    for number in range(8):
        context, read = tokens(100), []
        for _ in range(4):
            before = engine.reader.prefilled
            (answer,) = answers(engine, Request(context, 20, seed=1))
            read.append(engine.reader.prefilled - before)
            context += answer + tokens(10)
        assert read == [100, 11, 11, 11], number
        assert engine.reader.prefixes.bytes <= engine.reader.prefixes.limit


def test_what_was_used_last_stays_though_its_parent_is_older(model, tokens):
    prefixes = Prefixes(TOKEN_BYTES * 150)
    take = lambda start, end: [tuple(torch.zeros(2, end - start, 8) for _ in range(2)) for _ in range(2)]  # noqa: E731
    old, new = [tokens(60) for _ in range(3)], tokens(100)
    for ids in (*old, new):
        prefixes.insert(ids, take)
    prefixes.trim()
    assert [node.tokens for node in prefixes.roots[None].children.values()] == [new]
    prefixes.insert(old[0], take)
    prefixes.insert((*old[0], *tokens(30)), take)
    prefixes.trim()
    assert [node.tokens for node in prefixes.roots[None].children.values()] == [old[0]], (
        "the answer, and what it follows"
    )
    assert prefixes.bytes == TOKEN_BYTES * 90
    prefixes.limit = 0
    prefixes.trim()
    assert not prefixes.roots[None].children and prefixes.bytes == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_a_context_may_end_inside_another_that_is_split_after_it(model, tokens, order):
    """All are read at once: a prompt, one that goes on from it, and one that leaves that."""
    whole = tokens(100)
    contexts = [whole, whole[:10], (*whole[:50], (whole[50] + 1) % 300)]
    reader = ModelReader(model, Prefixes(1 << 30), 0)
    scores = reader.append([contexts[i] for i in order], 160)
    for i, row in zip(order, scores, strict=True):
        torch.testing.assert_close(row, model(torch.tensor([contexts[i]])).logits[0, -1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kept_tokens", [1 << 20, 380, 0])
def test_a_prompt_is_asked_again_beside_the_next_turn_of_its_answer(model, tokens, kept_tokens):
    """Where the cache is full, the prompt is in it as the beginning of its answer alone."""
    prompt, long = tokens(20), tokens(390)
    engine = engine_of(model, kept_tokens)
    _, answer = answers(engine, Request(long, 2, seed=9), Request(prompt, 100, seed=1, temperature=0.0))
    requests = [
        Request(prompt, 3, seed=2),
        Request((*prompt, *answer[:60], *tokens(150)), 3, seed=3),
        Request(tokens(7), 3, seed=4),
    ]
    alone = [tuple(decode(model, [request], 0, lambda ids: "")[0].token_ids) for request in requests]
    assert answers(engine, *requests) == alone
