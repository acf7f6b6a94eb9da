"""The joint batch of a step: dense turn grids and ragged rows, and parts that only some learners and credits need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor
from marl.types import AgentId, Ballot, CriticName, PolicyName
from marl.utils.masks import last_along


@dataclass(slots=True)
class Alternatives:
    """Alternative turns: their columns in the grids and their comparison sets."""

    siblings_ERA: Tensor
    """The number of the set of alternatives that a turn is compared with, -1 for the others."""
    num_rounds: int
    """Columns that are rounds; alternatives that no conversation followed stand in the ones behind them."""


class CriticRows(dict["CriticName", "TensorDict"]):
    """The rows that each critic reads. One subclass per kind defines where their values are stored (:mod:`marl.batch.values`)."""

    def place(self, batch: JointBatch, critic: CriticName, values: Tensor) -> None:
        """Put a critic's values, ragged like ``read_at``, where the learner looks for them."""
        raise NotImplementedError

    def columns(self, batch: JointBatch, critic: CriticName) -> dict[str, Tensor]:
        """``values``, ``returns`` and ``value_mask`` of all positions read from a critic's rows, concatenated."""
        raise NotImplementedError

    def indexed(self, batch: JointBatch, critic: CriticName) -> list[TensorDict]:
        """The rows, in a critic's order, whose ``turn_index`` identifies the turns that it reads."""
        raise NotImplementedError


@dataclass(slots=True)
class CriticData:
    """Inputs and outputs of the critics, and the state of a mixer."""

    value_rows: CriticRows = field(default_factory=CriticRows)
    """Critic inputs: ``input_ids``, and the positions at which values are read (``read_at``, ``turn_index``)."""
    values_ERA: Tensor | None = None
    """A value of every trained turn, where critics value turns; values of tokens lie in the rows."""
    utilities_ERA: Tensor | None = None
    """q(h, y), the utility of a turn after its answer, where critics give one; v(h) is the value."""
    joint_ids: Tensor | None = None
    """The joint observation of every round, as ids ragged over [E * R]: the state of a learner that reads one."""


@dataclass(slots=True)
class Evidence:
    """Evidence that a credit scheme needs beyond scores; :meth:`Credit.add_evidence` adds to it."""

    grids: dict[str, Tensor] = field(default_factory=dict)
    """The turns' ``evidence`` by name [E, R, A], NaN on turns without it."""
    ballots: list[list[Ballot]] = field(default_factory=list)
    """Each episode's ballots: what it would have decided on, had it ended after an earlier round, and at last what it did
    decide on. Empty for an episode in which no rule decided."""
    outcomes_ERAK: Tensor | None = None
    """The team's returns with a turn's answer and with K - 1 others in its place, its own first; NaN where fewer are known.
    None where no turn was tried again."""


@dataclass(slots=True)
class JointBatch:
    """One step's experience of all agents: dense turn grids, and ragged rows for every policy.

    Column R of a grid is a round. Where a conversation branched, the alternatives that it did not follow stand in further
    columns behind the last round: ``mask_ERA`` shows the conversations alone, ``spoken_ERA`` all turns.

    A row's ``turn_index`` [T] points every answer token into a flattened [E, R, A] grid and is -1 elsewhere, so that
    numbers of turns reach tokens whether a row holds one turn or many.
    """

    agents: list[AgentId]
    tasks_E: list[str]
    spoken_ERA: Tensor
    """1 on every turn, alternatives that no conversation followed included."""
    scores_ERA: Tensor
    """Scores of turns, less their penalties."""
    team_score_E: Tensor
    """The score of the team's answer."""
    trained_ERA: Tensor
    """1 on the turns that are trained."""
    answers_ERA: Tensor
    """1 on the turns that are answers to the task. The others get the team answer's score."""
    lengths_ERA: Tensor
    """Number of tokens that the policy generated in a turn."""
    failed_E: Tensor
    """1 for episodes that ended early; ``team_score_E`` is then the failure score."""
    rows: dict[PolicyName, TensorDict]
    """Rows with verl's keys, as jagged nested tensors; trained turns only."""
    cells: list[list[int]] = field(default_factory=list)
    """Index of every turn in the flattened grid, per episode; -1 for a turn outside the grid."""
    sources_E: list[str] = field(default_factory=list)
    """The data source of every episode's task."""
    penalties_ERA: Tensor | float = 0.0
    """Penalties for the form of answers, such as their length, already subtracted from the scores."""
    returns_ERA: Tensor | None = None
    """Returns by which the learner compared turns, or value targets that it wrote for the critics."""
    alternatives: Alternatives | None = None
    """None where every turn is part of its conversation, and compared with none beside it."""
    critic_data: CriticData = field(default_factory=CriticData)
    evidence: Evidence = field(default_factory=Evidence)

    def evidence_ERA(self, name: str) -> Tensor:
        """The turns' ``evidence`` of this name, NaN on turns without it."""
        grids = self.evidence.grids
        return grids[name] if name in grids else torch.full(self.spoken_ERA.shape, torch.nan, dtype=torch.float64)

    @property
    def mask_ERA(self) -> Tensor:
        """1 where the agent spoke in the conversation."""
        if self.alternatives is None:
            return self.spoken_ERA
        mask_ERA = self.spoken_ERA.clone()
        mask_ERA[:, self.alternatives.num_rounds :] = 0
        return mask_ERA

    @property
    def siblings_ERA(self) -> Tensor:
        """The number of the set of alternatives that a turn is compared with, -1 for the others."""
        if self.alternatives is None:
            return torch.full(self.spoken_ERA.shape, -1)
        return self.alternatives.siblings_ERA

    @property
    def chained_ERA(self) -> Tensor:
        """1 on the conversations' turns that are credited with later rounds: all but those in a comparison set."""
        return self.mask_ERA & (self.siblings_ERA < 0)

    def apart(self, x_ERA: Tensor, own_ERA: Tensor) -> Tensor:
        """``x_ERA``, except on turns that are compared with their alternatives: these keep ``own_ERA``, whatever came later."""
        return torch.where(self.siblings_ERA >= 0, own_ERA, x_ERA)

    @property
    def last_turns_ERA(self) -> Tensor:
        """1 on each agent's last turn of every conversation."""
        return last_along(self.mask_ERA.long(), 1)

    @property
    def compared_ERA(self) -> Tensor:
        """1 on the turns that are trained, and on those of their agents in the same round of a task's other samples."""
        numbers: dict[str, int] = {}
        task_E = [numbers.setdefault(task, len(numbers)) for task in self.tasks_E]
        seats_GRA = self.trained_ERA.new_zeros(len(numbers), *self.trained_ERA.shape[1:])
        for task, trained_RA in zip(task_E, self.trained_ERA, strict=True):
            seats_GRA[task] |= trained_RA
        return self.spoken_ERA & seats_GRA[task_E]

    @property
    def answered_ERA(self) -> Tensor:
        """1 on the turns of the conversations that are answers to the task."""
        return self.mask_ERA & self.answers_ERA
