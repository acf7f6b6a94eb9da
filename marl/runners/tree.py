"""Tree: at every level agents try several continuations, and the conversation goes on from the best one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from marl.runners.base import ConversationRunner, register_runner
from marl.runners.episode import Agent, LiveEpisode, keep, together
from marl.types import AgentId, Message, Turn
from marl.utils.numbers import bounded, count


class Keep(Enum):
    score = "score"
    """The one with the best score."""
    majority = "majority"
    """One whose answer most of them give."""


class Train(Enum):
    path = "path"
    """The turns of the kept path alone."""
    siblings = "siblings"
    """All turns, each compared with those that its agent gave beside it."""


@register_runner("tree")
class Tree(ConversationRunner):
    append_only = False  # who was not kept begins anew from the one that was

    @dataclass
    class Config(ConversationRunner.Config):
        num_levels: int = bounded(2, count(1, 100))
        """Number of levels, the first answers included."""
        num_branches: int = bounded(4, count(1, 1000))
        """Number of continuations that every agent tries at a level."""
        keep: Keep = Keep.score
        train: Train = Train.siblings
        instruction: str = "Improve on this."
        """Ends what is shown of the kept answer."""

    config: Config

    @property
    def in_turn(self) -> bool:
        return True

    def check(self, agents: Sequence[AgentId]) -> None:
        super().check(agents)
        if self.config.train is Train.siblings and self.config.num_branches < 2:
            raise ValueError(
                f"runner.num_branches={self.config.num_branches}: runner.train=siblings compares an answer with its siblings, and one "
                "without siblings learns nothing; expected at least 2, or runner.train=path, which compares the samples of a task"
            )

    async def run(self, episode: LiveEpisode) -> str | None:
        best: Turn | None = None
        for level in range(1, self.config.num_levels + 1):
            observations = [await self.observation(agent, best, episode) for agent in episode.agents]
            tried = await together(
                agent.alternatives(seen, self.config.num_branches, level)
                for agent, seen in zip(episode.agents, observations, strict=True)
            )
            turns = [turn for branches in tried for turn in branches]
            best = keep(await self.best(turns, episode), turns, self.config.train is Train.siblings)
        return episode.answer(best) if best else None

    async def observation(self, agent: Agent, best: Turn | None, episode: LiveEpisode) -> list[Message]:
        if best is None:
            return agent.prompt
        own = best.agent == agent.name
        return agent.continue_with(await self.shown(episode, [] if own else [best], self.config.instruction))

    async def best(self, turns: list[Turn], episode: LiveEpisode) -> Turn:
        """Ties are broken by the episode's seed."""
        if self.config.keep is Keep.score:
            values = [(await episode.score(turn)).value for turn in turns]
        else:
            counts = Counter(answer for turn in turns if (answer := episode.answer(turn)) is not None)
            values = [float(counts[answer]) if (answer := episode.answer(turn)) else 0.0 for turn in turns]
        return episode.rng.choice([turn for turn, value in zip(turns, values, strict=True) if value == max(values)])

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        branches = self.config.num_branches if self.config.train is Train.siblings else 1
        return dict.fromkeys(agents, self.config.num_levels * branches)

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return self.config.num_levels

    @property
    def compares_alternatives(self) -> bool:
        return self.config.train is Train.siblings and self.config.num_branches > 1

    @property
    def default_credit(self) -> str | None:
        return "own" if self.compares_alternatives else None
