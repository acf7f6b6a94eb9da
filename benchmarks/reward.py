"""The reward function of ``benchmarks.work`` in verl's form."""

import zlib
from typing import Any


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return zlib.crc32(solution_str.encode()) % 700 / 100
