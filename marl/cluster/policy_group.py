"""The workers and servers of one policy, as the trainer and the learners see them."""

import asyncio
import time
from collections.abc import Awaitable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from tensordict import TensorDict
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerClient

from marl.cluster.worker_group import T, WorkerGroup, first_rows, flatten_metrics
from marl.config.precision import gap_alarm
from marl.rollout.servers import PolicyServers
from marl.types import Metrics
from marl.utils.spans import Span


class RayPolicyGroup(WorkerGroup):
    """Implements :class:`marl.types.PolicyGroup` over verl's worker group, server manager and weight sync."""

    kind = "policy"
    version = -1
    """The step of the weights that the servers have; -1 before the first sync."""

    @property
    def actor(self) -> Any:
        return self.config.actor_rollout_ref.actor

    @property
    def rollout(self) -> Any:
        return self.config.actor_rollout_ref.rollout

    @cached_property
    def gap_alarm(self) -> float:
        return gap_alarm(self.config)

    def client(self) -> LLMServerClient:
        return self.servers.client()

    async def start_servers(self) -> None:
        """Start the servers; they have no weights before the first sync."""
        self.servers: Any = PolicyServers(self.config, self.workers)
        await self._wait("starting its servers", self._launch())
        self.weight_sync = CheckpointEngineManager(
            config=omega_conf_to_dataclass(self.rollout.checkpoint_engine),
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
        rows = self._for_workers(rows.select(*self.FORWARD_KEYS), compute_loss=False, **settings)
        output = await self._call(phase, method, rows)
        columns = {key: output[key] for key in ("log_probs", "entropy") if key in output}
        if len(rows) > size:
            columns = {key: first_rows(value, size) for key, value in columns.items()}
        return TensorDict(columns, batch_size=[size])

    async def update_actor(self, rows: TensorDict) -> Metrics:
        wanted = self.config.data.train_batch_size // self.actor.ppo_mini_batch_size
        keys = (*self.TRAIN_KEYS, *(key for key in self.OPTIONAL_KEYS if key in self.read_by_loss and key in rows))
        rows = self.mini_batches(rows.select(*keys), wanted, self.actor)
        calculate_entropy = bool(self.actor.calculate_entropy or self.actor.entropy_coeff)
        tu.assign_non_tensor(rows, calculate_entropy=calculate_entropy, compute_loss=True)
        output = await self._call("update", self.workers.update_actor, rows)
        return flatten_metrics(tu.get(output, "metrics"))

    @property
    def read_by_loss(self) -> set[str]:
        """Optional keys that this policy's loss reads."""
        return {"rollout_is_weights", *(["ref_log_prob"] if self.actor.use_kl_loss else [])}

    async def renew_reference(self) -> None:
        """Give the reference the policy's present weights."""
        await self._all("renewing its reference", self.workers.renew_reference)

    async def save_reference(self, folder: Path) -> None:
        await self._all(f"saving its reference to {folder}", self.workers.save_reference, str(folder))

    async def load_reference(self, folder: Path) -> None:
        await self._all(f"loading its reference from {folder}", self.workers.load_reference, str(folder))

    async def free_servers(self) -> None:
        """Release the memory of servers that share an accelerator with the trainer; a weight sync wakes them."""
        if self.rollout.free_cache_engine:
            await self._wait("putting its servers to sleep", self.weight_sync.sleep_replicas())

    async def sync_weights(self, step: int) -> None:
        """Ship the trainer's weights to every server; their turns carry ``step`` as version from then on."""
        async with self.in_turn:
            update = asyncio.to_thread(self.weight_sync.update_weights, global_steps=step)
            await self._wait(f"syncing the weights of step {step}", update)
        self.version = step

    def stop(self) -> None:
        """End the servers and workers."""
        for server in (
            getattr(getattr(self, "servers", None), "server_handles", None) or []
        ):  # it may have been starting
            ray.kill(server)
        super().stop()

    async def server_spans(self) -> list[Span]:
        """Busy spans of the ``hf`` servers since the last call, in this process's clock; empty for other backends."""
        if self.rollout.name != "hf":
            return []
        refs = [server.take_spans.remote() for server in self.servers.server_handles]
        answers = await self._wait("asking its servers", asyncio.gather(*refs))
        now = time.monotonic()  # a server's clock begins when its machine does
        return [(start + now - theirs, end + now - theirs) for spans, theirs in answers for start, end in spans]


async def served(groups: Iterable[RayPolicyGroup], work: Awaitable[T]) -> T:
    """Await work that calls the policies' servers, and record when each server computed."""
    result = await work
    asked = list(groups)
    for group, spans in zip(asked, await asyncio.gather(*(group.server_spans() for group in asked)), strict=True):
        group.busy += spans
    return result
