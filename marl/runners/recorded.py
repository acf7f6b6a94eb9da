"""Play a recorded episode again, with its answers; or go on from its middle with others."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from marl.runners.episode import FORESIGHT, Generate
from marl.types import AgentId, ContextOverflow, Episode, Message, Turn

Place = tuple[AgentId, int, int]
"""Agent, round, branch: what tells a turn from the others of its episode."""


class ReplayDiverged(ValueError):
    """A runner asked for a turn that the recorded episode does not hold."""


class RecordedAnswers:
    """A ``generate`` that gives recorded answers.

    ``instead`` puts other turns in the places of recorded ones; one that was said to another observation lends its text and is
    not trained. What comes after a change is not known: a recorded answer
    is given up to the round of the first change, and where the agent is shown what it was shown then; every other one is
    asked of ``generate``, or raises ReplayDiverged where there is none.
    """

    def __init__(
        self, episode: Episode, generate: Generate | None = None, instead: Mapping[Place, Turn | None] | None = None
    ) -> None:
        """None in ``instead`` asks ``generate`` for that turn too."""
        self.episode, self.generate, self.instead = episode, generate, dict(instead or {})
        self.turns = {turn.place: turn for turn in episode.turns}
        self.last = min((round for _, round, _ in self.instead), default=None)

    async def __call__(
        self, agent: AgentId, observation: list[Message], round: int, previous: Turn | None, branch: int
    ) -> Turn:
        place = (agent, round, branch)
        if self._was_shortened(place, observation):
            raise ContextOverflow(f"{agent!r} was shown less in round {round}, as the record has it")
        if place in self.instead:
            turn = self.instead[place]
        else:
            turn = self.turns.get(place)
            if turn is not None and (turn.observation != observation or (self.last is not None and round > self.last)):
                turn = None
        if turn is not None:
            score = turn.score if turn.answers else None  # a turn that is not an answer is scored by its outcome
            marks: dict[str, Any] = {
                "kept": True,
                "trained": True,
                "compared": False,
                "answers": True,
                "outcomes": [],
                "evidence": {},
            }  # the runner's to set anew
            marks |= {"agent": agent, "round": round, "branch": branch}
            if turn.observation != observation:  # another's answer: its tokens belong to another prompt
                unsaid: dict[str, list] = {"prompt_ids": [], "response_ids": [], "response_mask": [], "log_probs": []}
                marks |= {"policy": "", "trained": False, **unsaid}
            return replace(turn, observation=list(observation), score=score, **marks)
        if self.generate is None:
            raise ReplayDiverged(
                f"task {self.episode.task.id}, sample {self.episode.sample}: {self._why(place, observation)}"
            )
        return await self.generate(agent, observation, round, previous, branch)

    def _was_shortened(self, place: Place, observation: Sequence[Message]) -> bool:
        """True if this was too long for the agent when it was recorded. After a change nobody knows yet what fits."""
        if self.last is not None and place[1] > self.last:
            return False
        if place[2] <= FORESIGHT and self.episode.counts["unread_requests"]:
            return place not in self.turns
        if FORESIGHT < place[2] < 0 and self.episode.counts["dropped_rounds"]:
            return place not in self.turns  # a note on what was itself too long
        shortened = self.episode.counts["dropped_rounds"] or self.episode.counts["summaries"]
        return bool(shortened) and place in self.turns and len(observation) > len(self.turns[place].observation)

    def _why(self, place: Place, observation: Sequence[Message]) -> str:
        agent, round, branch = place
        if place not in self.turns:
            return f"the record holds no turn of {agent!r} in round {round}, branch {branch}; is the runner the same?"
        shown = self.turns[place].observation
        at = next(
            (i for i, pair in enumerate(zip(shown, observation, strict=False)) if pair[0] != pair[1]),
            min(len(shown), len(observation)),
        )
        return (
            f"{agent!r} is shown another message {at} in round {round} than was recorded: "
            f"{list(observation[at : at + 1])} where it was {list(shown[at : at + 1])}; are runner and roles the same?"
        )
