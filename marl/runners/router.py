"""Router: one agent picks who works, and picks again once that one has answered."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from marl.runners.base import ConversationRunner, register_runner, since_own
from marl.runners.episode import Agent, LiveEpisode
from marl.runners.messages import says
from marl.types import AgentId, Turn
from marl.utils.numbers import bounded, count


@register_runner("router")
class Router(ConversationRunner):
    num_agents = (2, None)
    seats = ("router",)

    @dataclass
    class Config(ConversationRunner.Config):
        router: AgentId | None = None
        """null: the first agent."""
        num_picks: int = bounded(1, count(1, 10_000))
        """Maximum number of picks."""
        stop_word: str = ""
        """The router ends the work by saying it, after the first pick; empty for no such word."""
        menu: str = "Who shall work on this: {workers}? Say the name."
        """Question to the router. Field: workers."""
        instruction: str = "Go on from here."
        """Ends what a worker is shown of the answers since its last one, if there are any before."""

    config: Config

    @property
    def in_turn(self) -> bool:
        return True

    @property
    def may_end_early(self) -> bool:
        return bool(self.config.stop_word)

    async def run(self, episode: LiveEpisode) -> str | None:
        router = episode.agent(self.config.router or episode.agents[0].name)
        workers = [agent for agent in episode.agents if agent is not router]
        menu = self.config.menu.format(workers=", ".join(worker.name for worker in workers))
        work: list[Turn] = []
        for _ in range(self.config.num_picks):
            choice = await router.act(router.continue_with(await self.shown(episode, work[-1:], menu)), answers=False)
            if work and says(choice.text, self.config.stop_word):
                break
            worker = self.pick(choice, workers, episode)
            seen = since_own(work, worker.name)
            shown = await self.shown(episode, seen, self.config.instruction) if work else ""
            work.append(await worker.act(worker.continue_with(shown)))
        return episode.answer(work[-1])

    def pick(self, choice: Turn, workers: list[Agent], episode: LiveEpisode) -> Agent:
        """The worker that is named first; one at random, which is counted, where none is."""
        named = {
            worker.name: re.search(rf"(?<!\w){re.escape(worker.name)}(?!\w)", choice.text, re.IGNORECASE)
            for worker in workers
        }
        places = {name: match.start() for name, match in named.items() if match}
        if places:
            return episode.agent(min(places, key=places.__getitem__))
        episode.count("picked_at_random")
        return episode.rng.choice(workers)

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        return dict.fromkeys(agents, self.config.num_picks)

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return 2 * self.config.num_picks
