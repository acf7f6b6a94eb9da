"""Requests of a rollout server, and their answers while they grow."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MARGIN = 8
"""Tokens added to a stop string's bytes: the first tokens of a tail may be parts of a character and decode to something else."""
BOUNDS: Mapping[str, Callable[[Any], bool]] = {
    "temperature": lambda value: isinstance(value, int | float) and value >= 0,
    "top_p": lambda value: isinstance(value, int | float) and value > 0,
    "top_k": lambda value: isinstance(value, int) and value >= -1,
}


def check_numbers(prompt_ids: Sequence[int], limit: Any, sampling: Mapping[str, Any], vocabulary: int) -> None:
    """Raise ValueError for a request that would fail in the engine, and there with all requests beside it."""
    if not prompt_ids or not 0 <= min(prompt_ids) <= max(prompt_ids) < vocabulary:
        found = f"{min(prompt_ids)} to {max(prompt_ids)}" if prompt_ids else "none"
        raise ValueError(f"prompt_ids: token ids {found}; expected at least one, from 0 to {vocabulary - 1}")
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"max_tokens={limit!r}; expected a whole number of at least 1")
    wrong = {key: value for key, value in sampling.items() if not BOUNDS[key](value)}
    if wrong:
        raise ValueError(
            f"sampling parameters {wrong}: expected temperature >= 0, top_p > 0, and top_k >= -1 (0, -1: all tokens)"
        )


@dataclass(frozen=True, slots=True)
class Request:
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 is off."""
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    """Strings; the answer ends with the token that completes one."""
    adapter: str | None = None
    """The adapter that answers; None for the model itself."""


@dataclass(slots=True)
class Answer:
    token_ids: list[int]
    log_probs: list[float]
    """Log-probs under the sampling distribution: after temperature, top-k and top-p; under the plain one if greedy."""
    stop_reason: str


@dataclass(slots=True, eq=False)
class Draft:
    """A request and its answer while it is written."""

    index: int
    """Place among the requests of its engine."""
    request: Request
    answer: Answer = field(default_factory=lambda: Answer([], [], "length"))
    version: int | None = None
    """Step of the weights with which it began."""
    uniforms: list[float] = field(init=False)
    tail: int = field(init=False)
    """Number of last tokens in which a newly completed stop string is looked for; a token has at least one byte. Decoding the whole
    answer after every token would take quadratic time."""

    def __post_init__(self) -> None:
        generator = np.random.Generator(np.random.Philox(self.request.seed))
        self.uniforms = generator.random(self.request.max_tokens).tolist()
        self.tail = max((len(stop.encode()) for stop in self.request.stop), default=0) + MARGIN

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens that a model reads before it continues: the prompt and the answer so far."""
        return (*self.request.prompt_ids, *self.answer.token_ids)

    def uniform(self) -> float:
        """The number that its next token is drawn with."""
        return self.uniforms[len(self.answer.token_ids)]

    def append(self, token: int, log_prob: float, to_text: Callable[[list[int]], str]) -> bool:
        """Record a token; True if it was the last one."""
        answer, request = self.answer, self.request
        answer.token_ids.append(token)
        answer.log_probs.append(log_prob)
        stopped = token in request.stop_token_ids
        if not stopped and request.stop:
            text = to_text(answer.token_ids[-self.tail :])
            if any(stop in text for stop in request.stop):  # the beginning of the tail may decode differently
                whole = to_text(answer.token_ids)
                stopped = any(stop in whole for stop in request.stop)
        if stopped:
            answer.stop_reason = "completed"
        return stopped or len(answer.token_ids) >= request.max_tokens
