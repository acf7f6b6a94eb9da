"""Play a runner without a model: the answers come from a function, or from a list. For tests, and to debug prompts."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from marl.runners.base import Runner, play_to_end
from marl.runners.episode import Generate, Judge, LiveEpisode
from marl.runners.messages import Instructions
from marl.types import AgentId, Episode, Message, Score, Task, Turn

Script = Callable[[AgentId, int, list[Message]], str]
"""Agent, round and observation -> what it says."""


def scripted(script: Script) -> Generate:
    """Turns with these texts and no tokens."""

    async def generate(
        agent: AgentId, observation: list[Message], round: int, previous: Turn | None, branch: int
    ) -> Turn:
        await asyncio.sleep(0)
        return Turn(agent, round, list(observation), script(agent, round, observation), branch=branch)

    return generate


def numbered(agent: AgentId, round: int, observation: list[Message]) -> str:
    """A different text for every turn."""
    return f"This is what {agent} says in round {round}. #### {round}"


async def exact_match(task: Task, turn: Turn) -> Score:
    """1 for the ground truth, else 0."""
    answer = task.extract(turn.text)
    right = float(answer == str(task.ground_truth))
    return Score(right, answer, acc=right)


def listed(answers: Sequence[str]) -> Script:
    """These texts one after another, from the first again when they are used up."""
    count = 0

    def script(agent: AgentId, round: int, observation: list[Message]) -> str:
        nonlocal count
        count += 1
        return answers[(count - 1) % len(answers)]

    return script


async def play(
    runner: Runner,
    task: Task,
    agents: Sequence[AgentId],
    generate: Generate,
    *,
    judge: Judge = exact_match,
    roles: Mapping[AgentId, Instructions] | None = None,
    seed: int = 0,
    accuracy: Mapping[AgentId, float] | None = None,
) -> Episode:
    """One episode, with the team's answer; nothing is scored."""
    record = Episode(task, 0, list(agents), seed=seed, accuracy=dict(accuracy or {}))
    return await play_to_end(runner, LiveEpisode(record, generate, judge, roles, runner.config.overflow))
