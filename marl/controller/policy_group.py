"""The workers and servers of one policy, as the trainer and the learners see them: awaitable, and with deadlines."""

import asyncio
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from tensordict import TensorDict
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics

from marl.controller.batching import pad_rows
from marl.controller.failures import policy_failed
from marl.rollout.servers import PolicyServers
from marl.types import Metrics, PolicyName
from marl.utils.deadlines import within

T = TypeVar("T")


class RayPolicyGroup:
    """Implements :class:`marl.types.PolicyGroup` over verl's worker group, server manager and weight sync."""

    def __init__(self, name: PolicyName, config: Any, worker_group: Any, pool: str, timeout: float) -> None:
        self.name, self.config, self.workers, self.pool, self.timeout = name, config, worker_group, pool, timeout
        self.actor, self.rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self.busy_seconds: dict[str, float] = {}
        """What the slowest rank, or the server, spent computing, by phase of the current step."""

    async def start_workers(self) -> None:
        """Load the model in every rank."""
        await self._wait("loading its model", asyncio.gather(*self.workers.init_model()))

    async def start_servers(self) -> None:
        """Start the servers; they have no weights before the first sync."""
        self.servers = PolicyServers(self.config, self.workers)
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
    """What verl's engines read. They pick rows of every key one by one: an unread key costs as much as the rest."""

    async def compute_log_prob(self, rows: TensorDict) -> TensorDict:
        size = len(rows)
        rows = self._for_workers(rows.select(*self.FORWARD_KEYS), calculate_entropy=True, compute_loss=False)
        output = await self._call("log_probs", self.workers.compute_log_prob(rows))
        outputs = TensorDict({key: output[key] for key in ("log_probs", "entropy")}, batch_size=[len(rows)])
        if len(rows) > size:
            outputs = TensorDict({key: first_rows(value, size) for key, value in outputs.items()}, batch_size=[size])
        return outputs

    async def update_actor(self, rows: TensorDict) -> Metrics:
        actor, size = self.actor, len(rows)
        wanted = self.config.data.train_batch_size // actor.ppo_mini_batch_size
        mini_batches = even_mini_batches(size, wanted, self.workers.world_size)
        rows = self._for_workers(rows.select(*self.TRAIN_KEYS), mini_batches)
        tu.assign_non_tensor(
            rows,
            calculate_entropy=bool(actor.calculate_entropy or actor.entropy_coeff),
            compute_loss=True,
            global_batch_size=max(1, size // mini_batches),
            mini_batch_size=len(rows) // mini_batches,
            epochs=actor.ppo_epochs,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": actor.shuffle},
        )
        output = await self._call("update", self.workers.update_actor(rows))
        return flatten_metrics(tu.get(output, "metrics"))

    def _for_workers(self, rows: TensorDict, mini_batches: int = 1, **settings: Any) -> TensorDict:
        """Rows that divide among the ranks and mini-batches, with what verl's engines ask for."""
        rows = pad_rows(rows, mini_batches * self.workers.world_size).copy()
        if settings:
            tu.assign_non_tensor(rows, **settings)
        return rows

    async def free_servers(self) -> None:
        """Let servers that share an accelerator with the trainer give its memory back; a weight sync wakes them."""
        if self.rollout.free_cache_engine:
            await self._wait("putting its servers to sleep", self.weight_sync.sleep_replicas())

    async def sync_weights(self, step: int) -> None:
        """Ship the trainer's weights to every server; their turns carry ``step`` as version from then on."""
        update = asyncio.to_thread(self.weight_sync.update_weights, global_steps=step)
        await self._wait(f"syncing the weights of step {step}", update)

    async def save(self, folder: Path) -> None:
        await self._wait(
            f"saving to {folder}", asyncio.gather(*self.workers.save_checkpoint(str(folder), None, 0, None))
        )

    async def load(self, folder: Path) -> None:
        await self._wait(f"loading {folder}", asyncio.gather(*self.workers.load_checkpoint(str(folder), None, False)))

    def stop(self) -> None:
        """End the servers and workers."""
        servers = self.servers.server_handles if hasattr(self, "servers") else []
        for actor in (*servers, *self.workers.workers):
            ray.kill(actor)

    async def server_seconds(self) -> float:
        """Seconds that the busiest ``hf`` server has computed since its start; 0 for other backends."""
        if self.rollout.name != "hf":
            return 0.0
        refs = [server.get_stats.remote() for server in self.servers.server_handles]
        stats = await self._wait("asking its servers", asyncio.gather(*refs))
        return max(entry["seconds"] for entry in stats)

    async def _call(self, phase: str, future: Any) -> TensorDict:
        """Wait for verl's future without blocking the loop."""
        await self._wait(f"computing {phase}", asyncio.gather(*future.futures))
        output = future.get()
        self.busy_seconds[phase] = float(np.max(tu.get(output, "metrics")["worker_seconds"]))
        return output

    async def _wait(self, what: str, work: Awaitable[T]) -> T:
        try:
            return await within(self.timeout, f"policy {self.name!r}: {what}", work)
        except RayError as error:
            raise policy_failed(self.name, what, error) from error


def even_mini_batches(rows: int, wanted: int, ranks: int) -> int:
    """How many mini-batches: as many as wanted, or fewer where one of them would hold nothing but padding."""
    for count in range(min(wanted, max(1, rows // ranks)), 1, -1):
        size = -(-rows // (count * ranks)) * ranks
        if (count - 1) * size < rows:
            return count
    return 1


def first_rows(nested: Any, size: int) -> torch.Tensor:
    end = int(nested.offsets()[size])
    return torch.nested.nested_tensor_from_jagged(nested.values()[:end], offsets=nested.offsets()[: size + 1])


def flatten_metrics(metrics: Mapping[str, Any]) -> Metrics:
    """verl's lists of numbers of micro-batches and ranks, each to one number by verl's rule."""
    return {key: float(value) for key, value in reduce_metrics(dict(metrics)).items() if np.ndim(value) == 0}
