"""A live state on its way into a file, read where it lies: it is copied only if it is to change before it was read."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from marl.utils.trees import mapped

PIECE = 16 << 20
"""Bytes of one write, the most that a change may have to wait for the disk."""
STUCK_S = 60.0
"""Seconds without a byte read after which a disk counts as stuck."""
logger = logging.getLogger(__name__)
Copy = Callable[[torch.Tensor], torch.Tensor]


class LiveState:
    """Nested tensors that a thread writes, or copies, while their owner goes on; the owner calls :meth:`release` before it changes
    them. Tensors on an accelerator are copied to the host at once.
    """

    def __init__(self, state: Any, copy: Copy) -> None:
        self.copy = copy
        self.lock = threading.Lock()
        self.hurried = threading.Event()
        self.is_live, self.bytes_read = True, 0
        self.tensors: list[torch.Tensor] = []
        with torch.no_grad():  # under which a DTensor gives its part without a node of a graph
            self.state = mapped(state, self._left)
        self.versions = self._versions()

    def _left(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        is_a_view = own.untyped_storage().nbytes() > own.nbytes  # of which torch.save writes the whole storage
        if own.device.type != "cpu" or is_a_view:
            return self.copy(tensor)
        self.tensors.append(own)
        return tensor

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self.tensors if not tensor.is_inference()]

    def write(self, path: str) -> None:
        """Write the state by ``torch.save``. Raises RuntimeError if it was changed meanwhile."""
        with open(path, "wb", buffering=0) as file:
            target: Any = _Target(file.write, self)
            with self.lock:
                torch.save(self.state, target)
                self._give_up()
            for piece in target.rest:
                _write_whole(file.write, piece)

    def copied(self) -> Any:
        """A copy of the state, for a writer of another form. Raises RuntimeError if it was changed meanwhile."""
        with self.lock:
            state = mapped(self.state, self.copy) if self.is_live else self.state
            self._give_up()
        return state

    def _give_up(self) -> None:
        if self._versions() != self.versions:
            raise RuntimeError("weights or moments were changed while a checkpoint read them, and not released before")
        self.is_live, self.state = False, None
        self.tensors.clear()
        self.versions.clear()

    def release(self) -> None:
        """Return as soon as the live tensors are read no more: the rest of a state that is being written goes into memory, not at
        the disk's speed, and one that is not begun is copied. Raises TimeoutError if the disk takes nothing for a minute."""
        self.hurried.set()
        before = -1
        while not self.lock.acquire(timeout=STUCK_S):
            if self.bytes_read == before:
                raise TimeoutError(
                    f"a checkpoint's disk took nothing for {STUCK_S:.0f} s, and what is being written there is about to change: look at "
                    "the disk, or set trainer.save_in_background=false"
                )
            before = self.bytes_read
        try:
            if self.is_live:
                state = mapped(self.state, self.copy)
                self._give_up()
                self.state = state
        finally:
            self.lock.release()


class _Target:
    """What ``torch.save`` writes into: a file, and memory from the moment somebody waits."""

    def __init__(self, write: Callable[[Any], int | None], state: LiveState) -> None:
        self.to_file, self.state = write, state
        self.rest: list[bytes] = []

    def write(self, content: memoryview) -> int:
        left = content.cast("B")
        while left and not self.state.hurried.is_set():
            left = left[_write_whole(self.to_file, left[:PIECE]) :]
            self.state.bytes_read += 1
        if left:
            self.rest.append(bytes(left))
            self.state.bytes_read += 1
        return len(content)

    def flush(self) -> None:
        """The file has no buffer."""


def _write_whole(write: Callable[[Any], int | None], content: bytes | memoryview) -> int:
    left = memoryview(content)
    while left:
        left = left[write(left) or 0 :]
    return len(content)
