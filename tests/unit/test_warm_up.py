"""The warm-up of the embedded tasks' model, whose step computes the gradients of its two halves side by side."""

import random
import time
from itertools import count, islice

import pytest
import torch

from marl.quickstart.model import build_model, build_tokenizer, encode_words, imitate, warm_up
from marl.quickstart.tasks import TASKS

TASK, BATCH, SEED = TASKS["smudged_note"](), 8, 3
TOKENIZER = build_tokenizer()


def after(steps):
    """A model after some steps, and their losses."""
    model = build_model(TOKENIZER, SEED)
    return model, list(islice(warm_up(model, TOKENIZER, TASK, 20, BATCH, 4e-3, SEED, encode_words), steps))


def test_a_step_follows_the_gradient_of_the_whole_batch():
    stepped, (loss,) = after(1)
    rng, model = random.Random(f"warm-{SEED}"), build_model(TOKENIZER, SEED)
    whole = imitate(
        model, [encode_words(TOKENIZER, TASK.warm_example(rng)) for _ in range(BATCH)], TOKENIZER.pad_token_id
    )
    expected = torch.autograd.grad(whole, list(model.parameters()))
    scale = min(1.0, 1.0 / torch.nn.utils.get_total_norm(expected).item())  # its gradients are clipped
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    for parameter, gradient in zip(stepped.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * scale, rtol=1e-3, atol=1e-6)


def test_the_same_seed_makes_the_same_model_whichever_half_is_ready_first(monkeypatch):
    one, losses = after(6)
    calls = count()

    def later_at_times(*arguments):
        time.sleep(0.01 * (next(calls) % 3 == 0))
        return imitate(*arguments)

    monkeypatch.setattr("marl.quickstart.model.imitate", later_at_times)
    other, again = after(6)
    assert losses == again and losses[0] != losses[-1]
    for parameter, same in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same)


def test_answers_of_different_lengths_are_learned_token_by_token():
    """The mean over all their tokens, each after its own prompt alone."""
    model = build_model(TOKENIZER, SEED)
    examples = [([5, 6, 7], [8]), ([9, 10], [11, 12, 13])]
    losses = []
    for prompt, answer in examples:
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses += [-logits.log_softmax(-1)[i, token] for i, token in enumerate(answer)]
    found = imitate(model, examples, TOKENIZER.pad_token_id)
    torch.testing.assert_close(found, torch.stack(losses).mean())
