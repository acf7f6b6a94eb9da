"""Watch over Ray's own processes: without the head, Ray ends the driver's process without a word of the run's; without the raylet
of this machine a run trains on, but nobody notices any more that a process of it dies."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

logger = logging.getLogger(__name__)
TLS = "RAY_USE_TLS"
VARIABLE, RAYS_DEFAULT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", "60"
"""Ray's limit, after which it ends every process of a cluster without a head."""
BEAT_S = 1.0


@asynccontextmanager
async def head_watched() -> AsyncIterator[None]:
    """Log an error while the block runs once the head has not answered for half of Ray's limit; until then it may come back.
    Raises GroupLost where the raylet has died that this process started."""
    import ray  # heavy: main imports this file before the configuration is checked

    if not ray.is_initialized():
        yield
        return
    block, raylet = asyncio.current_task(), own_raylet()
    assert block is not None
    watching = [asyncio.create_task(watch(ray.get_runtime_context().gcs_address, limit_s()))]
    missing = asyncio.create_task(end_without(raylet, block)) if raylet is not None else None
    watching += [missing] if missing else []
    try:
        yield
    except asyncio.CancelledError:
        if missing is None or not missing.done() or missing.cancelled() or block.uncancel():  # Ctrl-C ends the run
            raise
        from marl.cluster.failures import GroupLost

        raise GroupLost(f"Ray's own process of this machine (raylet, pid {raylet.pid}) died") from None
    finally:
        for watch_ in watching:
            watch_.cancel()


def own_raylet() -> Any:
    """The raylet of the cluster that this process started, as a ``Popen``; None where it started none."""
    import ray  # heavy

    node = ray._private.worker._global_node
    with suppress(AttributeError, KeyError, IndexError):
        return node.all_processes["raylet"][0].process
    return None


async def end_without(raylet: Any, block: Any) -> None:
    """Cancel the block once the raylet has died."""
    while raylet.poll() is None:
        await asyncio.sleep(BEAT_S)
    block.cancel()


def limit_s() -> float:
    return float(os.environ.get(VARIABLE, RAYS_DEFAULT_S))


async def watch(address: str, limit: float) -> None:
    """Ask the head whether it is there, again and again."""
    silent_since, told = None, False
    while True:
        asked = asyncio.get_running_loop().time()
        if await answers(address):
            if told:
                logger.warning("the head of the Ray cluster at %s answers again", address)
            silent_since, told = None, False
        else:
            silent_since = asked if silent_since is None else silent_since
            if not told and asked - silent_since >= limit / 2:
                told = True
                logger.error(
                    "the head of the Ray cluster at %s has not answered for %g s; of one that is gone, Ray ends the run after %g s (%s). "
                    "Start the cluster again (ray start --head, docs/clusters.md), and continue from the last checkpoint (trainer.resume_mode=auto)",
                    *(address, limit / 2, limit, VARIABLE),
                )
        await asyncio.sleep(BEAT_S)


async def answers(address: str) -> bool:
    """True for a head that says something: a gRPC server speaks first, unless TLS does, and for a process that hangs the kernel still
    accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(BEAT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            with closing(writer):
                return os.environ.get(TLS, "0") != "0" or bool(await reader.read(1))
    except (OSError, TimeoutError):
        return False
