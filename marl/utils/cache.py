"""A cache bounded by bytes."""

import sys
from collections.abc import Callable, Hashable
from threading import Lock
from typing import TypeVar

from cachetools import LRUCache

T = TypeVar("T")
CACHE_BYTES = 64 << 20
"""Memory limit of a cache of encoded texts, in every process that encodes."""
ENTRY_BYTES = 400
"""Approximate overhead of an entry in addition to its key and value."""


def cached_by_bytes(
    function: Callable[..., T], size_of: Callable[[T], int], limit: int = CACHE_BYTES
) -> Callable[..., T]:
    """The function with a least-recently-used cache of ``limit`` bytes; larger results are never cached."""
    cache: LRUCache = LRUCache(limit, getsizeof=lambda entry: entry[1])
    lock = Lock()  # long texts are encoded in threads

    def cached(*key: Hashable) -> T:
        with lock:
            entry = cache.get(key)
        if entry is None:
            result = function(*key)
            entry = result, size_of(result) + sum(map(sys.getsizeof, key)) + ENTRY_BYTES
            if entry[1] <= limit:
                with lock:
                    cache[key] = entry
        return entry[0]

    return cached
