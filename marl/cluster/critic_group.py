"""A run's critics, as the trainer and the learners see them: worker groups, and what they read."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from marl.batch.critic_spec import Reader
from marl.batch.joint import JointBatch
from marl.batch.utility_inputs import JointStates
from marl.batch.values import place_values
from marl.cluster.worker_group import WorkerGroup, flatten_metrics, in_given_order
from marl.config.policies import critic_tokens
from marl.modules.pretrained import load_config
from marl.types import ContextOverflow, CriticName, Episode, Metrics


class CriticGroup(WorkerGroup):
    """Implements :class:`marl.types.CriticGroup` over a group of :class:`marl.cluster.workers.critic_worker.CriticWorker`."""

    kind = "critic"

    @property
    def critic(self) -> Any:
        return self.config.critic

    @cached_property
    def ranks_per_row(self) -> int:
        return int(self.critic.fsdp.ulysses_sequence_parallel_size)

    @property
    def longest(self) -> int:
        """Tokens of the longest row that it can read: of a micro-batch, and of its model's context."""
        return min(critic_tokens(self.critic), self._context)

    @cached_property
    def _context(self) -> int:
        model = load_config(self.critic.model, "critic.model").get_text_config()
        return getattr(model, "max_position_embeddings", None) or critic_tokens(self.critic)

    FORWARD_KEYS = ("input_ids", "position_ids", "read_at")

    async def compute_values(self, rows: TensorDict) -> Tensor:
        """Values under the current weights, ragged like ``read_at``. Raises ValueError for a row that is too long."""
        return await self._values(self.workers.compute_values, rows)

    async def compute_targets(self, rows: TensorDict) -> Tensor:
        """The same under the weights of the last renewal."""
        return await self._values(self.workers.compute_targets, rows)

    async def _values(self, method: Any, rows: TensorDict) -> Tensor:
        size = len(rows)
        self._must_fit(rows)
        rows = rows.select(*self.FORWARD_KEYS)
        rows["value_mask"] = ones_like(rows["read_at"])
        rows, order = self._for_workers(with_loss_mask(rows), compute_loss=False, temperature=1.0)
        return in_given_order((await self._call("values", method, rows))["values"], order, size)

    async def renew_target(self) -> None:
        await self._all("renewing its target", self.workers.renew_target)

    async def update_critic(self, rows: TensorDict) -> Metrics:
        wanted = self.config.data.train_batch_size // self.critic.ppo_mini_batch_size
        rows = rows.select(*self.FORWARD_KEYS, "values", "returns", "value_mask")
        return await self._update(self.mini_batches(with_loss_mask(rows), wanted, self.critic))

    async def descend(self, rows: TensorDict, last: bool) -> Metrics:
        rows = rows.select(*self.FORWARD_KEYS, "gradients", "value_mask")
        rows = self.mini_batches(with_loss_mask(rows), 1, self.critic)
        tu.assign_non_tensor(rows, epochs=1, last_pass=last)  # derivatives hold at the weights they were taken at
        return await self._update(rows)

    async def _update(self, rows: TensorDict) -> Metrics:
        tu.assign_non_tensor(rows, temperature=1.0)
        output = await self._call("update", self.workers.update_critic, rows)
        return flatten_metrics(tu.get(output, "metrics"))

    def _must_fit(self, rows: TensorDict) -> None:
        longest = int(rows["input_ids"].offsets().diff().max())
        if longest > self.longest:
            raise ValueError(
                f"critic {self.name!r} reads an observation of {longest} tokens, critic.ppo_max_token_len_per_gpu and its "
                f"model's context allow {self.longest}; raise the former, or shorten the conversation"
            )


class Critics:
    """Empty for a learner without critics."""

    def __init__(
        self,
        groups: Mapping[CriticName, CriticGroup],
        reader: Reader | None = None,
        states: JointStates | None = None,
    ) -> None:
        """``states`` where the learner reads the joint observation itself."""
        self.groups, self.reader, self.states = groups, reader, states

    def read(self, episodes: Sequence[Episode], batch: JointBatch) -> None:
        """Put every critic's inputs into the batch."""
        if self.reader is not None:
            batch.critic_data.value_rows = self.reader.rows(episodes, batch)
        if self.states is not None:
            batch.critic_data.joint_ids = self.states.ids(episodes, batch)

    def too_long(self, batch: JointBatch) -> dict[int, ContextOverflow]:
        """Errors of the episodes that are too long for a critic, by index in the batch."""
        errors: dict[int, ContextOverflow] = {}
        for name, rows in batch.critic_data.value_rows.items():
            limit = self.groups[name].longest
            lengths = rows["input_ids"].offsets().diff().tolist()
            for length, episode in zip(lengths, episodes_of(batch, name), strict=True):
                if length > limit:
                    errors[episode] = ContextOverflow(
                        f"critic {name!r} would read {length} tokens, critic.ppo_max_token_len_per_gpu and its model's context "
                        f"allow {limit}; raise the former, or shorten the conversation"
                    )
        return errors

    async def value(self, episodes: Sequence[Episode], batch: JointBatch) -> None:
        """Compute all critics' values concurrently and put them into the batch."""
        if self.reader is None:
            return
        if not batch.critic_data.value_rows:
            self.read(episodes, batch)
        names = list(batch.critic_data.value_rows)
        results = await asyncio.gather(
            *(self.groups[name].compute_values(batch.critic_data.value_rows[name]) for name in names)
        )
        for name, values in zip(names, results, strict=True):
            place_values(batch, name, values)


def episodes_of(batch: JointBatch, critic: CriticName) -> list[int]:
    """The episode of each of a critic's rows."""
    cells_an_episode = batch.spoken_ERA[0].numel()
    read = batch.critic_data.value_rows.indexed(batch, critic)
    cells = [index[index >= 0][0] for part in read for index in part["turn_index"].unbind()]
    return [int(cell) // cells_an_episode for cell in cells]


def ones_like(nested: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(torch.ones_like(nested.values()), offsets=nested.offsets())  # type: ignore[attr-defined]


def with_loss_mask(rows: TensorDict) -> TensorDict:
    """verl counts what a loss is averaged over by ``loss_mask``."""
    rows["loss_mask"] = rows["value_mask"]
    return rows
