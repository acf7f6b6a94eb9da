"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens, for one policy or for a whole team."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from marl.config.sources import Source
from marl.methods.base import Method, register_method
from marl.methods.choice import best_episodes
from marl.methods.examples import Example, Selection, Side, Speakers, distinct, replies
from marl.methods.losses import mean_gradients, mean_loss
from marl.methods.rows import conversation, messages_of, speakers_of, value_of
from marl.methods.teachers import Target, must_speak, taught, teachers_of, team_answer
from marl.types import AgentId, Episode, Message, Metrics
from marl.utils.numbers import FINITE, bounded, count

if TYPE_CHECKING:
    from tensordict import TensorDict


@register_method("sft")
class SFT(Method):
    compares = False

    @dataclass
    class Config(Method.Config):
        source: Source = Source.rows
        messages_key: str = "messages"
        """Column with a whole conversation, whose assistant's messages are all trained."""
        prompt_key: str = "prompt"
        """Without that column: the one with the prompt, text or messages. Dots lead into a column."""
        answer_key: str = "answer"
        """The one with the answer: text, or a text for each agent by its name."""
        min_score: float | None = bounded(1.0, FINITE.or_null())
        """Least score of a team's answer in an episode that is imitated; null for any."""
        best_of: int | None = bounded(None, count(null=True))
        """Number of each task's best episodes that are imitated, at most; null for all."""
        target: Target = Target.turns
        """Part of an episode that is imitated: the turns, or the text that gave the team's answer, after the task alone."""
        from_agent: Any = None
        """Agent whose turns of an episode all agents learn, or a map such as {carol: alice}; null: each learns its own."""

    config: Config

    @property
    def columns(self) -> list[tuple[str, ...]]:
        return [(self.config.messages_key, self.config.prompt_key), (self.config.messages_key, self.config.answer_key)]

    def of_row(self, row: Mapping[str, Any], speakers: Speakers) -> list[Example]:
        found = []
        for agent, policies in speakers_of(row, speakers).items():
            messages = self.messages(row, agent)
            if side := replies(messages, agent, policies[0]):
                found.append(Example((side,)))
        return distinct(found)

    def messages(self, row: Mapping[str, Any], agent: AgentId) -> list[Message]:
        """A row's whole conversation, or its prompt and answer."""
        whole = value_of(row, self.config.messages_key)
        if whole is not None:
            return messages_of(whole, self.config.messages_key)
        return conversation(row, self.config.prompt_key, self.config.answer_key, agent)

    def of_episodes(self, episodes: Sequence[Episode], speakers: Speakers) -> Selection:
        kept = best_episodes(episodes, self.config.min_score, self.config.best_of)
        sides = [side for episode in kept if (side := self.lesson(episode, speakers))]
        share = len(kept) / len(episodes) if episodes else 0.0
        return Selection([Example((side,)) for side in sides], {"method/kept_episodes": share})

    def lesson(self, episode: Episode, speakers: Speakers) -> Side:
        """What an episode teaches the team; empty where that is nothing."""
        if self.config.target is Target.team_answer:
            return team_answer(episode, speakers)
        return taught(episode, speakers, teachers_of(self.config.from_agent, speakers))

    def teachers(self, speakers: Speakers) -> list[AgentId] | None:
        if self.config.target is Target.team_answer:
            return None
        return list(dict.fromkeys(teachers_of(self.config.from_agent, speakers).values()))

    def check_teachers(self, spoke: Collection[AgentId], where: str) -> None:
        must_speak(self.config.from_agent, spoke, where)

    def gradients(self, rows: "TensorDict") -> Tensor:
        return mean_gradients(rows)

    def measure(self, rows: "TensorDict") -> Metrics:
        loss = mean_loss(rows)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
