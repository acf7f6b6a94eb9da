"""A run's folder on several hosts: each rank writes its part of a checkpoint, and the driver reads all of them."""

import asyncio
import uuid
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from marl.cluster.worker_group import WorkerGroup
from marl.config.errors import ConfigError


async def check_shared(folder: Path, groups: Sequence[WorkerGroup]) -> None:
    """Raise ConfigError where a rank's host has another file system than the driver's: its part would stay there."""
    folder.mkdir(parents=True, exist_ok=True)
    sign = folder / f".shared_{uuid.uuid4().hex}"
    sign.touch()
    try:
        hosts = chain.from_iterable(await asyncio.gather(*(group.hosts_without(sign) for group in groups)))
    finally:
        sign.unlink()
    lacking = sorted(set(hosts))
    if lacking:
        raise ConfigError(
            f"trainer.default_local_dir={folder}: a file that was just written there is missing on {', '.join(lacking)}; set it "
            "to a folder on a file system that is shared by all hosts, or save nothing (trainer.save_freq=-1 "
            "trainer.save_final=false)"
        )
