"""The prefix tree: equal prefixes are read once, and no entry serves another conversation or other weights."""

import gc
import random
import weakref

import pytest
import torch

from marl.platform.shapes import key_width
from marl.rollout.decoding import Engine, SingleReader
from marl.rollout.prefixes import Prefixes, common
from marl.rollout.requests import Request
from tests.tiny_model import EOS, answers, make_model, text_of


@pytest.fixture(scope="module")
def model():
    return make_model()


def engine_of(model, limit=1 << 30, rows=1000):
    return Engine(SingleReader(model, Prefixes(limit), 0), model.device, text_of, rows)


def finish(engine, requests):
    drafts = [engine.add(request) for request in requests]
    while engine.busy:
        engine.step()
    return [(d.answer.token_ids, d.answer.log_probs, d.answer.stop_reason) for d in drafts]


def debate(engine, rounds=3, agents=3, groups=2, samples=3, seed=0, length=14):
    """Requests of conversations that grow by the answers of all: (request, answer) of each, and the prompts in order."""
    rng = random.Random(seed)
    words = lambda n: tuple(rng.randrange(10, 120) for _ in range(n))  # noqa: E731
    system = words(7)
    questions = [system + words(20) for _ in range(groups)]
    contexts = {
        (g, s, a): questions[g] + words(5 * (a > 0))
        for g in range(groups)
        for s in range(samples)
        for a in range(agents)
    }
    said = []
    for turn in range(rounds):
        requests = {
            key: Request(context, length, hash((*key, turn)) % 2**60, stop_token_ids=frozenset([EOS]))
            for key, context in contexts.items()
        }
        got = dict(zip(requests, finish(engine, list(requests.values())), strict=True))
        said += [(requests[key], got[key]) for key in requests]
        for g, s, a in contexts:
            others = sum((tuple(got[g, s, b][0]) for b in range(agents) if b != a), ())
            contexts[g, s, a] += (*got[g, s, a][0], 11, *others, 12)
    return said


def minimum(said):
    """Tokens that no server can avoid to read: each prefix once, those that were decoded never."""
    known, needed = set(), 0
    for request, (ids, *_) in said:
        prompt = request.prompt_ids
        whole = (*prompt, *ids[:-1])
        new = [n for n in range(1, len(prompt) + 1) if prompt[:n] not in known]
        needed += len(new)
        known |= {whole[:n] for n in range(1, len(whole) + 1)}
    return needed


def test_a_debate_reads_hardly_more_than_it_must(model):
    engine = engine_of(model)
    said = debate(engine)
    assert minimum(said) <= engine.reader.prefilled <= 1.10 * minimum(said)
    assert engine.reader.prefilled < 0.5 * sum(len(request.prompt_ids) for request, _ in said)


@pytest.mark.slow
def test_what_was_read_before_changes_no_answer(model):
    """Token for token and bit for bit, across widths at which a CPU sums keys otherwise."""
    said = debate(engine_of(model), length=40)
    assert max(len(request.prompt_ids) for request, _ in said) > 192
    for request, answer in said[:: len(said) // 20]:
        assert answers(model, [request]) == [answer]


def test_requests_that_join_and_leave_between_tokens_change_no_answer(model):
    rng = random.Random(3)
    wanted = [
        Request(tuple(rng.randrange(10, 120) for _ in range(rng.randint(1, 90))), rng.randint(1, 30), i)
        for i in range(40)
    ]
    engine = engine_of(model, rows=11)
    drafts, left = [], list(wanted)
    while left or engine.busy:
        if left and rng.random() < 0.4:
            drafts += [engine.add(left.pop(0)) for _ in range(min(len(left), rng.randint(1, 4)))]
        if engine.busy:
            engine.step()
        assert len(engine.rows) <= 11
    assert [(d.answer.token_ids, d.answer.log_probs, d.answer.stop_reason) for d in drafts] == answers(model, wanted)


def test_a_request_that_comes_late_does_not_wait_for_the_others(model):
    engine = engine_of(model)
    slow = engine.add(Request((20, 21, 22), 60, 0))
    for _ in range(10):
        engine.step()
    quick = engine.add(Request((30, 31), 3, 1))
    steps = 0
    while len(quick.answer.token_ids) < 3:
        engine.step()
        steps += 1
    assert steps <= 8 and len(slow.answer.token_ids) < 60


def test_a_cache_entry_of_another_conversation_is_caught(model, monkeypatch):
    """The check of the tests above sees the fault: a tree that takes every conversation for the one it knows."""
    monkeypatch.setattr("marl.rollout.prefixes.common", lambda one, other: min(len(one), len(other)))
    wrong = [
        (request, answer) for request, answer in debate(engine_of(model)) if answers_apart(model, request) != answer
    ]
    assert wrong


def answers_apart(model, request):
    """Answers of a server that keeps nothing, one prompt at a time, so that no fault of the tree can matter."""
    (answer,) = answers(model, [request])
    return answer


def test_a_cache_entry_of_other_weights_is_caught(model):
    """Purpose of ``forget``: without it, an answer after a weight sync is neither the old model's nor the new one's."""
    other = make_model()
    said = debate(engine := engine_of(other))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    request = said[-1][0]
    stale = finish(engine, [request])
    engine.forget()
    fresh = finish(engine, [request])
    assert fresh == answers(other, [request])
    assert stale != fresh


def test_a_request_that_is_half_answered_goes_on_with_the_new_weights(model):
    other, request = make_model(), Request((20, 21, 22, 23), 12, 5)
    engine = engine_of(other)
    draft = engine.add(request)
    for _ in range(5):
        engine.step()
    begun = list(draft.answer.token_ids)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    engine.forget()
    while engine.busy:
        engine.step()
    whole = torch.tensor([[*request.prompt_ids, *draft.answer.token_ids]])
    with torch.no_grad():
        expected = other(input_ids=whole).logits[0].log_softmax(-1)
    said = [expected[3 + t, token].item() for t, token in enumerate(draft.answer.token_ids)]
    assert len(said) == 12 and draft.answer.token_ids[:5] == begun
    torch.testing.assert_close(torch.tensor(draft.answer.log_probs[5:]), torch.tensor(said[5:]), atol=1e-5, rtol=0)
    assert abs(draft.answer.log_probs[2] - said[2]) > 1e-5


def test_what_is_kept_is_bounded_by_bytes_and_the_latest_stays(model):
    one = engine_of(model)
    debate(one)
    limit = one.reader.prefixes.bytes // 3
    engine = engine_of(model, limit)
    said = debate(engine)
    prefixes = engine.reader.prefixes
    assert 0 < prefixes.bytes <= limit
    assert prefixes.bytes == sum(node.nbytes() for node in prefixes._nodes())
    assert [answer for _, answer in said] == [answer for _, answer in debate(one)]
    before = engine.reader.prefilled
    finish(engine, [said[-1][0]])
    assert engine.reader.prefilled - before < len(said[-1][0].prompt_ids) / 2


def test_a_request_that_is_given_up_leaves_its_neighbours_alone(model):
    wanted = [Request((20 + i, 21), 20, i) for i in range(6)]
    engine = engine_of(model)
    drafts = [engine.add(request) for request in wanted]
    for _ in range(4):
        engine.step()
    engine.remove([drafts[0], drafts[3]])
    while engine.busy:
        engine.step()
    kept = [i for i in range(6) if i not in (0, 3)]
    got = [(drafts[i].answer.token_ids, drafts[i].answer.log_probs, drafts[i].answer.stop_reason) for i in kept]
    assert got == answers(model, [wanted[i] for i in kept])
    assert len(drafts[0].answer.token_ids) == 4


def test_a_prompt_that_comes_again_is_not_read_again(model):
    engine = engine_of(model)
    prompt = tuple(range(20, 60))
    first = finish(engine, [Request(prompt, 5, 1)])
    assert engine.reader.prefilled == 40
    assert finish(engine, [Request(prompt, 5, seed) for seed in (1, 2)])[:1] == first
    assert engine.reader.prefilled == 40
    longer = finish(engine, [Request((*prompt, *first[0][0][:2]), 5, 3)])
    assert engine.reader.prefilled == 41, "decoded, but its scores were not kept"
    assert longer == answers(model, [Request((*prompt, *first[0][0][:2]), 5, 3)])


def test_common_prefixes():
    assert [common(a, b) for a, b in [((1, 2), (1, 2)), ((1, 2, 3), (1, 2)), ((1, 2), (1, 3)), ((1,), (2,))]] == [
        2,
        2,
        1,
        0,
    ]


@pytest.mark.parametrize(
    "length,width", [(1, 32), (33, 48), (192, 192), (193, 384), (385, 400), (512, 512), (513, 528), (720, 896)]
)
def test_widths_of_keys(length, width):
    assert key_width(length) == width


def test_keys_and_values_go_with_what_they_are_of_and_wait_for_no_garbage_collection(model):
    """In cycles they would outlast their requests: the collector counts a gigabyte of tensors as a handful of objects."""
    gc.collect()
    gc.disable()
    try:
        engine = engine_of(model)
        debate(engine, rounds=2)
        reader = engine.reader
        segments = [node.segment for node in reader.prefixes._nodes()]
        tensors = [weakref.ref(tensor) for segment in segments for layer in segment for tensor in layer]
        tensors += [weakref.ref(tensor) for layer in reader.slots.layers for tensor in layer.stored]
        scratch = weakref.ref(reader.slots)
        del segments
        assert len(tensors) > 20 and all(tensor() is not None for tensor in tensors)
        engine.forget()
        assert scratch() is None and [tensor for tensor in tensors if tensor() is not None] == []
    finally:
        gc.enable()
