"""The workers and servers of one policy, as the trainer and the learners see them."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from tensordict import TensorDict
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from marl.cluster.balance import as_before
from marl.cluster.worker_group import WorkerGroup, flatten_metrics
from marl.config.built import built
from marl.config.deadlines import Phase
from marl.config.policies import sequence_parallel
from marl.config.precision import gap_alarm
from marl.rollout.servers import PolicyServers
from marl.rollout.vllm_sglang import SHUTDOWN_S
from marl.types import Metrics
from marl.utils.marks import marks_of
from marl.utils.spans import Span
from marl.utils.weight_digest import Digest, Held, joined

ANSWER_S = 5.0
"""Time that a server has to say that its engine ended."""


class RayPolicyGroup(WorkerGroup):
    """Implements :class:`marl.types.PolicyGroup` over verl's worker group, server manager and weight sync."""

    kind = "policy"
    takes_weights = True
    """False for servers that load their own: there is no sync to prove."""
    read_as: tuple = ()
    """Further arguments of calls that read weights: for an adapter, its name and whether its base is read too."""
    version = -1
    """The step of the weights that the servers have; -1 before the first sync."""
    weight_sync: Any = None
    """verl's, once there are servers; None in one process."""

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

    def client(self) -> LLMServerClient:
        return self.servers.client()

    async def start_servers(self) -> None:
        """Start the servers; they have no weights before the first sync."""
        self.servers: Any = PolicyServers(self.config, self.workers)
        await self._wait("starting its servers", self._launch(), Phase.start)
        self.weight_sync = CheckpointEngineManager(
            config=built(self.rollout.checkpoint_engine),
            actor_wg=self.workers,
            replicas=self.servers.get_replicas(),
        )
        await self.free_servers()

    async def _launch(self) -> None:
        await self.servers._initialize_llm_servers()
        await self.servers._init_global_load_balancer()

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
        columns = {key: as_before(output[key], order, size) for key in ("log_probs", "entropy") if key in output}
        return TensorDict(columns, batch_size=[size])

    async def update_actor(self, rows: TensorDict) -> Metrics:
        wanted = self.config.data.train_batch_size // self.actor.ppo_mini_batch_size
        keys = (*self.TRAIN_KEYS, *(key for key in self.OPTIONAL_KEYS if key in self.read_by_loss and key in rows))
        rows = self.mini_batches(rows.select(*keys), wanted, self.actor)
        calculate_entropy = bool(self.actor.calculate_entropy or self.actor.entropy_coeff)
        tu.assign_non_tensor(rows, calculate_entropy=calculate_entropy, compute_loss=True)
        output = await self._call("update", self.workers.update_actor, rows)
        return flatten_metrics(tu.get(output, "metrics"))

    async def descend(self, rows: TensorDict, last: bool) -> Metrics:
        rows = self.mini_batches(rows.select(*self.FORWARD_KEYS, "response_mask", "gradients"), 1, self.actor)
        tu.assign_non_tensor(rows, epochs=1, last_pass=last, calculate_entropy=False, compute_loss=True)
        output = await self._call("update", self.workers.update_actor, rows)
        return flatten_metrics(tu.get(output, "metrics"))

    @property
    def read_by_loss(self) -> set[str]:
        """Optional keys that this policy's loss reads."""
        return {"rollout_is_weights", *(["ref_log_prob"] if self.actor.use_kl_loss else [])}

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
        await self._all(
            f"loading its reference from {folder}", self.workers.load_reference, str(folder), phase=Phase.save
        )

    async def free_servers(self) -> None:
        """Release the memory of servers that share an accelerator with the trainer; a weight sync wakes them."""
        if self.rollout.free_cache_engine:
            await self._wait("putting its servers to sleep", self.weight_sync.sleep_replicas(), Phase.sync)

    async def sync_weights(self, step: int) -> None:
        """Ship the trainer's weights to every server; their turns carry ``step`` as version from then on."""
        async with self.in_turn:
            began = time.monotonic()
            ranks = await self._wait(f"syncing the weights of step {step}", self._sync(step), Phase.sync)
            self._count_busy(ranks, (began, time.monotonic()))
        self.version = step

    def _sync(self, step: int) -> Awaitable[list[tuple[float, float]]]:
        """Each rank's seconds, and when it ended."""
        return asyncio.gather(*self.workers.update_weights(global_steps=step, mode="naive"))

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
        refs = [
            server.generate.remote(list(prompt_ids), dict(sampling), f"probe-{uuid.uuid4().hex}")
            for server in self.servers.server_handles
        ]
        return await self._wait("asking its servers for an answer", asyncio.gather(*refs), Phase.sync)

    def stop(self) -> None:
        """End the servers and workers."""
        servers = self.servers.all_handles() if hasattr(self, "servers") else []
        if servers and self.rollout.name == "vllm":  # an engine that is killed leaves its shared memory behind
            ended = [server.shutdown.remote() for server in servers]
            ray.wait(ended, num_returns=len(ended), timeout=SHUTDOWN_S + ANSWER_S)
        for server in servers:
            ray.kill(server)
        super().stop()

    async def server_spans(self) -> list[Span]:
        """Busy spans of the servers since the last call, in this process's clock."""
        refs = [server.take_spans.remote() for server in self.servers.server_handles]
        answers = await self._wait("asking its servers", asyncio.gather(*refs), Phase.request)
        now = time.monotonic()  # a server's clock begins when its machine does
        return [(start + now - theirs, end + now - theirs) for spans, theirs in answers for start, end in spans]

    async def record_server_spans(self) -> None:
        """Note when the servers computed since the last call, at a time when this process has nothing else to do."""
        self.busy += await self.server_spans()
