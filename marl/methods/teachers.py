"""Choice of whose turns an agent imitates: its own, another agent's, or the turn that gave the team's answer. Pure."""

from collections.abc import Collection, Mapping
from copy import copy
from enum import Enum
from typing import Any

from marl.methods.choice import is_whole, with_policy
from marl.methods.examples import Side, Speakers
from marl.types import AgentId, Episode, PolicyName, Turn
from marl.utils.near import did_you_mean


class Target(Enum):
    """``method.target``: part of an episode that is imitated."""

    turns = "turns"
    """The turns, each after what its agent was shown."""
    team_answer = "team_answer"
    """The text that gave the team's answer, after the task alone."""


def teachers_of(from_agent: Any, speakers: Speakers) -> dict[AgentId, AgentId]:
    """The agent whose turns each trained agent learns: itself, but where ``from_agent`` names one for all, or for some by name."""
    if from_agent is None:
        return {agent: agent for agent in speakers}
    if isinstance(from_agent, str):
        return dict.fromkeys(speakers, from_agent)
    return {agent: from_agent.get(agent, agent) for agent in speakers}


def named_teachers(from_agent: Any) -> list[AgentId]:
    if from_agent is None or isinstance(from_agent, str):
        return [from_agent] if from_agent else []
    return list(from_agent.values())


def must_speak(from_agent: Any, agents: Collection[AgentId], where: str) -> None:
    """Raise ValueError for a teacher that is none of these agents."""
    for name in named_teachers(from_agent):
        if name not in agents:
            raise ValueError(
                f"method.from_agent names {name!r}, who does not speak in {where}; expected one of {', '.join(sorted(agents))}."
                f"{did_you_mean(name, list(agents))}"
            )


def taught(episode: Episode, speakers: Speakers, teachers: Mapping[AgentId, AgentId]) -> Side:
    """The turns that the conversation went through, each under the policy of the agents that learn it, once a policy; without
    truncated ones, which do not end where the model would have stopped."""
    found: dict[tuple, Turn] = {}
    for turn in episode.path:
        students = [agent for agent in speakers if teachers[agent] == turn.agent]
        students.sort(key=lambda student: student != turn.agent)  # of a shared policy: the ids that its teacher sampled
        for student in students if turn.trained else []:
            own = as_said_by(turn, student, speakers)
            if is_whole(own):
                found.setdefault((own.policy, turn.place), own)
    return list(found.values())


def as_said_by(turn: Turn, student: AgentId, speakers: Speakers) -> Turn:
    """The turn itself, or a copy without ids, as another policy may have another tokenizer."""
    if turn.agent == student:
        return with_policy(turn, speakers)
    own = copy(turn)
    own.agent, own.prompt_ids, own.response_ids, own.thought = student, [], [], thought_of(turn)
    return with_policy(own, speakers)


def thought_of(turn: Turn) -> str | None:
    """The thought, but of a turn in which a tool answered: the student does not call it."""
    return None if 0 in turn.response_mask else turn.thought


def team_answer(episode: Episode, speakers: Speakers) -> Side:
    """The text that gave the team's answer, with the thought before it, said by every trained agent at once after the task; the last of
    several. Empty where the team has no answer, or no turn gives it."""
    gave = [turn for turn in episode.path if turn.scored.answer == episode.answer and turn.text and is_whole(turn)]
    if episode.answer is None or not gave:
        return []
    found: dict[tuple[PolicyName, str], Turn] = {}
    for agent, policies in speakers.items():
        asked, gives = episode.task.observation(agent), gave[-1]
        own = Turn(agent, 1, asked, gives.text, policy=policies[0], thought=thought_of(gives))
        found.setdefault((own.policy, repr(own.observation)), own)
    return list(found.values())
