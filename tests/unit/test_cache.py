"""Caches of encoded texts are bounded by bytes, however long the texts are."""

import gc
import tracemalloc
from array import array

import pytest

from marl.batch import critic_inputs
from marl.batch.critic_inputs import JointObservation
from marl.controller import chat
from marl.controller.chat import ChatEncoder
from marl.utils.cache import cached_by_bytes

LIMIT = 1 << 18


@pytest.fixture
def small_caches(monkeypatch):
    def small(function, size_of):
        return cached_by_bytes(function, size_of, LIMIT)

    monkeypatch.setattr(chat, "cached_by_bytes", small)
    monkeypatch.setattr(critic_inputs, "cached_by_bytes", small)


def kept_bytes(use, inputs) -> int:
    """Entries that are still held after all inputs were used."""
    use(inputs[0])
    gc.collect()
    tracemalloc.start()
    try:
        for entry in inputs:
            use(entry)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_long_texts_of_a_long_run_stay_within_the_bound(bpe_tokenizer, small_caches):
    encoder = ChatEncoder(bpe_tokenizer)
    texts = [f"{i} " * 4000 for i in range(40)]  # some 0.5 MB of text, and 1.9 MB of ids of 4 bytes
    assert kept_bytes(lambda text: encoder.encode([{"role": "user", "content": text}]), texts) < 1.3 * LIMIT


def test_long_conversations_stay_within_the_bound(bpe_tokenizer, small_caches):
    encoder = ChatEncoder(bpe_tokenizer)
    lengths = range(1, 80)
    assert kept_bytes(lambda n: encoder.encode([{"role": "user", "content": "x"}] * n), lengths) < 1.3 * LIMIT


def test_what_critics_read_stays_within_the_bound(bpe_tokenizer, small_caches):
    text = JointObservation(bpe_tokenizer)
    assert kept_bytes(text.speaker, [f"{i} " * 4000 for i in range(40)]) < 1.3 * LIMIT


def test_ids_are_the_same_whether_they_were_kept_or_not(bpe_tokenizer, small_caches):
    encoder = ChatEncoder(bpe_tokenizer)
    observations = [[{"role": "user", "content": f"{i} " * 2000}] for i in range(40)]
    first = [encoder.encode(observation) for observation in observations]
    assert first == [encoder.encode(observation) for observation in reversed(observations)][::-1]
    assert first[7] == ChatEncoder(bpe_tokenizer).encode(observations[7])


def test_what_was_asked_for_last_is_kept_and_what_is_too_large_is_not():
    computed = []

    def double(text):
        computed.append(text)
        return array("i", [0] * (600 if text == "large" else 100))

    cached = cached_by_bytes(double, lambda ids: 4 * len(ids), 2500)
    for text in ("a", "b", "a", "c", "a", "large", "a", "large", "b"):  # two entries of some 850 bytes fit
        cached(text)
    assert computed == ["a", "b", "c", "large", "large", "b"]
