"""Policies that are never trained: servers that load their own weights once. There is no trainer, and nothing to sync."""

import asyncio
import logging
from pathlib import Path
from typing import Any

from marl.cluster.local import LocalServers
from marl.cluster.policy_group import RayPolicyGroup
from marl.config.deadlines import Phase
from marl.rollout.servers import PolicyServers

logger = logging.getLogger(__name__)


class FrozenPolicyGroup(RayPolicyGroup):
    """The servers of a policy whose agents are all ``trainable=false``. Its workers (:mod:`marl.cluster.workers.seat_worker`)
    hold places in the pool, and no model."""

    takes_weights = False

    async def start_workers(self) -> None:
        """Nothing to load: the servers do."""

    async def start_servers(self) -> None:
        """Start the servers, which load the weights at ``model.path``."""
        self.servers: Any = PolicyServers(self.config, self.workers)
        await self._wait("starting its servers", self._launch(), Phase.start)
        await self.free_servers()

    async def free_servers(self) -> None:
        if self.rollout.free_cache_engine:
            await self._each_replica("putting its servers to sleep", "sleep")

    async def sync_weights(self, step: int) -> None:
        """Wake servers that sleep while others train; their weights never change. First empty the cache of the pool's trainers,
        which may not have synced yet."""
        if self.rollout.free_cache_engine:
            async with self.in_turn:
                emptied = asyncio.gather(*self.workers.empty_cache())
                await self._wait("emptying the cache of its pool's trainers", emptied, Phase.sync)
                await self._each_replica("waking its servers", "wake_up")
        self.version = step

    async def _each_replica(self, what: str, method: str) -> None:
        replicas = self.servers.get_replicas()
        await self._wait(what, asyncio.gather(*(getattr(replica, method)() for replica in replicas)), Phase.sync)

    async def save(self, folder: Path, beside: bool = True) -> list[Path]:
        """Nothing to save: the weights are those at ``model.path``."""
        return []

    async def load(self, folder: Path) -> None:
        """Warn of a checkpoint that holds weights of this policy, from a run that trained it."""
        if folder.is_dir():
            logger.warning(
                "policy %r is not trained and serves %s, not its weights in %s; to serve those, set policies.%s.model.path=%s",
                *(self.name, self.config.actor_rollout_ref.model.path, folder, self.name, folder / "huggingface"),
            )


class LocalFrozenPolicyGroup(FrozenPolicyGroup):
    """The same in the driver's process."""

    async def start_servers(self) -> None:
        self.servers: Any = LocalServers(self.config)

    async def free_servers(self) -> None:
        """Nothing to free: the model stays where it is."""

    async def sync_weights(self, step: int) -> None:
        self.version = step

    def stop(self) -> None:
        if hasattr(self, "servers"):
            self.servers.stop()
