"""Memory that the C library hands out."""

import ctypes
import os
import platform

KEPT_BYTES = 1 << 30
SMALL_BYTES = 1 << 25
"""Size up to which memory can be kept: the largest that glibc allows."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let glibc keep up to ``KEPT_BYTES`` of freed memory for what is allocated next.

    A step on a CPU frees and allocates the same activations again and again, and the system clears every page that it hands
    out. Settings of the environment (``MALLOC_…``, ``GLIBC_TUNABLES``) take precedence.
    """
    users = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if users or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, SMALL_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
