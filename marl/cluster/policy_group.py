"""The workers and servers of one policy, as the trainer and the learners see them."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import TokenOutput

from marl.cluster.local import LocalServers, LocalWorkers
from marl.cluster.worker_group import WorkerGroup, flatten_metrics, in_given_order
from marl.config.deadlines import Phase
from marl.config.policies import sequence_parallel
from marl.config.precision import gap_alarm
from marl.rollout.servers import PolicyServers
from marl.types import Metrics, PolicyName
from marl.utils.marks import marks_of
from marl.utils.weight_digest import Digest, Held, joined

logger = logging.getLogger(__name__)


class SharedBase:
    """Workers and servers that the adapters of one pool share; each is started once."""

    def __init__(self, first: PolicyName) -> None:
        """``first``: the adapter with which the base's weights are proved."""
        self.first = first
        self.tasks: dict[str, asyncio.Future] = {}

    async def once(self, what: str, start: Callable[[], Awaitable[Any]]) -> Any:
        """Start something unless another adapter has; its error is everybody's."""
        if what not in self.tasks:
            self.tasks[what] = asyncio.ensure_future(start())
        return await self.tasks[what]


class PolicyGroup(WorkerGroup):
    """Implements :class:`marl.types.PolicyGroup` over verl's worker group, server manager and weight sync.

    Policies differ by four facts. ``plays``: it has servers. ``takes_weights``: its workers hold a model, whose weights the servers get;
    other servers load the weights at ``model.path``, and their workers (:class:`marl.cluster.workers.policy_worker.SeatWorker`) only hold
    places in the pool. ``base``: it is an adapter on a model that it shares with others, whose calls the pool's lock keeps apart.
    ``is_local``: everything is in this process.
    """

    kind = "policy"
    version = -1
    """The step of the weights that the servers have; -1 before the first sync."""
    servers: Any = None
    stepped = True
    """True if the servers' copy of an adapter is not the trainer's."""
    takes_weights = True

    def __init__(
        self, *arguments: Any, plays: bool = True, takes_weights: bool = True, base: SharedBase | None = None
    ) -> None:
        super().__init__(*arguments)
        self.plays, self.takes_weights, self.base = plays, takes_weights, base
        self.is_local = isinstance(self.workers, LocalWorkers)

    @property
    def actor(self) -> Any:
        return self.config.actor_rollout_ref.actor

    @property
    def rollout(self) -> Any:
        return self.config.actor_rollout_ref.rollout

    @cached_property
    def gap_alarm(self) -> float:
        return gap_alarm(self.config)

    @cached_property
    def ranks_per_row(self) -> int:
        return sequence_parallel(self.actor)

    @property
    def adapter(self) -> PolicyName | None:
        return self.name if self.base else None

    async def start_workers(self) -> None:
        if self.base:
            await self.base.once("workers", super().start_workers)
        elif self.takes_weights:
            await super().start_workers()

    async def start_servers(self) -> None:
        """Start the servers; those of a policy that is trained have no weights before the first sync."""
        if self.plays:
            self.servers = await (self.base.once("servers", self._started) if self.base else self._started())

    async def _started(self) -> Any:
        self.servers = LocalServers(self.config) if self.is_local else PolicyServers(self.config, self.workers)
        await self._wait("starting its servers", self.servers.start(), Phase.start)
        await self.free_servers()
        return self.servers

    def client(self) -> Any:
        """Client of the servers; None where there are none."""
        return self.servers.client(adapter=self.adapter) if self.plays else None

    def stop(self) -> None:
        """End the servers and workers."""
        if self.servers is not None:
            self.servers.stop()
        super().stop()

    FORWARD_KEYS = ("prompts", "responses", "input_ids", "position_ids", "loss_mask", "temperature")
    TRAIN_KEYS = (*FORWARD_KEYS, "response_mask", "old_log_probs", "advantages")
    OPTIONAL_KEYS = ("ref_log_prob", "rollout_is_weights")
    """Keys that verl's engines read. They index every key separately: an unread key costs as much as any other."""

    async def compute_log_prob(self, rows: TensorDict) -> TensorDict:
        return await self._log_prob("log_probs", self.workers.compute_log_prob, rows, calculate_entropy=True)

    async def compute_ref_log_prob(self, rows: TensorDict) -> TensorDict:
        """``log_probs`` of the responses under the reference's weights, ragged like ``responses``."""
        return await self._log_prob("ref_log_probs", self.workers.compute_ref_log_prob, rows, calculate_entropy=False)

    async def _log_prob(self, phase: str, method: Any, rows: TensorDict, **settings: Any) -> TensorDict:
        size = len(rows)
        rows, order = self._for_workers(rows.select(*self.FORWARD_KEYS), compute_loss=False, **settings)
        output = await self._call(phase, method, rows)
        columns = {key: in_given_order(output[key], order, size) for key in ("log_probs", "entropy") if key in output}
        return TensorDict(columns, batch_size=[size])

    async def update_actor(self, rows: TensorDict) -> Metrics:
        wanted = self.config.data.train_batch_size // self.actor.ppo_mini_batch_size
        optional = {"rollout_is_weights", *(["ref_log_prob"] if self.actor.use_kl_loss else [])}
        keys = (*self.TRAIN_KEYS, *(key for key in self.OPTIONAL_KEYS if key in optional and key in rows))
        rows = self.mini_batches(rows.select(*keys), wanted, self.actor)
        calculate_entropy = bool(self.actor.calculate_entropy or self.actor.entropy_coeff)
        tu.assign_non_tensor(rows, calculate_entropy=calculate_entropy, compute_loss=True)
        return await self._update(rows)

    async def descend(self, rows: TensorDict, last: bool) -> Metrics:
        rows = self.mini_batches(rows.select(*self.FORWARD_KEYS, "response_mask", "gradients"), 1, self.actor)
        tu.assign_non_tensor(rows, epochs=1, last_pass=last, calculate_entropy=False, compute_loss=True)
        return await self._update(rows)

    async def _update(self, rows: TensorDict) -> Metrics:
        self.stepped = True
        output = await self._call("update", self.workers.update_actor, rows)
        return flatten_metrics(tu.get(output, "metrics"))

    def _for_workers(
        self, rows: TensorDict, mini_batches: int = 1, **settings: Any
    ) -> tuple[TensorDict, list[int] | None]:
        named = {"adapter": self.name} if self.base else {}
        return super()._for_workers(rows, mini_batches, **named, **settings)

    async def renew_reference(self) -> None:
        """Give the reference the policy's present weights."""
        await self._all("renewing its reference", self.workers.renew_reference)

    async def exchange_reference(self) -> None:
        """Let policy and reference exchange their weights."""
        await self._all("exchanging its reference's weights", self.workers.exchange_reference)

    async def save_reference(self, folder: Path, beside: bool = True) -> list[Path]:
        what = f"saving its reference to {folder}"
        await self._all(what, self.workers.save_reference, str(folder), beside, phase=Phase.save)
        return marks_of(folder, self.workers.world_size)

    async def load_reference(self, folder: Path) -> None:
        what = f"loading its reference from {folder}"
        await self._all(what, self.workers.load_reference, str(folder), phase=Phase.save)

    async def save(self, folder: Path, beside: bool = True) -> list[Path]:
        """As :meth:`WorkerGroup.save`; nothing where the weights are those at ``model.path``."""
        if not self.takes_weights:
            return []
        if self.base is None:
            return await super().save(folder, beside)
        what = f"saving to {folder}"
        await self._all(what, self.workers.save_adapter, self.name, str(folder), beside, phase=Phase.save)
        return marks_of(folder, self.workers.world_size)

    async def load(self, folder: Path) -> None:
        self.stepped = True
        if self.base:
            what = f"loading {folder}"
            await self._all(what, self.workers.load_adapter, self.name, str(folder), phase=Phase.save)
        elif self.takes_weights:
            await super().load(folder)
        elif folder.is_dir():
            logger.warning(
                "policy %r is not trained and serves %s, not its weights in %s; to serve those, set policies.%s.model.path=%s",
                *(self.name, self.config.actor_rollout_ref.model.path, folder, self.name, folder / "huggingface"),
            )

    async def free_servers(self) -> None:
        """Release the memory of servers that share an accelerator with the trainer; a weight sync wakes them."""
        if self.plays and self.rollout.free_cache_engine:
            await self._wait("putting its servers to sleep", self.servers.each_replica("sleep"), Phase.sync)

    async def sync_weights(self, step: int) -> None:
        """Ship the trainer's weights to every server, or wake those that have their own; their turns carry ``step`` as version from
        then on."""
        async with self.in_turn:
            if self.takes_weights and self.plays:
                began = time.monotonic()
                ranks = await self._wait(f"syncing the weights of step {step}", self._sync(step), Phase.sync)
                self._count_busy(ranks, (began, time.monotonic()))
            elif self.plays and self.rollout.free_cache_engine:
                # first the cache of the pool's trainers, which may not have synced yet
                emptied = asyncio.gather(*self.workers.empty_cache())
                await self._wait("emptying the cache of its pool's trainers", emptied, Phase.sync)
                await self._wait("waking its servers", self.servers.each_replica("wake_up"), Phase.sync)
        self.version, self.stepped = step, False

    def _sync(self, step: int) -> Awaitable[list[tuple[float, float]]]:
        """Each rank's seconds, and when it ended."""
        if self.base:
            return asyncio.gather(*self.workers.sync_adapter(self.name, step, self.stepped))
        return asyncio.gather(*self.workers.update_weights(global_steps=step, mode="naive"))

    @property
    def read_as(self) -> tuple:
        """Further arguments of calls that read weights: for an adapter, its name and whether its base is read too."""
        return (self.name, self.name == self.base.first) if self.base else ()

    def server_name(self, index: int) -> str:
        """A server's number and its address, for messages."""
        return f"server {index} ({self.servers.server_addresses[index]})"

    async def weight_digest(self, seed: int) -> Digest:
        """The digest of the trainer's weights, as its servers should hold them."""
        async with self.in_turn:
            began = time.monotonic()
            ranks = asyncio.gather(*self.workers.weight_digest(seed, *self.read_as))
            shares = await self._wait("reading its weights", ranks, Phase.sync)
            self._count_busy(((seconds, ended) for _, seconds, ended in shares), (began, time.monotonic()))
        return joined([digest for digest, *_ in shares])

    async def held_weights(self, seed: int) -> list[Held]:
        """Each ``hf`` server's account of the weights that it decodes with."""
        refs = [server.held_weights.remote(seed, *self.read_as) for server in self.servers.server_handles]
        return await self._wait("reading its servers' weights", asyncio.gather(*refs), Phase.sync)

    async def ask_servers(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> list[TokenOutput]:
        """Every server's own answer to a prompt."""
        asked = {**sampling, "adapter": self.name} if self.base else dict(sampling)
        refs = [
            server.generate.remote(list(prompt_ids), asked, f"probe-{uuid.uuid4().hex}")
            for server in self.servers.server_handles
        ]
        return await self._wait("asking its servers for an answer", asyncio.gather(*refs), Phase.sync)

    async def record_server_spans(self) -> None:
        """Note when the servers computed since the last call, at a time when this process has nothing else to do."""
        if not self.plays:
            return
        refs = [server.take_spans.remote() for server in self.servers.server_handles]
        answers = await self._wait("asking its servers", asyncio.gather(*refs), Phase.request)
        now = time.monotonic()  # a server's clock begins when its machine does
        self.busy += [(start + now - theirs, end + now - theirs) for spans, theirs in answers for start, end in spans]
