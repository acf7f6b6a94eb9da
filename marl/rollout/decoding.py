"""Continuous batching: a request joins the rows that are decoded, and leaves them, between tokens.

What a request is answered with depends on its prompt, seed and sampling parameters, never on the requests beside it, nor on
what was answered before; and on a CPU its log-probs are the trainer's own, bit for bit, where the trainer's rows are padded
to the same width (``marl.platform.shapes``).
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from marl.platform.shapes import MIN_WIDTH
from marl.rollout.attention import ATTENTION as ATTENTION
from marl.rollout.prefixes import Prefixes
from marl.rollout.reader import ModelReader
from marl.rollout.requests import Answer, Draft, Request
from marl.rollout.sampling import Sampling

logger = logging.getLogger(__name__)
PATIENCE = 4
"""Tokens that a request waits for others to be read with, where few would join many."""


def bucket(length: int) -> int:
    """The width that a prompt of this length is padded to: multiples of 32, from 512 on of 128."""
    step = MIN_WIDTH if length <= 512 else 128
    return -(-length // step) * step


def end_ids(tokenizer: Any, *configs: Any) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's, and those of a model's configuration and generation configuration."""
    found = {tokenizer.eos_token_id}
    for config in configs:
        eos = getattr(config, "eos_token_id", None)
        found |= set(eos) if isinstance(eos, list) else {eos}
    return frozenset(found - {None})


def padding_token(tokenizer: Any) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


class Reader(Protocol):
    """Model side of decoding: reads contexts, then every token that was chosen."""

    def join(self, drafts: Sequence[Draft]) -> Tensor:
        """Append a row for each; scores [B, V] of their next tokens."""
        ...

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Scores [B, V] of the token after these, one a row."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        ...

    def clear(self, adapter: str | None = None) -> None:
        """Forget all rows, and all that was read; by one adapter, if it is named."""
        ...


class SingleReader(ModelReader):
    """Each draft is a row of one model."""

    def join(self, drafts: Sequence[Draft]) -> Tensor:
        adapters = [s.request.adapter for s in drafts]
        return self.append([s.context for s in drafts], max(longest(s) for s in drafts), adapters)


def longest(draft: Draft) -> int:
    return len(draft.request.prompt_ids) + draft.request.max_tokens


NO_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Failed allocations for which torch has no class of its own: a CPU's, and those of a library of the GPU's."""


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in NO_MEMORY)


class Engine:
    """Answers requests, up to ``limit`` at once: fewer after a failed allocation, and with every answer more again, up to one less
    than were too many."""

    def __init__(self, reader: Reader, device: torch.device, to_text: Callable[[list[int]], str], limit: int) -> None:
        self.reader, self.device, self.to_text = reader, device, to_text
        self.limit = self.most = self.allowed = limit
        self.waiting: deque[Draft] = deque()
        self.rows: list[Draft] = []
        self.sampling = Sampling([], device)
        self.added = self.passed = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    def add(self, request: Request) -> Draft:
        draft = Draft(self.added, request)
        self.added += 1
        self.waiting.append(draft)  # a step in another thread may take it at once
        return draft

    @torch.inference_mode()
    def remove(self, drafts: Sequence[Draft]) -> None:
        """Give these up."""
        gone = set(map(id, drafts))
        self.waiting = deque(s for s in self.waiting if id(s) not in gone)
        self._leave([row for row, s in enumerate(self.rows) if id(s) in gone])

    def forget(self, adapter: str | None = None) -> None:
        """The weights have changed, or an adapter's: what was read is read again, by requests half answered too."""
        self.limit = self.most = self.allowed
        self._read_again(adapter)

    def _read_again(self, adapter: str | None = None) -> None:
        self.reader.clear(adapter)
        self.waiting.extendleft(reversed(self.rows))
        self.rows = []

    def fail(self) -> list[Draft]:
        """Give up what is being decoded, after an error; returns it."""
        failed = self.rows
        self.rows = []
        self.reader.clear()
        return failed

    def step(self) -> list[Draft]:
        """One token more for every row; returns those that have ended. Rows for which memory is lacking are begun again, half as many
        at once; the error is raised for a request that is alone."""
        try:
            finished = self._step()
        except RuntimeError as error:
            if not is_out_of_memory(error) or self.limit == 1:
                raise
            self.limit = max(1, len(self.rows) // 2)
            if len(self.rows) > 2:  # so many were too many, until the next weights
                self.most = len(self.rows) - 1
            logger.warning(
                "%s; the server goes on with %d requests at once: lower rollout.max_num_seqs", error, self.limit
            )
            self._read_again()
            return []
        self.limit = min(self.most, self.limit + len(finished))
        return finished

    @torch.inference_mode()
    def _step(self) -> list[Draft]:
        scores = [self.reader.step([s.answer.token_ids[-1] for s in self.rows])] if self.rows else []
        if joining := self._joining():
            self.rows += joining
            scores.append(self.reader.join(joining))
            self.sampling = Sampling([s.request for s in self.rows], self.device)
        uniforms_B = torch.tensor([s.uniform() for s in self.rows], dtype=torch.float64, device=self.device)
        drawn = self.sampling(torch.cat(scores), uniforms_B)
        picked = zip(self.rows, *(x.tolist() for x in drawn), strict=True)
        ended = [row for row, (s, token, said) in enumerate(picked) if s.append(token, said, self.to_text)]
        finished = [self.rows[row] for row in ended]
        self._leave(ended)
        return finished

    def _joining(self) -> list[Draft]:
        """Those that wait, if there are enough to read together or they have waited long enough."""
        ready = min(len(self.waiting), self.limit - len(self.rows))
        self.passed += bool(ready)
        if 8 * ready < len(self.rows) and self.passed <= PATIENCE:
            return []
        self.passed = 0
        return [self.waiting.popleft() for _ in range(ready)]

    def _leave(self, ended: Sequence[int]) -> None:
        """The last rows take the places of those that have ended."""
        if not ended:
            return
        rows = list(range(len(self.rows)))
        for row in reversed(ended):
            rows[row] = rows[-1]
            rows.pop()
        left = [self.rows[row] for row in rows]
        try:
            self.reader.keep(rows)  # also what the others have read, for later
            self.sampling = Sampling([s.request for s in left], self.device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.rows = left
            return self._read_again()
        self.rows = left


def decode(
    model: PreTrainedModel, requests: Sequence[Request], pad_id: int, to_text: Callable[[list[int]], str]
) -> list[Answer]:
    """Answer requests together. Equal prefixes are read once."""
    return answer(SingleReader(model, Prefixes(limit=0), pad_id), requests, model.device, to_text)


def answer(
    reader: Reader, requests: Sequence[Request], device: torch.device, to_text: Callable[[list[int]], str]
) -> list[Answer]:
    """Decode until every request has its answer."""
    engine = Engine(reader, device, to_text, limit=sys.maxsize)
    drafts = [engine.add(request) for request in requests]
    while engine.busy:
        engine.step()
    return [draft.answer for draft in drafts]
