"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens, for one policy or for a whole team."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from marl.config.foresight import REQUEST
from marl.config.sources import Source
from marl.methods.base import Method, register_method
from marl.methods.choice import RIGHT, best_episodes
from marl.methods.examples import Example, Selection, Side, Speakers, distinct, replies
from marl.methods.losses import loss_of, mean_gradients, mean_loss, parts, side_losses, weighted_gradients
from marl.methods.peers import Pair, predictions
from marl.methods.rows import conversation, messages_of, speakers_of, value_of
from marl.methods.teachers import Target, must_speak, taught, teachers_of, team_answer
from marl.types import AgentId, Episode, Message, Metrics
from marl.utils.numbers import Number, bounded, count

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
        min_score: Any = bounded(RIGHT, Number(also=RIGHT, null=True))  # noqa: RUF009
        """Least score of a team's answer in an episode that is imitated; right: those whose answer is right; null: any."""
        best_of: int | None = bounded(None, count(null=True))
        """Number of each task's best episodes that are imitated, at most; null for all."""
        target: Target = Target.turns
        """Part of an episode that is imitated: the turns, or the text that gave the team's answer, after the task alone."""
        from_agent: Any = None
        """Agent whose turns of an episode all agents learn, or a map such as {carol: alice}; null: each learns its own."""

        peers_weight: float = bounded(0.0, Number(0))
        """Weight of a further loss: every agent predicts its peers' next turns in episodes from what it was shown; 0: none."""
        peers_request: str = REQUEST
        """Asks for a peer's next turn, after what the agent was shown; as ``runner.foresee_request``. Field: agent."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compares = self.compares or config.peers_weight > 0
        self.pairs: list[Pair] = []
        """The agents and peers of an example's sides after the first."""

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
        examples = [self.example(episode, self.lesson(episode, speakers), speakers) for episode in kept]
        if self.config.peers_weight:
            chosen = {id(episode) for episode in kept}
            examples += [self.example(episode, [], speakers) for episode in episodes if id(episode) not in chosen]
        share = len(kept) / len(episodes) if episodes else 0.0
        return Selection([example for example in examples if any(example.sides)], {"method/kept_episodes": share})

    def example(self, episode: Episode, lesson: Side, speakers: Speakers) -> Example:
        """A lesson, and a side for every pair of an agent and a peer whose turns it predicts."""
        if not self.config.peers_weight:
            return Example((lesson,))
        found = predictions(episode, speakers, self.config.peers_request)
        # in an order that is the same after a resume, whoever is cut first
        pairs = [(agent, peer) for agent in speakers for peer in episode.agents if peer != agent]
        self.pairs += [pair for pair in pairs if pair not in self.pairs]
        return Example((lesson, *(found.get(pair, []) for pair in self.pairs)))

    def lesson(self, episode: Episode, speakers: Speakers) -> Side:
        """The turns by which an episode teaches the team; empty where it teaches nothing."""
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
        weight = self.config.peers_weight
        return weighted_gradients(rows, weight) if weight else mean_gradients(rows)

    def measure(self, rows: "TensorDict") -> Metrics:
        if not self.config.peers_weight:
            loss = mean_loss(rows)
            return {"loss": loss, "perplexity": perplexity(loss)}
        own, peers = (loss_of(rows, mask_T) for mask_T in parts(rows))
        by_pair = {f"peers_loss/{'/'.join(self.pairs[side - 1])}": loss for side, loss in side_losses(rows).items()}
        loss = own + self.config.peers_weight * peers
        return {"loss": loss, "perplexity": perplexity(own), "peers_loss": peers} | by_pair


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
