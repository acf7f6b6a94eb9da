"""The servers of one policy, through verl's manager and client."""

import asyncio
import itertools
import uuid
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import TokenOutput

from marl.rollout.hf_server import Pending, to_token_output
from marl.rollout.vllm_sglang import SHUTDOWN_S, offset_replica_class, replica_offset

NAMES = itertools.count(uuid.uuid4().int)
"""Names of requests. Each process counts its own: copies of a client in several episode workers give no name twice."""


ANSWER_S = 5.0
"""Time that a server has to say that its engine ended."""


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

    async def start(self) -> None:
        await self._initialize_llm_servers()
        await self._init_global_load_balancer()

    async def each_replica(self, method: str) -> None:
        """Let every replica ``sleep`` or ``wake_up``."""
        await asyncio.gather(*(getattr(replica, method)() for replica in self.get_replicas()))

    def stop(self) -> None:
        servers = self.all_handles()
        if servers and self.rollout_config.name == "vllm":  # an engine that is killed leaves its shared memory behind
            ended = [server.shutdown.remote() for server in servers]
            ray.wait(ended, num_returns=len(ended), timeout=SHUTDOWN_S + ANSWER_S)
        for server in servers:
            ray.kill(server)

    def all_handles(self) -> list[ray.actor.ActorHandle]:
        """Every server's actor, on all nodes of each replica; those that were started, if a start was interrupted."""
        return [server for replica in getattr(self, "rollout_replicas", ()) for server in replica.servers]


def server_of(session: str, servers: int) -> int:
    """Number of the server that a conversation stays on."""
    return zlib.crc32(session.encode()) % servers


class NamingClient(LLMServerClient):
    """verl's client, whose requests name the adapter that they are for, and are given up where their callers have gone."""

    def __init__(self, config: Any, load_balancer_handle: Any, adapter: str | None = None, **_: Any) -> None:
        super().__init__(config, load_balancer_handle)
        self.named = {} if adapter is None else {"adapter": adapter}

    async def generate(self, request_id: str, *, sampling_params: dict[str, Any], **settings: Any) -> TokenOutput:
        named = sampling_params | self.named if self.named else sampling_params
        return await super().generate(request_id, sampling_params=named, **settings)

    async def _acquire_server(self, request_id: str, **settings: Any) -> tuple[str, Any]:
        name, server = await self._chosen_server(request_id, **settings)
        return name, GivingUp(server)

    async def _chosen_server(self, request_id: str, **settings: Any) -> tuple[str, ray.actor.ActorHandle]:
        return await super()._acquire_server(request_id, **settings)  # type: ignore[no-any-return]


class DirectClient(NamingClient):
    """The same without a router between it and the servers."""

    def __init__(
        self, config: Any, load_balancer_handle: Any, servers: list[ray.actor.ActorHandle], **kwargs: Any
    ) -> None:
        super().__init__(config, load_balancer_handle, **kwargs)
        self.servers = servers

    async def _chosen_server(self, request_id: str, **_: Any) -> tuple[str, ray.actor.ActorHandle]:
        index = server_of(request_id, len(self.servers))
        return str(index), self.servers[index]

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Nothing was acquired. verl's asks an actor, which would start a new Ray after the end of a run."""


class GivingUp:
    """A server's actor as verl's client calls it: ``generate`` alone. A request whose caller has gone is cancelled there, which
    vLLM takes for a client that has hung up."""

    def __init__(self, server: ray.actor.ActorHandle) -> None:
        self.server, self.generate = server, self

    async def remote(self, **request: Any) -> TokenOutput:
        answer = self.server.generate.remote(**request)
        try:
            return await answer
        except asyncio.CancelledError:
            if isinstance(answer, ray.ObjectRef) and ray.is_initialized():
                ray.cancel(answer)  # nothing, once it has ended
            raise


class CoalescingClient(LLMServerClient):
    """All requests that episodes make in one tick of the event loop travel in one Ray call per ``hf`` server.

    A Ray call costs more than an answer of a small model. Turns of one conversation stay on one server. Requests whose
    callers have gone are given up there.
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
        self.waiting: dict[int, list[tuple]] = {}
        self.left: dict[int, list[int]] = {}
        """Names of those whose callers have gone, by server; the servers have yet to hear of it."""
        self.sending: set[asyncio.Task] = set()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        future = asyncio.get_running_loop().create_future()
        server = server_of(request_id, len(self.servers))
        if type(prompt_ids) is not list or set(map(type, prompt_ids)) != {int}:
            prompt_ids = normalize_token_ids(prompt_ids)  # which takes ten times as long to find nothing
        name = next(NAMES)
        request = (prompt_ids, sampling_params | self.named if self.named else sampling_params, name, future)
        self._add(server, [request])
        try:
            return to_token_output(await future)
        except asyncio.CancelledError:
            if future.cancelled():  # by the caller, and not the server
                self._leave(server, name)
            raise

    def _leave(self, server: int, name: int) -> None:
        if not self.left:
            asyncio.get_running_loop().call_soon(self._tell)
        self.left.setdefault(server, []).append(name)

    def _tell(self) -> None:
        left, self.left = self.left, {}
        for server, names in left.items():
            give_up(self.servers[server], names)

    def _add(self, index: int, requests: list[tuple]) -> None:
        """Have requests sent in the next tick of the event loop, in one call with those that come until then."""
        if index not in self.waiting:
            task = asyncio.create_task(self._send(index))
            self.sending.add(task)
            task.add_done_callback(self.sending.discard)
        self.waiting.setdefault(index, []).extend(requests)

    def _take(self, index: int) -> list[tuple]:
        """The requests of a call; those that exceed the server's limit are sent in further ones."""
        requests = [request for request in self.waiting.pop(index) if not request[-1].done()]
        if more := requests[self.limit :]:
            self._add(index, more)
        return requests[: self.limit]

    async def _send(self, index: int) -> None:
        """Answers are handed out as they come."""
        server = self.servers[index]
        requests = self._take(index)
        if not requests:
            return
        try:
            answers = await server.generate_many.remote([request[:-1] for request in requests])
            pending = {}
            for (*_, name, future), answer in zip(requests, answers, strict=True):
                if isinstance(answer, Pending):
                    pending[answer.ticket] = future
                    if future.done():  # a call may overtake another: the server heard of it before the request came
                        self._leave(index, name)
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


def give_up(server: ray.actor.ActorHandle, names: Sequence[int]) -> None:
    """Tell a server, without waiting for it, which requests nobody waits for. One that has died need not hear of it."""
    if isinstance(server, ray.actor.ActorHandle) and not ray.is_initialized():
        return  # the call would start a new Ray after the end of a run
    with suppress(Exception):
        told = server.cancel.remote(names)
        if isinstance(told, ray.ObjectRef):  # Ray logs an error that nobody has looked at
            told.future().add_done_callback(Future.exception)


def settle(future: asyncio.Future, answer: tuple | BaseException) -> None:
    """Hand out an answer or an error, unless its episode has ended meanwhile."""
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
