"""Models whose layers see a window of the latest tokens: the hf server's log-probs are those of the model's own forward pass."""

import random

import pytest
import torch

from marl.rollout.decoding import Engine, SingleReader
from marl.rollout.plain_forward import OwnForward, forward_of
from marl.rollout.prefixes import Prefixes
from marl.rollout.requests import Request
from tests.builders import slow_but
from tests.tiny_model import WINDOW, text_of, windowed_model

FAMILIES = ["mistral", "qwen2", "gemma3"]
BOUND = 2e-5


def talk(model, first, tokens, turns=3):
    """Conversations of ragged lengths, whose next prompts extend the last answers: (ids before, answer, its log-probs)."""
    reader, rng = SingleReader(model, Prefixes(1 << 28), 0), random.Random(0)
    engine = Engine(reader, model.device, text_of, limit=3)  # others join while some are read
    contexts, said = [tuple(rng.randrange(10, 120) for _ in range(size)) for size in first], []
    for turn in range(turns):
        drafts = [engine.add(Request(ids, tokens + 3 * i, 9 * turn + i)) for i, ids in enumerate(contexts)]
        while engine.busy:
            engine.step()
        answers = [draft.answer for draft in drafts]
        said += [(ids, a.token_ids, a.log_probs) for ids, a in zip(contexts, answers, strict=True)]
        contexts = [
            (*ids, *a.token_ids, *rng.choices(range(10, 120), k=2)) for ids, a in zip(contexts, answers, strict=True)
        ]
    assert reader.prefilled < sum(len(ids) for ids, *_ in said) / 1.5, "later turns find their prefixes cached"
    return said


@torch.no_grad()
def by_the_model(model, said):
    """Log-probs of the answers by a forward pass over all conversations, padded on the right as the trainer's are."""
    rows = [torch.tensor([*ids, *answer]) for ids, answer, _ in said]
    whole = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    scores = model(input_ids=whole, attention_mask=mask).logits.log_softmax(-1)
    return [
        scores[row, len(ids) - 1 :][torch.arange(len(answer)), torch.tensor(answer)]
        for row, (ids, answer, _) in enumerate(said)
    ]


@pytest.mark.parametrize(
    ("first", "tokens"), [([3, 6, 17, 30], 2 * WINDOW), pytest.param([500, 700], 40, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_the_trainers_over_turns_longer_than_the_window(family, first, tokens):
    said = talk(windowed_model(family), first, tokens)
    trainers = windowed_model(family, "sdpa")
    for (*_, log_probs), own in zip(said, by_the_model(trainers, said), strict=True):
        torch.testing.assert_close(torch.tensor(log_probs), own, atol=BOUND, rtol=0)
    trainers_without = windowed_model(family, "sdpa", sliding_window=4096)
    others = zip(said, by_the_model(trainers_without, said), strict=True)
    gaps = [(torch.tensor(log_probs) - own).abs().max() for (*_, log_probs), own in others]
    assert max(gaps) > 0.05, "the window matters to this model"


@pytest.mark.parametrize("family", slow_but(FAMILIES, "gemma3"))
def test_answers_do_not_depend_on_what_was_read_before(family):
    model = windowed_model(family)
    (_, answer, log_probs), *_ = talk(model, [17, 5], 20, turns=2)[-2:]
    ids = talk(model, [17, 5], 20, turns=2)[-2][0]
    reader = SingleReader(model, Prefixes(0), 0)
    engine = Engine(reader, model.device, text_of, limit=1)
    draft = engine.add(Request(ids, 20, 9))
    while engine.busy:
        engine.step()
    assert (draft.answer.token_ids, draft.answer.log_probs) == (answer, log_probs), "bit for bit"


def test_a_model_like_llama_with_a_window_goes_its_own_way():
    assert type(forward_of(windowed_model("qwen2"))) is OwnForward
