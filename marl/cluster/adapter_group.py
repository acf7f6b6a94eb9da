"""Policies that are adapters on one base model (``sharing=lora``): to trainer and learners each is a policy group."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from verl.workers.rollout.replica import TokenOutput

from marl.cluster.local import LocalPolicyGroup
from marl.cluster.policy_group import RayPolicyGroup
from marl.config.deadlines import Phase
from marl.types import Metrics, PolicyName
from marl.utils.marks import marks_of


class Once:
    """Work that several members ask for, and that is done once; its error is everybody's."""

    def __init__(self) -> None:
        self.task: asyncio.Task | None = None

    async def __call__(self, work: Callable[[], Awaitable[Any]]) -> Any:
        if self.task is None:
            self.task = asyncio.ensure_future(work())  # type: ignore[arg-type]
        return await self.task


class SharedBase:
    """The start of the workers and servers that the adapters of one pool share."""

    def __init__(self, first: PolicyName) -> None:
        """``first``: the adapter with which the base's weights are proved."""
        self.workers, self.servers, self.first = Once(), Once(), first


class AdapterGroup(RayPolicyGroup):
    """One adapter of a shared worker group. Its pool's lock keeps the adapters' calls apart."""

    stepped = True
    """True if the servers' copy of the adapter is not the trainer's."""

    def __init__(self, *arguments: Any, base: SharedBase) -> None:
        super().__init__(*arguments)
        self.base = base
        self.read_as = (self.name, self.name == base.first)

    async def start_workers(self) -> None:
        await self.base.workers(super().start_workers)

    async def start_servers(self) -> None:
        owner = await self.base.servers(self._start_shared)
        self.servers, self.weight_sync = owner.servers, owner.weight_sync

    async def _start_shared(self) -> "AdapterGroup":
        await super().start_servers()
        return self

    def client(self) -> Any:
        return self.servers.client(adapter=self.name)

    async def ask_servers(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> list[TokenOutput]:
        return await super().ask_servers(prompt_ids, {**sampling, "adapter": self.name})

    def _for_workers(
        self, rows: TensorDict, mini_batches: int = 1, **settings: Any
    ) -> tuple[TensorDict, list[int] | None]:
        return super()._for_workers(rows, mini_batches, adapter=self.name, **settings)

    async def update_actor(self, rows: TensorDict) -> Metrics:
        self.stepped = True
        return await super().update_actor(rows)

    async def descend(self, rows: TensorDict, last: bool) -> Metrics:
        self.stepped = True
        return await super().descend(rows, last)

    async def sync_weights(self, step: int) -> None:
        """Ship the adapter, if it has changed since the last sync, and the step."""
        await super().sync_weights(step)
        self.stepped = False

    def _sync(self, step: int) -> Awaitable[list[tuple[float, float]]]:
        return asyncio.gather(*self.workers.sync_adapter(self.name, step, self.stepped))

    async def save(self, folder: Path, beside: bool = True) -> list[Path]:
        what = f"saving to {folder}"
        await self._all(what, self.workers.save_adapter, self.name, str(folder), beside, phase=Phase.save)
        return marks_of(folder, self.workers.world_size)

    async def load(self, folder: Path) -> None:
        self.stepped = True
        await self._all(f"loading {folder}", self.workers.load_adapter, self.name, str(folder), phase=Phase.save)


class LocalAdapterGroup(AdapterGroup, LocalPolicyGroup):
    """The same in one process."""

    async def _sync(self, step: int) -> list[tuple[float, float]]:
        return [await self.workers.worker.sync_adapter(self.name, step, self.stepped)]
