"""Game: at every stage agents act at the same time, and their payoffs are the scores of their turns. A seat that is paid while
it is idle is paid at its last turn before that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marl.envs import Joint, games
from marl.runners.base import ConversationRunner, register_runner
from marl.runners.episode import LiveEpisode, together
from marl.types import AgentId, Episode, Message, Score, Turn


def pay(payoffs: Sequence[float], latest: Mapping[int, Turn], owed: list[float]) -> None:
    """Add a stage's payoffs to each seat's latest turn; a seat that has not acted yet gets its own with its first."""
    for seat, payoff in enumerate(payoffs):
        owed[seat] += payoff
        if seat in latest:
            score = latest[seat].scored
            latest[seat].score, owed[seat] = replace(score, value=score.value + owed[seat]), 0.0


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
        latest: dict[int, Turn] = {}
        totals, owed = [0.0] * len(agents), [0.0] * len(agents)
        silent: list[int] = []
        total = 0.0
        while not silent and len(earlier) < game.num_stages:
            observations = {
                seat: await self.seen(game, seat, earlier, latest, episode) for seat in game.actors(earlier)
            }
            turns = await together(agents[seat].act(shown) for seat, shown in observations.items())
            acted = dict(zip(observations, turns, strict=True))
            joint, payoffs = game.outcome({seat: turn.text for seat, turn in acted.items()}, earlier)
            silent = [seat for seat in acted if joint[seat] is None]
            episode.record.counts.update({"no_action": len(silent)} if silent else {})
            for seat, turn in acted.items():
                turn.score = Score(0.0, game.word(joint[seat]))
            said, latest = acted or said, latest | acted
            pay(payoffs, latest, owed)
            total += sum(payoffs) / len(agents)
            if not silent:
                earlier.append(joint)
                totals = [sum(pair) for pair in zip(totals, payoffs, strict=True)]
        for seat, lead in enumerate(game.leads(totals, silent, len(earlier))):
            if seat in latest:
                latest[seat].evidence[games.LEAD] = lead
        answer = None if silent else " ".join(str(turn.scored.answer) for turn in said.values())
        episode.record.runner_score = Score(total, answer)
        return answer

    async def seen(
        self, game: games.Game, seat: int, earlier: list[Joint], latest: dict[int, Turn], episode: LiveEpisode
    ) -> list[Message]:
        """The task at first; later what the game lets this seat see of the stage before."""
        if not earlier:
            return episode.agents[seat].prompt
        shown = await self.shown(
            episode, [latest[other] for other in game.seen(seat, earlier)], self.config.instruction
        )
        return episode.agents[seat].continue_with(shown)

    def failure_score(self, episode: Episode) -> float:
        """Mean over agents of what each earned before its last turn, and of what it forfeits from there on."""
        earned = [sum(turn.scored.value for turn in episode.trajectory(agent)[:-1]) for agent in episode.agents]
        forfeits = [self.last_turn_score(episode, agent) for agent in episode.agents]
        return (sum(earned) + sum(forfeits)) / len(episode.agents)

    def last_turn_score(self, episode: Episode, agent: AgentId) -> float:
        """The game's ``invalid``, for the stage of the agent's last turn and every one after it."""
        turns = episode.trajectory(agent)
        return games.make_game(self.config.game, len(episode.agents)).forfeit(turns[-1].round - 1 if turns else 0)

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        game = games.make_game(self.config.game, len(agents))
        return {agent: game.turns(seat) for seat, agent in enumerate(agents)}

    def last_round(self, agents: Sequence[AgentId]) -> int | None:
        return games.make_game(self.config.game, len(agents)).num_stages

    def check(self, agents: Sequence[AgentId]) -> None:
        super().check(agents)
        games.make_game(self.config.game, len(agents))
