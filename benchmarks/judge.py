"""A judge that scores as ``benchmarks.reward`` does, but one answer at a time, which takes it ``SECONDS``."""

import asyncio
import zlib
from typing import Any

SECONDS = 0.02
JUDGING = asyncio.Lock()


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    async with JUDGING:
        await asyncio.sleep(SECONDS)
    return zlib.crc32(solution_str.encode()) % 700 / 100
