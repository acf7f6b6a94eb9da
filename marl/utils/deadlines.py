"""No wait without an end."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """Wait, but not for ever. Raises TimeoutError that names what was waited for, and the key that sets the limit."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        raise TimeoutError(
            f"{what} did not end within {seconds:g} s; if it only needs longer, raise resources.timeout_s"
        ) from None
