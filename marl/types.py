"""The nouns of the project. Imports nothing of ours; everything may import it.

Tensor names carry their axes: E episodes, R rounds, A agents, B rows, T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
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


class ContextOverflow(ValueError):
    """An observation is longer than ``data.max_prompt_length`` tokens."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the dataset: the prompt, and what is needed to score an answer."""

    id: str
    messages: list[Message]
    ground_truth: Any
    data_source: str
    extract: Callable[[str], str | None]
    """The final answer that a text gives, or None where it gives none."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """verl's ``extra_info``; ``agent_prompts`` holds private observations, an agent's messages by its name."""
    hide: Callable[[str], str] = str
    """A text without the final answer that it gives."""

    def observation(self, agent: AgentId) -> list[Message]:
        """The task as this agent sees it: its private messages where the row has them, else the prompt."""
        private = self.extra.get("agent_prompts") or {}
        return list(private.get(agent) or self.messages)


LARGEST_SCORE = 1e15
"""Sums of squares of larger ones overflow single precision."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward function's result for a turn."""

    value: float
    answer: str | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a reward function that returns a dict; they become columns of the rollout dump."""
    penalty: float = 0.0
    """Penalty for the answer's form, subtracted from the score in training; reports leave it out."""
    failure: str | None = None
    """Reason why the reward function failed on the text, whose score is then ``judge.failure_score``."""
    acc: float | None = None
    """1 where the text is right, if the reward function says so (verl's ``acc``); None leaves it to the score."""
    right_at: float = 1.0
    """``judge.right_at``: the score from which a text without ``acc`` is right."""

    def __post_init__(self) -> None:
        if not abs(self.value) <= LARGEST_SCORE:  # nor is NaN
            raise ValueError(
                f"a score of {self.value:g}; expected a finite number between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}"
            )

    @property
    def right(self) -> bool:
        """The one rule for what is right: accuracies, votes, transitions, stops and verdicts all ask it."""
        if self.failure is not None:
            return False
        return self.value >= self.right_at if self.acc is None else self.acc >= 1.0

    def for_training(self, score: float) -> Score:
        """A copy that trains with ``score``; the reported value stays."""
        return replace(self, penalty=self.value - score)


def require_score(score: Score | None, of: str) -> Score:
    if score is None:
        raise ValueError(f"the {of} has no score yet: score it first")
    return score


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
    branch: int = 0
    """Index among the agent's alternatives at this point, from 0; negative for a note that it wrote for itself."""
    kept: bool = True
    """False: the conversation did not continue from it."""
    compared: bool = False
    """Compared with its alternatives, the agent's other turns of the same episode and round, by their scores alone."""
    answers: bool = True
    """False: it is no answer to the task (a critique, a choice, a pass), and gets the score of the team's answer."""
    trained: bool = True
    """False: never trained on, whatever the configuration."""
    foresees: AgentId | None = None
    """The peer whose next turn this predicts, in a note; None for what the agent says itself."""
    score: Score | None = None
    outcomes: list[float] = field(default_factory=list)
    """The team's return with this answer, then with each other one that was tried in its place."""
    evidence: dict[str, float] = field(default_factory=dict)
    """Numbers that a runner, or a credit scheme's ``gather``, stores here; ``assign`` reads each with ``batch.evidence_ERA(name)``."""
    billed_tokens: int = 0
    """Tokens of prompt and answer as an endpoint counts them; 0 for servers of the run's own."""
    thought: str | None = None
    """A reasoning model's thought before ``text``; no agent sees it, and no answer or word is extracted from it."""

    @property
    def place(self) -> tuple[AgentId, int, int]:
        """Unique key within the episode."""
        return self.agent, self.round, self.branch

    def extends(self, previous: Turn) -> bool:
        """True if its prompt begins with the ids of that turn's prompt and answer."""
        ids = previous.prompt_ids + previous.response_ids
        return self.prompt_ids[: len(ids)] == ids

    def goes_on(self, previous: Turn) -> bool:
        """True if the same policy sees that turn's observation and answer, then further messages."""
        said = [*previous.observation, {"role": "assistant", "content": previous.text}]
        return self.policy == previous.policy and self.observation[: len(said)] == said

    @property
    def truncated(self) -> bool:
        return self.stop_reason == "length"

    @property
    def scored(self) -> Score:
        """The score. Raises ValueError on a turn that has none yet."""
        return require_score(self.score, f"turn of {self.agent!r} in round {self.round}")

    @property
    def correct(self) -> bool:
        return self.scored.right


class Rule(Enum):
    """Rule by which votes decide the team's answer."""

    heaviest = "heaviest"
    """The answer with the largest sum of weights."""
    agreed = "agreed"
    """The answer that all give."""
    last = "last"
    """The last one's."""


@dataclass(frozen=True, slots=True)
class Vote:
    """An agent's answer, as far as it decides what the team answers."""

    agent: AgentId
    round: int
    """Round of the turn that gave it."""
    answer: str | None
    weight: float = 1.0
    score: float = 0.0
    """The score of that turn, once it is known."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """Votes of a team, and the rule that decides between them."""

    rule: Rule
    votes: tuple[Vote, ...]
    by_score: bool = False
    """A vote's weight is its score."""
    no_answer: float = 0.0
    """Score of no answer."""


@dataclass(slots=True)
class Episode:
    """All agents' turns on one sample of one task; once it has ended, in the order of rounds, seats and branches."""

    task: Task
    sample: int
    """Index among the task's G samples, from 0."""
    agents: list[AgentId]
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None
    """The team's final answer, as the runner decided it."""
    score: Score | None = None
    """The score of the team's answer."""
    seed: int = 0
    """Seeds ``episode.rng``."""
    accuracy: dict[AgentId, float] = field(default_factory=dict)
    """Each agent's share of right answers in training before this episode, of which runners may make weights."""
    counts: Counter[str] = field(default_factory=Counter)
    """Event counts by name, such as ``dropped_rounds`` or ``picked_at_random``."""
    ballot: Ballot | None = None
    """Ballot that decided ``answer``; None where no rule decided."""
    runner_score: Score | None = None
    """Score of the team's answer set by the runner; None leaves it to the scores of its turns."""
    failure: str | None = None
    """Reason for an early end: ``overflow`` (an observation did not fit) or, in validation, ``error`` (the conversation
    was lost, and no turn of it is known). Such a team has no answer. None for an episode that was played to its end."""
    failure_message: str = ""

    def sort(self) -> None:
        """Put the turns into an order that does not depend on who happened to answer first."""
        self.turns.sort(key=lambda turn: (turn.round, self.agents.index(turn.agent), turn.branch))

    @property
    def path(self) -> list[Turn]:
        """The turns that the conversation went through: all but the alternatives that were not kept."""
        return [turn for turn in self.turns if turn.kept]

    def trajectory(self, agent: AgentId) -> list[Turn]:
        """One agent's turns on the path, by round."""
        return sorted((turn for turn in self.path if turn.agent == agent), key=lambda turn: turn.round)

    @property
    def scored(self) -> Score:
        """The score of the team's answer. Raises ValueError on an episode that has none yet."""
        return require_score(self.score, f"episode of task {self.task.id}")

    @property
    def num_rounds(self) -> int:
        return max((turn.round for turn in self.turns if turn.kept), default=0)


class PolicyGroup(Protocol):
    """The only view a learner has of the workers of one policy."""

    async def update_actor(self, rows: TensorDict) -> Metrics:
        """One pass of optimisation over rows with ``advantages`` and ``old_log_probs``."""
        ...

    async def compute_log_prob(self, rows: TensorDict) -> TensorDict:
        """``log_probs`` and ``entropy`` of the rows' responses under the current weights, ragged like ``responses``."""
        ...

    async def compute_ref_log_prob(self, rows: TensorDict) -> TensorDict:
        """``log_probs`` under the reference's weights."""
        ...

    async def descend(self, rows: TensorDict, last: bool) -> Metrics:
        """One step of optimisation down ``gradients``, the derivatives of a loss by every log-prob, ragged like ``responses``.

        ``last`` of this training step: the learning rate moves on.
        """
        ...


class CriticGroup(Protocol):
    """The only view a learner has of the workers of one critic."""

    async def compute_values(self, rows: TensorDict) -> Tensor:
        """Values under the current weights, ragged like ``read_at``."""
        ...

    async def update_critic(self, rows: TensorDict) -> Metrics:
        """One pass of optimisation over value rows with ``values``, ``returns`` and ``value_mask``, ragged like ``read_at``."""
        ...

    async def descend(self, rows: TensorDict, last: bool) -> Metrics:
        """One step of optimisation down ``gradients``, the derivatives of a loss by every value, ragged like ``read_at``.

        ``last`` of this training step: the learning rate moves on.
        """
        ...

    async def compute_targets(self, rows: TensorDict) -> Tensor:
        """Values under the weights that :meth:`renew_target` kept, ragged like ``read_at``."""
        ...

    async def renew_target(self) -> None:
        """Keep a copy of the current weights as the target."""
        ...
