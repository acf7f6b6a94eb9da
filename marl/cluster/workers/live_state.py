"""State written to a file directly from live tensors; they are copied only if they must change before they have been read."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from marl.utils.dtensors import local
from marl.utils.trees import mapped

PIECE = 16 << 20
"""Bytes of one write: a release waits for the disk until the write that it meets has ended, and no longer."""
SMALL = 1 << 10
"""Bytes up to which a tensor is copied at once: an optimizer's step count, for one."""
STUCK_S = 60.0
"""Seconds without progress after which the disk counts as stuck."""
SAMPLE = 32
"""Bytes of each live tensor that are compared before and after it is read."""
Copy = Callable[[torch.Tensor], torch.Tensor]


class LiveState:
    """Nested tensors that a thread writes or copies while training continues; :meth:`release` must be called before they change.

    Tensors on an accelerator, and those that do not fill their storage (``torch.save`` would write all of it), are copied to
    host memory at once.
    """

    def __init__(self, state: Any, copy: Copy) -> None:
        self.copy = copy
        self.lock = threading.Lock()
        self.release_waits = threading.Event()
        self.progress = 0
        self.live: dict[int, torch.Tensor] = {}
        """This rank's parts of the tensors that are not copied, by the tensor's id."""
        with torch.no_grad():  # so that to_local() records no autograd node
            self.state = mapped(state, self._live_or_copied)
        self.samples = self._samples()

    @property
    def is_live(self) -> bool:
        return bool(self.live)

    def _live_or_copied(self, tensor: torch.Tensor) -> torch.Tensor:
        own = local(tensor)
        if own.device.type != "cpu" or own.nbytes <= SMALL or own.untyped_storage().nbytes() > own.nbytes:
            return self.copy(tensor)
        self.live[id(tensor)] = own
        return tensor

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        self.progress += 1
        return self.copy(tensor) if id(tensor) in self.live else tensor

    def _samples(self) -> list[bytes]:
        """Bytes from the middle of every live tensor. (Version counters do not see what changes a DTensor's part.)"""
        return [ctypes.string_at(own.data_ptr() + own.nbytes // 2, SAMPLE) for own in self.live.values()]

    @contextmanager
    def _read(self) -> Iterator[Any]:
        """The state, for one reader, which may not fail halfway: it is dropped in any case. Raises RuntimeError if a sample shows
        that it was changed meanwhile."""
        with self.lock:
            try:
                yield self.state
                if self._samples() != self.samples:
                    raise RuntimeError(
                        "weights or moments changed while a checkpoint was reading them: no release before"
                    )
            finally:
                self.state = None
                self.live.clear()
                self.samples.clear()

    def write(self, path: str) -> None:
        """Write the state by ``torch.save``."""
        with open(path, "wb", buffering=0) as file:
            target: Any = _Target(file.write, self)
            with self._read() as state:
                torch.save(state, target)
            while target.rest:
                _write_whole(file.write, target.rest.popleft())

    def copied(self) -> Any:
        """The state as a copy, for a writer of another form."""
        with self._read() as state:
            return mapped(state, self._copied)

    def release(self) -> None:
        """Return once no live tensor is being read. A write in progress finishes into memory instead of waiting for the disk; a
        state whose write has not started is copied. Raises TimeoutError if nothing moves for ``STUCK_S``."""
        if not self.is_live:
            return
        self.release_waits.set()
        before = self.progress
        while not self.lock.acquire(timeout=STUCK_S):
            if self.progress == before:
                raise TimeoutError(
                    f"a checkpoint's disk accepted nothing for {STUCK_S:.0f} s, and the weights that are being written are about to change: "
                    "look at the disk, or set trainer.save_in_background=false"
                )
            before = self.progress
        try:
            if self.is_live:
                self.state = mapped(self.state, self._copied)
                self.live.clear()
                self.samples.clear()
        finally:
            self.lock.release()


class _Target:
    """A file for ``torch.save``; once a release waits for a live state, the rest is collected in memory."""

    def __init__(self, write: Callable[[Any], int | None], state: LiveState) -> None:
        self.to_file, self.state = write, state
        self.rest: deque[bytes] = deque()

    def write(self, content: memoryview) -> int:
        left = content.cast("B")
        while left and not (self.state.is_live and self.state.release_waits.is_set()):
            left = left[_write_whole(self.to_file, left[:PIECE]) :]
            self.state.progress += 1
        if left:
            self.rest.append(bytes(left))
            self.state.progress += 1
        return len(content)

    def flush(self) -> None:
        """The file has no buffer."""


def _write_whole(write: Callable[[Any], int | None], content: bytes | memoryview) -> int:
    left = memoryview(content)
    while left:
        left = left[write(left) or 0 :]
    return len(content)
