"""Self-play fine-tuning (arXiv:2401.01335): the policy learns to prefer the data's answers to its opponent's.

The opponent is the policy's reference, renewed every ``trainer.ref_update_freq`` steps; it plays, and its turns are rejected. With
an opponent that is never renewed this is DPO on those pairs.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

from marl.config.sources import Source
from marl.methods.base import register_method
from marl.methods.dpo import DPO
from marl.methods.examples import Example, Selection, Speakers
from marl.methods.rows import text_of
from marl.types import AgentId, Episode, Metrics, Task


@register_method("spin")
class SPIN(DPO):
    plays_reference, sources = True, (Source.play,)

    @dataclass
    class Config(DPO.Config):
        source: Source = Source.play
        answer_key: str = "extra_info.answer"
        """Column with the data's answer, in ``extra_info`` or ``reward_model``: text, or a text for each agent by its name."""

    config: Config
    reads_turn_scores = False

    async def sync_weights(self, trainer: Any) -> Metrics:
        """The opponents', so that they play."""
        async with exchanged(trainer):
            return await super().sync_weights(trainer)

    async def validate(self, trainer: Any) -> Metrics:
        """Measure the policies, and let the opponents return."""
        await trainer.free_servers()
        await super().sync_weights(trainer)
        metrics = await super().validate(trainer)
        await trainer.free_servers()
        await self.sync_weights(trainer)
        return metrics

    def answer_of(self, row: Mapping[str, Any], agent: AgentId) -> str:
        return text_of(row, self.config.answer_key, agent)

    def of_episodes(self, episodes: Sequence[Episode], speakers: Speakers) -> Selection:
        """Every turn of the opponent, truncated ones too, beside the data's answer to the same prompt; what the opponent says as the
        data do, is no pair."""
        pairs, same = [], 0
        for episode in episodes:
            for turn in episode.path:
                if turn.agent not in speakers or not turn.trained:
                    continue
                answer = self.answer_of(row_of(episode.task), turn.agent)
                if answer == turn.text and not turn.truncated:
                    same += 1
                    continue
                chosen = copy(turn)
                chosen.text, chosen.thought, chosen.response_ids, chosen.stop_reason = answer, None, [], None
                pairs.append(Example(([chosen], [turn])))
        return Selection(pairs, {"method/pairs": float(len(pairs)), "method/places_without_contrast": float(same)})


@asynccontextmanager
async def exchanged(trainer: Any) -> AsyncIterator[None]:
    """The policies have their references' weights meanwhile."""
    groups = trainer.references.groups.values()
    await asyncio.gather(*(group.exchange_reference() for group in groups))
    try:
        yield
    finally:
        await asyncio.gather(*(group.exchange_reference() for group in groups))


def row_of(task: Task) -> dict[str, Any]:
    """The columns of a task's row that may hold an answer."""
    return {"extra_info": task.extra, "reward_model": {"ground_truth": task.ground_truth}}
