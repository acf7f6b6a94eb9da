"""The training tasks, batch after batch and epoch after epoch."""

import asyncio
import copy
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from marl.types import Task

Read = tuple[Sequence[Task] | None, Exception | None]
"""A batch, or the error raised while reading it."""


class TaskStream:
    """Endless batches of a loader. The next one can be read in the background."""

    def __init__(self, loader: StatefulDataLoader, reads_ahead: bool = True) -> None:
        # a loader's own processes read ahead already, and may not be forked from a thread
        self.loader, self.reads_ahead = loader, reads_ahead and not loader.num_workers
        self._restart()

    def _restart(self) -> None:
        self.batches = chain.from_iterable(repeat(self.loader))
        self.begun = False
        self.ahead: Read | None = None
        self.before: dict[str, Any] = {}
        """The loader's state before the batch that is read ahead."""

    async def next(self) -> Sequence[Task]:
        self.begun = True
        (tasks, error), self.ahead = self.ahead or self._read(), None
        if error is not None:
            raise error
        assert tasks is not None
        return tasks

    async def read_ahead(self) -> None:
        """Read the next batch in a thread. Errors are raised by :meth:`next`."""
        if self.reads_ahead and self.begun and self.ahead is None:
            self.before = copy.deepcopy(self.loader.state_dict())
            self.ahead = await asyncio.to_thread(self._read)

    def _read(self) -> Read:
        try:
            return next(self.batches), None
        except Exception as error:
            return None, error

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch returned by :meth:`next`."""
        return self.loader.state_dict() if self.ahead is None else self.before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch of :meth:`state_dict`."""
        self.loader.load_state_dict(state)
        self._restart()
        self.begun = True
        self.batches = chain(iter(self.loader), self.batches)
