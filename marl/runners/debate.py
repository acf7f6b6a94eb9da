"""Debate: agents answer, read one another and answer again (Du et al., arXiv:2305.14325)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from marl.config.foresight import REQUEST
from marl.runners.base import ConversationRunner, register_runner
from marl.runners.episode import Agent, LiveEpisode, together
from marl.runners.foresight import foreseen
from marl.runners.messages import says
from marl.runners.team_answer import Decide, agreed, decide
from marl.types import AgentId, Turn
from marl.utils.numbers import bounded, count


class Sees(Enum):
    all = "all"
    ring = "ring"
    """The ``num_peers`` agents before it in the team's order, which is a circle."""
    random = "random"
    """``num_peers`` others, drawn anew for every turn."""


class Order(Enum):
    simultaneous = "simultaneous"
    sequential = "sequential"
    """One after another, each reading what was said just before; every turn is a round of its own."""


@register_runner("debate")
class Debate(ConversationRunner):
    votes = True

    @dataclass
    class Config(ConversationRunner.Config):
        num_rounds: int = bounded(2, count(1, 10_000))
        """Number of rounds, in each of which every agent speaks; the first answers included."""
        instruction: str = "Consider the other answers, then give your updated answer."
        """Appended to the peers' turns; empty for none."""
        sees: Sees = Sees.all
        num_peers: int = bounded(1, count(1, 10_000))
        """Number of others that an agent reads, with ``sees`` of ring and random."""
        order: Order = Order.simultaneous
        stop_on_consensus: bool = False
        """Ends after a turn with which all give the same answer."""
        pass_word: str = ""
        """An agent that says it without an answer keeps its previous one and is not quoted; empty for no such word."""
        leave_word: str = ""
        """An agent that says it speaks no more; the rest of its text counts."""
        decide: Decide = Decide.majority
        foresee: bool = False
        """Before it answers, every agent predicts each peer's next answer and sees its own predictions; they are not trained."""
        foresee_request: str = REQUEST
        """Asks for a prediction, after what the agent is shown. Field: agent."""
        foreseen_template: str = "You expect {agent} to answer:\n{text}"
        """Template of a prediction as its agent reads it. Fields: agent, text."""

    config: Config

    @property
    def in_turn(self) -> bool:
        return self.config.order is Order.sequential

    @property
    def may_end_early(self) -> bool:
        return self.config.stop_on_consensus or bool(self.config.leave_word)

    async def run(self, episode: LiveEpisode) -> str | None:
        standing: dict[AgentId, Turn] = {}
        present = list(episode.agents)
        for _ in range(self.config.num_rounds):
            groups = [present] if self.config.order is Order.simultaneous else [[agent] for agent in present]
            for group in groups:
                observations = await self.observations(group, standing, episode)
                turns = await together(
                    agent.act(seen, answers=lambda turn: self.answers(turn, episode))
                    for agent, seen in zip(group, observations, strict=True)
                )
                standing |= {turn.agent: turn for turn in turns if turn.answers}
                if self.over(standing, episode):
                    break
            present = [agent for agent in present if not self.has_left(agent)]
            if not present or self.over(standing, episode):
                break
        last = [standing.get(agent.name) or agent.turns[-1] for agent in episode.agents if agent.turns]
        return await decide(self.config.decide, last, episode)

    async def observations(self, group: Sequence[Agent], standing: dict[AgentId, Turn], episode: LiveEpisode) -> list:
        """Observations of a group; with ``foresee``, each agent's predictions after its own."""
        seen = [await self.observation(agent, standing, episode) for agent in group]
        if not self.config.foresee:
            return seen
        speaking = [agent for agent in episode.agents if not agent.turns or not self.has_left(agent)]
        options = speaking, self.config.foresee_request, self.config.foreseen_template, self.config.separator
        return await together(foreseen(agent, own, episode, *options) for agent, own in zip(group, seen, strict=True))

    async def observation(self, agent: Agent, standing: dict[AgentId, Turn], episode: LiveEpisode) -> list:
        """The task at first; later what others stand by, in the fixed order of the team."""
        seen = [standing[peer] for peer in self.peers(agent, episode) if peer in standing]
        if not agent.turns and not seen:
            return agent.prompt
        return agent.continue_with(await self.shown(episode, seen, self.config.instruction))

    def peers(self, agent: Agent, episode: LiveEpisode) -> list[AgentId]:
        names = [other.name for other in episode.agents]
        seat = names.index(agent.name)
        before = [*names[seat + 1 :], *names[:seat]]
        chosen = set(before)
        if self.config.sees is Sees.ring:
            chosen = set(before[-self.config.num_peers :])
        elif self.config.sees is Sees.random:
            chosen = set(episode.rng.sample(before, min(self.config.num_peers, len(before))))
        return [name for name in names if name in chosen]

    def answers(self, turn: Turn, episode: LiveEpisode) -> bool:
        """False for a turn that passes."""
        return not says(turn.text, self.config.pass_word) or episode.answer(turn) is not None

    def has_left(self, agent: Agent) -> bool:
        return says(agent.turns[-1].text, self.config.leave_word)

    def over(self, standing: dict[AgentId, Turn], episode: LiveEpisode) -> bool:
        answers = [episode.answer(turn) for turn in standing.values()]
        return self.config.stop_on_consensus and len(answers) == len(episode.agents) and agreed(answers) is not None

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        return dict.fromkeys(agents, self.config.num_rounds)

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return self.config.num_rounds * (len(agents) if self.config.order is Order.sequential else 1)
