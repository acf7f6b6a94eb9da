"""A cable between two network namespaces with delay and loss, made in user space: the kernel's netem may be missing.

``python cable.py PID_A NAME_A PID_B NAME_B`` makes an interface in the namespace of each process, and passes frames between
the two; ``DELAY_MS LOSS_PERCENT`` on its input, a line each time, impairs them. The delay is one way.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

TUN = Path("/dev/net/tun")
CLONE_NEWNET, TUNSETIFF, TAP_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x0002 | 0x1000
FRAMES_A_TURN = 64


def without_tun() -> str | None:
    """The reason why there are no such cables here, or None."""
    return None if os.access(TUN, os.W_OK) else f"{TUN} is missing, or may not be opened"


class Cable:
    """A cable in a process of its own, which ends with this one."""

    def __init__(self, *ends) -> None:
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-S", __file__, *map(str, ends)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != "wired\n":
            raise RuntimeError(f"no cable between {ends}")

    def impair(self, delay_ms: float = 0, loss_percent: float = 0) -> None:
        if self.process.poll() is None:
            self.process.stdin.write(f"{delay_ms} {loss_percent}\n")
            self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


def tap(pid: str, name: str) -> int:
    """An interface in a process's network namespace."""
    libc, space = ctypes.CDLL(None, use_errno=True), os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(space, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    opened = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(opened, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return opened


def frames(end: int):
    """The frames that wait at one end."""
    for _ in range(FRAMES_A_TURN):
        try:
            yield os.read(end, 65535)
        except BlockingIOError:
            return
        except OSError:  # the namespace of this end is gone
            sys.exit()


def deliver(waiting: list) -> float | None:
    """Send what is due, and return the seconds until the next frame is."""
    while waiting and waiting[0][0] <= time.monotonic():
        *_, end, frame = heapq.heappop(waiting)
        try:
            os.write(end, frame)
        except OSError:  # a full queue, or an interface that is down: the frame is lost
            continue
    return max(0.0, waiting[0][0] - time.monotonic()) if waiting else None


def main(first: int, second: int) -> None:
    other, waiting, count = {first: second, second: first}, [], 0
    delay, loss, drawn = 0.0, 0.0, random.Random(0)
    while True:
        ready, _, _ = select.select([first, second, 0], [], [], deliver(waiting))
        for end in ready:
            if end == 0:
                lines = os.read(0, 4096).decode().splitlines()
                if not lines:
                    return
                delay, loss = (float(word) for word in lines[-1].split())
                continue
            for frame in frames(end):
                if drawn.random() * 100 >= loss:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + delay / 1000, count, other[end], frame))


if __name__ == "__main__":
    ends = tap(sys.argv[1], sys.argv[2]), tap(sys.argv[3], sys.argv[4])
    sys.stdout.write("wired\n")
    sys.stdout.flush()
    main(*ends)
