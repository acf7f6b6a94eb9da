"""The servers of one policy, through verl's manager and client."""

import asyncio
import zlib
from typing import Any

import ray
from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import TokenOutput

from marl.rollout.hf_server import Pending, to_token_output
from marl.rollout.vllm_sglang import offset_replica_class, replica_offset


class PolicyServers(LLMServerManager):
    """verl's manager, with the policy's replica offset.

    Requests need no load-balancing actor, which costs the driver more than the request itself: a conversation stays on the
    server that its name hashes to. ``rollout.router_config_path`` asks for verl's balancer all the same.
    """

    def __init__(self, config: Any, worker_group: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        self.rollout_replica_class = offset_replica_class(rollout.name)
        super().__init__(config=config, worker_group=worker_group, start_rank=replica_offset(rollout))

    async def _init_global_load_balancer(self) -> None:
        self.global_load_balancer = None
        if self.has_router:
            await super()._init_global_load_balancer()

    @property
    def has_router(self) -> bool:
        return self.rollout_config.name != "hf" and bool(self.rollout_config.get("router_config_path"))

    def client(self, adapter: str | None = None) -> LLMServerClient:
        """``adapter``: the one whose answers are wanted, where servers hold several; None for the model itself."""
        if self.has_router:
            return self.get_client(client_cls=NamingClient, adapter=adapter)
        kind = CoalescingClient if self.rollout_config.name == "hf" else DirectClient
        return self.get_client(client_cls=kind, servers=self.server_handles, adapter=adapter)

    def all_handles(self) -> list[ray.actor.ActorHandle]:
        """Every server's actor, on all nodes of each replica; those that were started, if a start was interrupted."""
        return [server for replica in getattr(self, "rollout_replicas", ()) for server in replica.servers]


def server_of(session: str, servers: int) -> int:
    """Number of the server that a conversation stays on."""
    return zlib.crc32(session.encode()) % servers


class NamingClient(LLMServerClient):
    """verl's client, whose requests name the adapter that they are for."""

    def __init__(self, config: Any, load_balancer_handle: Any, adapter: str | None = None, **_: Any) -> None:
        super().__init__(config, load_balancer_handle)
        self.named = {} if adapter is None else {"adapter": adapter}

    async def generate(self, request_id: str, *, sampling_params: dict[str, Any], **settings: Any) -> TokenOutput:
        named = sampling_params | self.named if self.named else sampling_params
        return await super().generate(request_id, sampling_params=named, **settings)


class DirectClient(NamingClient):
    """The same without a router between it and the servers."""

    def __init__(
        self, config: Any, load_balancer_handle: Any, servers: list[ray.actor.ActorHandle], **kwargs: Any
    ) -> None:
        super().__init__(config, load_balancer_handle, **kwargs)
        self.servers = servers

    async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, ray.actor.ActorHandle]:
        index = server_of(request_id, len(self.servers))
        return str(index), self.servers[index]

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Nothing was acquired. verl's asks an actor, which would start a new Ray after the end of a run."""


class CoalescingClient(LLMServerClient):
    """All requests that episodes make in one tick of the event loop travel in one Ray call per ``hf`` server.

    A Ray call costs more than an answer of a small model. Turns of one conversation stay on one server.
    """

    def __init__(
        self,
        config: Any,
        load_balancer_handle: Any,
        servers: list[ray.actor.ActorHandle],
        adapter: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config, load_balancer_handle)
        self.servers = servers
        self.named = {} if adapter is None else {"adapter": adapter}
        self.limit = config.actor_rollout_ref.rollout.max_num_seqs
        self.waiting: dict[int, list[tuple[list[int], dict[str, Any], asyncio.Future]]] = {}
        self.sending: set[asyncio.Task] = set()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if not self.waiting:
            loop.call_soon(self._flush)
        server = server_of(request_id, len(self.servers))
        if type(prompt_ids) is not list or set(map(type, prompt_ids)) != {int}:
            prompt_ids = normalize_token_ids(prompt_ids)  # which takes ten times as long to find nothing
        request = (prompt_ids, sampling_params | self.named if self.named else sampling_params, future)
        self.waiting.setdefault(server, []).append(request)
        return to_token_output(await future)

    def _flush(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for server, requests in waiting.items():
            for start in range(0, len(requests), self.limit):
                task = asyncio.create_task(self._send(self.servers[server], requests[start : start + self.limit]))
                self.sending.add(task)
                task.add_done_callback(self.sending.discard)

    async def _send(self, server: ray.actor.ActorHandle, requests: list[tuple]) -> None:
        """Answers are handed out as they come."""
        try:
            answers = await server.generate_many.remote([(prompt, params) for prompt, params, _ in requests])
            pending = {}
            for (*_, future), answer in zip(requests, answers, strict=True):
                if isinstance(answer, Pending):
                    pending[answer.ticket] = future
                else:
                    settle(future, answer)
            while pending:
                for ticket, answer in await server.collect.remote(list(pending)):
                    settle(pending.pop(ticket), answer)
        except BaseException as error:
            for *_, future in requests:
                settle(future, error)
            if not isinstance(error, Exception):
                raise


def settle(future: asyncio.Future, answer: tuple | BaseException) -> None:
    """Hand out an answer or an error, unless its episode has ended meanwhile."""
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
