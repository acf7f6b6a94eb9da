"""The critics of a run: worker groups and their inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from marl.batch.critic_spec import Reader
from marl.batch.joint import JointBatch
from marl.batch.utility_inputs import JointStates
from marl.batch.values import place_values
from marl.cluster.critic_group import CriticGroup
from marl.types import ContextOverflow, CriticName, Episode


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
        found: dict[int, ContextOverflow] = {}
        for name, rows in batch.critic_data.value_rows.items():
            limit = self.groups[name].longest
            lengths = rows["input_ids"].offsets().diff().tolist()
            for length, episode in zip(lengths, episodes_of(batch, name), strict=True):
                if length > limit:
                    found[episode] = ContextOverflow(
                        f"critic {name!r} would read {length} tokens, critic.ppo_max_token_len_per_gpu and its model's context "
                        f"allow {limit}; raise the former, or shorten the conversation"
                    )
        return found

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
