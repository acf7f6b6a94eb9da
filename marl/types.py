"""The nouns of the project. Imports nothing of ours; everything may import it.

Tensor names carry their axes: E episodes, R rounds, A agents, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

AgentId: TypeAlias = str
PolicyName: TypeAlias = str
CriticName: TypeAlias = str
Message: TypeAlias = dict[str, Any]
"""A chat message as the chat template takes it: ``role``, ``content``, and whatever else the template reads."""
Metrics: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the dataset: what is asked, and what is needed to judge an answer."""

    id: str
    messages: list[Message]
    ground_truth: Any
    data_source: str
    extract: Callable[[str], str | None]
    """The final answer that a text gives, or None where it gives none."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """verl's ``extra_info``; ``agent_prompts`` holds private observations, an agent's messages by its name."""

    def observation(self, agent: AgentId) -> list[Message]:
        """What this agent is shown of the task: its private messages where the row has them, else the prompt."""
        private = self.extra.get("agent_prompts") or {}
        return list(private.get(agent) or self.messages)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reward function says of a turn."""

    score: float
    answer: str | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a reward function that returns a dict; they become columns of the rollout dump."""


def given(verdict: Verdict | None, of: str) -> Verdict:
    if verdict is None:
        raise ValueError(f"the {of} has no verdict yet: score it first")
    return verdict


@dataclass(slots=True)
class Turn:
    """One agent acts once. Token fields are what the server took and gave; nothing is ever re-tokenised."""

    agent: AgentId
    round: int
    """1 for the first round."""
    observation: list[Message]
    text: str
    policy: PolicyName = ""
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    """1 on tokens that the policy generated, 0 on what a tool put in between."""
    log_probs: list[float] = field(default_factory=list)
    stop_reason: str | None = None
    """``completed`` or ``length``."""
    version: int = 0
    """The trainer's step whose weights generated this turn."""
    seed: int = 0
    verdict: Verdict | None = None

    @property
    def judged(self) -> Verdict:
        """The verdict. Raises ValueError on a turn that has none yet."""
        return given(self.verdict, f"turn of {self.agent!r} in round {self.round}")

    @property
    def correct(self) -> bool:
        return self.judged.score >= 1.0


@dataclass(slots=True)
class Episode:
    """All agents' turns on one sample of one task, in the order in which they ended."""

    task: Task
    sample: int
    """Which of the task's G samples this is, from 0."""
    agents: list[AgentId]
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None
    """The team's final answer, as the runner decided it."""
    verdict: Verdict | None = None
    """The verdict on the team's answer."""

    def trajectory(self, agent: AgentId) -> list[Turn]:
        return [turn for turn in self.turns if turn.agent == agent]

    @property
    def judged(self) -> Verdict:
        """The verdict on the team's answer. Raises ValueError on an episode that has none yet."""
        return given(self.verdict, f"episode of task {self.task.id}")

    @property
    def num_rounds(self) -> int:
        return max((turn.round for turn in self.turns), default=0)


@dataclass(slots=True)
class JointBatch:
    """One step's experience of all agents: dense turn grids, and ragged rows for every policy.

    A row's ``turn_index`` [T] points every answer token into a flattened [E, R, A] grid and is -1 elsewhere, so that
    numbers of turns reach tokens whether a row holds one turn or many.
    """

    agents: list[AgentId]
    tasks_E: list[str]
    mask_ERA: Tensor
    """1 where the agent spoke."""
    verdicts_ERA: Tensor
    team_verdict_E: Tensor
    """The verdict on the team's answer."""
    trained_ERA: Tensor
    """1 on the turns that are trained."""
    rows: dict[PolicyName, TensorDict]
    """Rows with verl's keys, as jagged nested tensors; trained turns only."""
    value_rows: dict[CriticName, TensorDict] = field(default_factory=dict)
    """What each critic reads: ``input_ids``, and where in a row its values are read (``read_at``, ``turn_index``)."""
    values_ERA: Tensor | None = None
    """A value of every trained turn, where critics value turns; values of tokens lie in the rows."""
    returns_ERA: Tensor | None = None
    """What the critics should have said, from the learner."""


class PolicyGroup(Protocol):
    """The only view a learner has of the workers of one policy."""

    async def update_actor(self, rows: TensorDict) -> Metrics:
        """One pass of optimisation over rows with ``advantages`` and ``old_log_probs``."""
        ...

    async def compute_log_prob(self, rows: TensorDict) -> TensorDict:
        """``log_probs`` and ``entropy`` of the rows' responses under the current weights, ragged like ``responses``."""
        ...


class CriticGroup(Protocol):
    """The only view a learner has of the workers of one critic."""

    async def update_critic(self, rows: TensorDict) -> Metrics:
        """One pass of optimisation over value rows with ``values``, ``returns`` and ``value_mask``, ragged like ``read_at``."""
        ...
