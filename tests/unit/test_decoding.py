"""The decoding loop: what a request is answered with depends on its prompt and seed, and on nothing else."""

import random
from collections import deque
from itertools import chain
from threading import Thread

import pytest
import torch

from marl.rollout import reader
from marl.rollout.decoding import Draft, Engine, Request, SingleReader, bucket, decode
from marl.rollout.prefixes import Node, Prefixes
from marl.rollout.reader import padded
from marl.rollout.sampling import cumulative
from tests.tiny_model import EOS, answers, make_model, shapes_read, text_of


@pytest.fixture(scope="module")
def model():
    return make_model()


def requests(count, seed=0, **options):
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(10, 120) for _ in range(rng.randint(9, 16))) for _ in range(max(1, count // 3))]
    defaults = {"max_tokens": 12, "stop_token_ids": frozenset([EOS])}
    return [Request(rng.choice(prompts), seed=i, **(defaults | options)) for i in range(count)]


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_answers_do_not_depend_on_the_batch_or_its_order(model, threads):
    batch = requests(48)
    together = answers(model, batch)
    order = list(range(len(batch)))
    random.Random(1).shuffle(order)
    permuted = answers(model, [batch[i] for i in order])
    assert [permuted[order.index(i)] for i in range(len(batch))] == together
    for size in (1, 2, 3, 4, 5, 9, 13):
        assert answers(model, batch[:size]) == together[:size]
    alone = [answers(model, [request])[0] for request in batch[:6]]
    assert alone == together[:6], "token for token and bit for bit"


def test_the_longest_request_of_a_batch_does_not_change_the_others(model):
    short = requests(6, max_tokens=3)
    long = requests(6, seed=9, max_tokens=40)
    assert answers(model, short + long)[:6] == answers(model, short)


def test_seeds_matter_and_nothing_else_is_random(model):
    one = requests(1)[0]
    drawn = {tuple(decode(model, [Request(one.prompt_ids, 12, seed)], 0, text_of)[0].token_ids) for seed in range(20)}
    assert len(drawn) > 10
    assert answers(model, [one]) == answers(model, [one])


def test_log_probs_are_those_of_a_plain_forward_pass(model):
    for request, (ids, log_probs, _) in zip(batch := requests(8), answers(model, batch), strict=True):
        whole = torch.tensor([[*request.prompt_ids, *ids]])
        with torch.no_grad():
            expected = model(input_ids=whole).logits[0].log_softmax(-1)
        start = len(request.prompt_ids) - 1
        expected = [expected[start + t, token].item() for t, token in enumerate(ids)]
        torch.testing.assert_close(torch.tensor(log_probs), torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("layers,hidden", [(2, 64), (4, 128), (2, 512)])
def test_on_a_cpu_log_probs_are_those_of_the_trainers_padded_rows_bit_for_bit(layers, hidden):
    model, batch = make_model(layers, hidden), requests(24)
    got = answers(model, batch)
    sequences = [[*request.prompt_ids, *ids] for request, (ids, *_) in zip(batch, got, strict=True)]
    padded = torch.tensor([sequence + [0] * (40 - len(sequence)) for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (40 - len(sequence)) for sequence in sequences])
    with torch.no_grad():
        log_softmax = model(input_ids=padded, attention_mask=mask).logits.log_softmax(-1)
    for row, (request, (ids, log_probs, _)) in enumerate(zip(batch, got, strict=True)):
        start = len(request.prompt_ids) - 1
        assert log_probs == [log_softmax[row, start + t, token].item() for t, token in enumerate(ids)]


def test_greedy_decoding_is_transformers_own(model):
    for request in requests(5, temperature=0.0, stop_token_ids=frozenset()):
        ids = decode(model, [request], 0, text_of)[0].token_ids
        expected = model.generate(
            torch.tensor([request.prompt_ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert ids == expected[0, len(request.prompt_ids) :].tolist()


def test_sampling_follows_the_distribution(model):
    prompt = requests(1)[0].prompt_ids
    with torch.no_grad():
        expected = (model(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    drawn = decode(model, [Request(prompt, 1, seed, temperature=0.7) for seed in range(4000)], 0, text_of)
    counts = torch.bincount(torch.tensor([a.token_ids[0] for a in drawn]), minlength=120) / 4000
    assert (counts - expected).abs().max() < 4 * (expected * (1 - expected) / 4000).sqrt().max()


@pytest.mark.parametrize("top_k,top_p", [(3, 1.0), (-1, 0.5), (5, 0.6), (1, 1.0), (-1, 1e-6)])
def test_top_k_and_top_p_keep_the_likeliest_and_renormalise(model, top_k, top_p):
    prompt = requests(1)[0].prompt_ids
    with torch.no_grad():
        probs, order = model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1).sort(descending=True)
    kept = probs.clone()
    if top_k > 0:
        kept[top_k:] = 0
    kept = kept / kept.sum()
    kept[(kept.cumsum(0) - kept) >= top_p] = 0
    kept[0] = max(kept[0], 1e-9)
    allowed = dict(zip(order[kept > 0].tolist(), (kept[kept > 0] / kept.sum()).tolist(), strict=True))
    drawn = decode(model, [Request(prompt, 1, seed, top_k=top_k, top_p=top_p) for seed in range(300)], 0, text_of)
    assert {a.token_ids[0] for a in drawn} <= set(allowed)
    for answer in drawn[:40]:
        assert torch.tensor(answer.log_probs[0]).exp().item() == pytest.approx(allowed[answer.token_ids[0]], rel=1e-3)


def test_truncation_of_one_request_leaves_its_neighbours_alone(model):
    plain = requests(6)
    neighbour = Request(plain[0].prompt_ids, 12, 99, top_k=2, temperature=0.5)
    assert answers(model, [neighbour, *plain])[1:] == answers(model, plain)


def test_answers_end_at_a_stop_token_a_stop_string_or_the_limit(model):
    batch = requests(40, max_tokens=30)
    for ids, log_probs, reason in answers(model, batch):
        assert len(ids) == len(log_probs) <= 30 and EOS not in ids[:-1]
        assert reason == ("completed" if ids[-1] == EOS else "length")
        assert reason == "completed" or len(ids) == 30
    free = decode(model, [Request(batch[0].prompt_ids, 20, 3)], 0, text_of)[0].token_ids
    wanted = f"{free[4]} {free[5]}"
    stopped = decode(model, [Request(batch[0].prompt_ids, 20, 3, stop=(wanted,))], 0, text_of)[0]
    assert stopped.stop_reason == "completed" and wanted in text_of(stopped.token_ids)
    assert stopped.token_ids == free[: len(stopped.token_ids)] and len(stopped.token_ids) <= 6


@pytest.mark.parametrize("stop", ["x", "ab", "\n\nUser:", "\u00e9\u4f60"])
def test_a_stop_string_is_looked_for_in_the_last_tokens_alone(stop):
    """Bytes as tokens, which part characters; the text is read whole only where its end matches."""
    read = []

    def to_text(ids):
        read.append(len(ids))
        return bytes(ids).decode(errors="replace")

    said = ("caf\u00e9 \u4f60\u597d " * 40 + stop).encode()
    draft = Draft(0, Request((1,), len(said) + 9, seed=0, stop=("never seen", stop)))
    ended = [draft.append(token, -0.1, to_text) for token in said]
    assert ended == [False] * (len(said) - 1) + [True] and draft.answer.stop_reason == "completed"
    assert max(read[:-1]) <= 10 + 8 and read[-1] == len(said)


def test_equal_prompts_are_prefilled_once(model):
    prompt = requests(1)[0].prompt_ids
    with shapes_read(model) as seen:
        decode(model, [Request(prompt, 2, seed) for seed in range(32)], 0, text_of)
    assert seen == [(1, padded(len(prompt))), (32, 1)], "one prompt; then all rows together"


def test_rows_that_ended_leave_the_batch(model):
    with shapes_read(model) as seen:
        decode(model, requests(30, max_tokens=2) + requests(3, seed=5, max_tokens=20), 0, text_of)
    rows = [rows for rows, _ in seen]
    assert max(rows) == 36 and rows[-1] == 4


def test_buckets_do_not_depend_on_the_neighbours():
    assert [bucket(n) for n in (1, 32, 33, 512, 513)] == [32, 32, 64, 512, 640]


def test_ragged_answers_keep_the_rows_busy(model):
    """Uniformly 1 to 64 tokens: a row that has ended is soon another request's."""
    rng = random.Random(0)
    engine = Engine(SingleReader(model, Prefixes(1 << 30), 0), model.device, text_of, 16)
    drafts = [engine.add(Request((20, 21, rng.randrange(30, 40)), rng.randint(1, 64), i)) for i in range(160)]
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    assert sum(len(draft.answer.token_ids) for draft in drafts) >= 0.8 * 16 * steps


def test_a_request_that_another_thread_takes_at_once_is_its_callers_own(model):
    """A server adds on its loop, and steps on another thread."""
    engine = Engine(SingleReader(model, Prefixes(0), 0), model.device, text_of, 16)

    class TakenAtOnce(deque):
        def append(self, draft):
            super().append(draft)
            step = Thread(target=engine.step)
            step.start()
            step.join(60)

    engine.waiting = TakenAtOnce()
    wanted = requests(3)
    drafts = [engine.add(request) for request in wanted]
    assert [draft.request for draft in drafts] == wanted == [draft.request for draft in engine.rows]
    while engine.busy:
        engine.step()
    got = [(d.answer.token_ids, d.answer.log_probs, d.answer.stop_reason) for d in drafts]
    assert got == answers(model, wanted)


class Elsewhere(torch.Tensor):
    """Numbers of a device whose cumulative sums are not deterministic, as a GPU's."""

    device = torch.device("meta")

    def cumsum(self, *arguments, **settings):
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_strict_draws_add_up_on_the_host(monkeypatch):
    numbers = torch.rand(2, 5).as_subclass(Elsewhere)
    with pytest.raises(RuntimeError, match="deterministic"):
        cumulative(numbers)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert cumulative(numbers).device.type == "meta", "back where they came from"


class Scarce(SingleReader):
    """Memory for so many tokens at once."""

    def __init__(self, model, tokens):
        super().__init__(model, Prefixes(1 << 30), 0)
        self.tokens = tokens

    def _forward(self, cache, ids_BN, *arguments):
        if sum(map(len, self.read)) > self.tokens or ids_BN.shape[1] > self.tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._forward(cache, ids_BN, *arguments)


def test_rows_for_which_memory_is_lacking_are_begun_again_fewer_at_once(model, caplog):
    engine, wanted = Engine(Scarce(model, 150), model.device, text_of, 16), requests(24)
    drafts, limits = [engine.add(request) for request in wanted], [16]
    while engine.busy:
        engine.step()
        limits.append(engine.limit)
    got = [(d.answer.token_ids, d.answer.log_probs, d.answer.stop_reason) for d in drafts]
    assert got == answers(model, wanted), "bit for bit"
    assert 1 < min(limits) <= 8 and max(limits[limits.index(min(limits)) :]) > min(limits), "and more again by and by"
    assert limits[-1] <= engine.most < 16, "but not as many"
    assert "CUDA out of memory; the server goes on with 8 requests at once: lower rollout.max_num_seqs" in caplog.text
    engine.forget()
    assert engine.limit == engine.most == 16, "with other weights"


def test_a_request_that_lacks_memory_alone_is_the_only_one_to_fail(model):
    engine, wanted = Engine(Scarce(model, 150), model.device, text_of, 16), requests(6)
    long = Request(tuple(random.Random(0).choices(range(10, 120), k=200)), 5, 0)
    drafts = [engine.add(request) for request in [*wanted[:3], long, *wanted[3:]]]
    failed = []
    while engine.busy:
        try:
            engine.step()
        except torch.OutOfMemoryError:
            failed += engine.fail()
    assert [draft.request for draft in failed] == [long]
    got = [(d.answer.token_ids, d.answer.log_probs, d.answer.stop_reason) for d in drafts if d.request is not long]
    assert got == answers(model, wanted)


def test_another_error_is_raised_though_more_rows_are_decoded(model):
    engine = Engine(SingleReader(model, Prefixes(0), 0), model.device, text_of, 16)
    for request in requests(3):
        engine.add(request)
    engine.step()
    engine.reader.step = lambda tokens: (_ for _ in ()).throw(RuntimeError("device-side assert"))
    with pytest.raises(RuntimeError, match="device-side"):
        engine.step()
    assert len(engine.fail()) == 3


def test_what_a_forward_pass_sees_is_bounded(monkeypatch):
    """A short turn after a long conversation: few tokens are read, and many seen."""
    monkeypatch.setattr(reader, "SEEN_TOKENS", 1000)
    root = Node(None, 0, ())
    nodes = [Node(Node(root, 0, tuple(range(start))), start, tuple(range(8))) for start in (300, 90, 90, 90, 90)]
    batches = list(reader.cut(nodes))
    assert [node for batch in batches for node in batch] == nodes
    assert all(max(node.end for node in batch) * len(batch) <= 1000 for batch in batches)
    assert [len(batch) for batch in batches] == [3, 2]


def finished_of(engine, failing, error):
    """Answers of an engine in which ``failing`` raises ``error`` once, as the first answers end."""
    drafts, finished = [engine.add(request) for request in requests(6)], []

    usual = getattr(*failing)

    def fails_once(*arguments):
        setattr(*failing, usual)
        raise error

    setattr(*failing, fails_once)
    while engine.busy:
        try:
            finished += engine.step()
        except type(error):
            finished += engine.fail()
    assert sorted(draft.index for draft in finished) == [draft.index for draft in drafts], "each once"
    return drafts


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("device-side assert")])
def test_no_answer_is_lost_where_rows_cannot_leave(model, error):
    reader = SingleReader(model, Prefixes(1 << 30), 0)
    engine = Engine(reader, model.device, text_of, 16)
    drafts = finished_of(engine, (reader, "keep"), error)
    if isinstance(error, torch.OutOfMemoryError):
        got = [(d.answer.token_ids, d.answer.log_probs, d.answer.stop_reason) for d in drafts]
        assert got == answers(model, requests(6))


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_contexts_that_are_read_in_parts_are_answered_as_together(model, monkeypatch, limit):
    """Some of them equal, in the same part and in another one."""
    wanted = [*requests(9), *requests(9, seed=1), *requests(9)]
    together = answers(model, wanted)
    monkeypatch.setattr(reader, "SEEN_TOKENS", 40)
    contexts = [(request.prompt_ids, None) for request in wanted]
    parts = list(reader.in_parts(contexts))
    assert list(chain.from_iterable(parts)) == contexts and len(parts) > 2
    assert all(sum(len(ids) for ids, _ in set(part)) <= 40 for part in parts)
    engine = Engine(SingleReader(model, Prefixes(limit), 0), model.device, text_of, 100)
    drafts = [engine.add(request) for request in wanted]
    while engine.busy:
        engine.step()
    assert [(d.answer.token_ids, d.answer.log_probs, d.answer.stop_reason) for d in drafts] == together
