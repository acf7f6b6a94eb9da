"""A run in one process, without Ray: the same workers, servers, runners and learners, called directly.

``breakpoint()`` works in each of them. One rank a policy, and the ``hf`` rollout.
"""

import inspect
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.utils.device import get_device_name

from marl.cluster.workers.interface import LOOPBACK, VARIABLE, interface_of
from marl.cluster.workers.policy_worker import process_group_backend
from marl.config.targets import built
from marl.rollout.hf import LOCAL_SERVERS, server_name
from marl.rollout.hf_server import HFServer
from marl.rollout.requests import Draft
from marl.rollout.servers import CoalescingClient
from marl.rollout.vllm_sglang import replica_offset

ONE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "RAY_LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": LOOPBACK,
    "MASTER_PORT": "0",
}
"""Environment variables from which verl's workers read their rank. The store is in memory, and gloo's port on the loopback."""


@contextmanager
def one_process() -> Iterator[None]:
    """A world of one rank in this process, for as long as the block lasts."""
    interface = interface_of(LOOPBACK)
    environment = ONE_RANK | ({VARIABLE: interface} if interface else {})
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    started = not torch.distributed.is_initialized()
    if started:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(process_group_backend(), store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        if started:
            torch.distributed.destroy_process_group()
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


class Done:
    """The result of a call to one rank, there already unless its method is ``async``; verl's future of a call to all ranks, too."""

    def __init__(self, result: Any) -> None:
        self.result, self.futures = result, [self]

    def __await__(self) -> Generator[Any, None, Any]:
        if inspect.isawaitable(self.result):
            return (yield from self.result.__await__())
        return self.result

    def __iter__(self) -> Iterator["Done"]:
        return iter(self.futures)

    def get(self) -> Any:
        return self.result


class LocalWorkers:
    """One worker, with the surface of verl's worker group."""

    world_size = 1
    workers: list = []
    """Ray's actors: there is none to end."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Callable[..., Done]:
        method = getattr(self.worker, name)
        return lambda *arguments, **settings: Done(method(*arguments, **settings))


class LocalHandle:
    """An object with the surface of a Ray actor's handle: ``handle.method.remote(…)`` gives something to await."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._target, name))


REAL_MODEL = 20_000_000
"""Parameters from which several threads pay."""


class LocalServer(HFServer):
    """Decodes in the caller's thread: the event loop blocks, so that a debugger has the terminal."""

    handover = 0.0

    def threads(self) -> int:
        """All cores for a real model; a tiny one is slower on two. Models of one process share them."""
        models = [self.model, *(server._target.model for server in LOCAL_SERVERS.values())]
        largest = max(model.num_parameters() for model in models)
        return (os.cpu_count() or 1) if largest > REAL_MODEL else 1

    async def _decode(self) -> list[Draft]:
        return self.engine.step()


class LocalServers:
    """The one server of a policy, with the surface of :class:`marl.rollout.servers.PolicyServers`."""

    def __init__(self, config: Any) -> None:
        self.config, rollout = config, built(config.actor_rollout_ref.rollout)
        self.name = server_name(rollout, replica_offset(rollout))
        model = built(config.actor_rollout_ref.model)
        with torch.random.fork_rng(devices=[]):  # a replay has no servers: one must not advance the trainer's generator
            server = LocalServer(rollout, model, get_device_name())
        self.server_handles = [LocalHandle(server)]
        self.server_addresses = [self.name]
        LOCAL_SERVERS[self.name] = self.server_handles[0]

    async def start(self) -> None:
        """They decode from the beginning."""

    async def each_replica(self, method: str) -> None:
        """Nothing to free: there is one model for the trainer and one for the server, and both stay."""

    def client(self, adapter: str | None = None) -> CoalescingClient:
        return CoalescingClient(self.config, None, servers=self.server_handles, adapter=adapter)

    def stop(self) -> None:
        LOCAL_SERVERS.pop(self.name, None)  # adapters have one server together
