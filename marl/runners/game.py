"""Game: at every stage agents act at the same time, and their payoffs are the scores of their turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from marl.envs import Joint, games
from marl.runners.base import register_runner
from marl.runners.episode import LiveEpisode, together
from marl.runners.text import ConversationRunner
from marl.types import AgentId, Episode, Message, Score, Turn


@register_runner("game")
class Game(ConversationRunner):
    """The team's answer is the joint action of the last stage; its score is the mean of the agents' total payoffs."""

    scores_turns = True

    @dataclass
    class Config(ConversationRunner.Config):
        game: dict[str, Any] = field(default_factory=lambda: {"name": "halves"})
        """A registered game by its ``name``, and its keys; see ``marl/envs/games.py``."""
        instruction: str = "Choose again."
        """Ends what an agent is shown of the stage before."""

    config: Config

    async def run(self, episode: LiveEpisode) -> str | None:
        game, agents = games.make_game(self.config.game, len(episode.agents)), episode.agents
        earlier: list[Joint] = []
        said: dict[int, Turn] = {}
        total, named = 0.0, True
        while named and len(earlier) < game.num_stages:
            observations = {seat: await self.seen(game, seat, earlier, said, episode) for seat in game.actors(earlier)}
            turns = await together(agents[seat].act(shown) for seat, shown in observations.items())
            said = dict(zip(observations, turns, strict=True))
            joint, payoffs = game.outcome({seat: turn.text for seat, turn in said.items()}, earlier)
            earlier.append(joint)
            for seat, turn in said.items():
                turn.score = Score(payoffs[seat], game.word(joint[seat]))
                if joint[seat] is None:
                    named = False
                    episode.count("no_action")
            total += sum(payoffs) / len(agents)
        answer = " ".join(str(turn.scored.answer) for turn in said.values()) if named else None
        episode.record.runner_score = Score(total, answer)
        return answer

    async def seen(
        self, game: games.Game, seat: int, earlier: list[Joint], said: dict[int, Turn], episode: LiveEpisode
    ) -> list[Message]:
        """The task at first; later what the game lets this seat see of the stage before."""
        if not earlier:
            return episode.agents[seat].prompt
        shown = await self.shown(episode, [said[other] for other in game.seen(seat, earlier)], self.config.instruction)
        return episode.agents[seat].continue_with(shown)

    def failure_score(self, episode: Episode) -> float:
        """The game's ``invalid``, for the stage of the last turns and all later ones: payoffs of earlier stages are already final."""
        game = games.make_game(self.config.game, len(episode.agents))
        return game.forfeit(max(0, episode.num_rounds - 1))

    def keywords(self, agents: Sequence[AgentId]) -> Sequence[str]:
        return games.make_game(self.config.game, len(agents)).words

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        game = games.make_game(self.config.game, len(agents))
        return {agent: game.turns(seat) for seat, agent in enumerate(agents)}

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return games.make_game(self.config.game, len(agents)).num_stages

    def check(self, agents: Sequence[AgentId]) -> None:
        super().check(agents)
        games.make_game(self.config.game, len(agents))
