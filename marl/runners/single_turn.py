"""Single turn: every agent answers the task once, alone; the team's answer is the majority's."""

from marl.runners.base import LiveEpisode, Runner, majority, register_runner, together


@register_runner("single_turn")
class SingleTurn(Runner):
    async def run(self, episode: LiveEpisode) -> str | None:
        turns = await together(agent.act(agent.prompt) for agent in episode.agents)
        return majority([episode.answer(turn) for turn in turns], episode.rng)
