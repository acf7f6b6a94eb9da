"""Weight sender that notices a failed receiver.

verl's sender and receiver take turns on a socket without a limit: where the receiver fails, the trainer waits for ever
for an acknowledgement that nobody will send. The receiver's own call has an answer by then, so it is asked while waiting.
Importing this module needs zmq and vLLM, as verl's does.
"""

import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import ray
from ray.exceptions import RayTaskError
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from zmq import POLLIN, POLLOUT

from marl.utils import segments

POLL_MS = 250


class WeightsRefused(RuntimeError):
    """Raised where a server failed to take the weights, or ended its call without them."""


class WatchedSender(BucketedWeightSender):
    socket: Any

    def __init__(self, *, receiving: Any, whose: str, seconds: float, key: str, **settings: Any) -> None:
        """``receiving``: the server's call, as Ray's reference; None in ranks that made none. ``seconds``: deadline of every
        single bucket, half of what ``key`` sets."""
        super().__init__(**settings)
        self.receiving, self.whose, self.seconds, self.key = receiving, whose, seconds, key
        self.segment: str | None = None
        """Name of the shared memory that the receiver was told of."""

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = WatchedSocket(self.socket, self)

    def _cleanup(self) -> None:
        """As verl's, which does not know of its buffer yet where the receiver's first answer is missing."""
        if self.shm is None and self.segment is not None:
            unacknowledged = SharedMemory(name=self.segment)
            unacknowledged.close()
            unacknowledged.unlink()
        super()._cleanup()

    def receiver_ended(self) -> bool:
        """True if the server's call has ended. Raises WeightsRefused if it failed, RayActorError if the server died."""
        if self.receiving is None or not ray.wait([self.receiving], timeout=0)[0]:
            return False
        try:
            ray.get(self.receiving)
        except RayTaskError as error:
            cause = error.cause
            raise WeightsRefused(f"{self.whose} failed to take the weights: {type(cause).__name__}: {cause}") from None
        return True

    def late(self) -> TimeoutError:
        return TimeoutError(
            f"{self.whose} took no weights for {self.seconds:g} s, half of {self.key}; look at its log, and raise "
            "the key if it only needs longer"
        )


class WatchedSocket:
    """The part of a zmq socket that verl's sender uses; its waits end with the receiver's call or at the deadline."""

    def __init__(self, socket: Any, sender: WatchedSender) -> None:
        self.socket, self.sender = socket, sender

    def recv(self) -> bytes:
        self._wait_for(POLLIN)
        received: bytes = self.socket.recv()
        return received

    def send_pyobj(self, message: Any) -> None:
        if self.sender.use_shm and "name" in message:
            self.sender.segment = message["name"]
            segments.note(message["name"])
        self._wait_for(POLLOUT)
        self.socket.send_pyobj(message)

    def close(self) -> None:
        self.socket.close(linger=0)  # what a dead receiver did not fetch would keep this process from ending

    def _wait_for(self, event: int) -> None:
        ends = time.monotonic() + self.sender.seconds
        while not self.socket.poll(POLL_MS, event):
            if self.sender.receiver_ended() and not self.socket.poll(POLL_MS, event):  # its last word may be on its way
                raise WeightsRefused(f"{self.sender.whose} ended its weight sync before all weights had been sent")
            if time.monotonic() > ends:
                raise self.sender.late()
