"""Transfer of values from critics to the learner, and of returns back. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from marl.batch.joint import CriticRows, JointBatch
from marl.types import CriticName

if TYPE_CHECKING:
    from tensordict import TensorDict


def place_values(batch: JointBatch, critic: CriticName, values: Tensor) -> None:
    """Put a critic's values, ragged like ``read_at`` of its rows, where the learner looks for them."""
    batch.critic_data.value_rows.place(batch, critic, values)


def training_rows(batch: JointBatch, critic: CriticName) -> TensorDict:
    """A critic's rows with ``values``, ``returns`` and ``value_mask``, ragged like ``read_at``."""
    critics = batch.critic_data.value_rows
    rows = critics[critic].copy()
    for key, column in critics.columns(batch, critic).items():
        rows[key] = torch.nested.nested_tensor_from_jagged(column, offsets=rows["read_at"].offsets())
    return rows


class TurnRows(CriticRows):
    """Read where turns begin: the values are in the grid."""

    def place(self, batch: JointBatch, critic: CriticName, values: Tensor) -> None:
        data = batch.critic_data
        if data.values_ERA is None:
            data.values_ERA = torch.zeros(batch.spoken_ERA.shape)
        data.values_ERA.view(-1)[self[critic]["turn_index"].values()] = values.values().float()

    def columns(self, batch: JointBatch, critic: CriticName) -> dict[str, Tensor]:
        if batch.critic_data.values_ERA is None or batch.returns_ERA is None:
            raise ValueError(f"critic {critic!r} has no values and returns to learn from: the learner wrote none")
        cells = self[critic]["turn_index"].values()
        return {
            "values": batch.critic_data.values_ERA.flatten()[cells],
            "returns": batch.returns_ERA.flatten()[cells],
            "value_mask": batch.trained_ERA.flatten()[cells].long(),
        }

    def indexed(self, batch: JointBatch, critic: CriticName) -> list[TensorDict]:
        return [self[critic]]


class UtilityRows(TurnRows):
    """Read before and after answers, as given by ``answered``: values and utilities are in separate grids."""

    def place(self, batch: JointBatch, critic: CriticName, values: Tensor) -> None:
        data = batch.critic_data
        if data.values_ERA is None or data.utilities_ERA is None:
            data.values_ERA, data.utilities_ERA = torch.zeros(2, *batch.spoken_ERA.shape).unbind()
        place_utilities(self[critic], values, data.values_ERA, data.utilities_ERA)


class TokenRows(CriticRows):
    """Read before every token of an answer: the values are in the policies' rows, which these line up with."""

    def place(self, batch: JointBatch, critic: CriticName, values: Tensor) -> None:
        start = 0
        for rows in self.indexed(batch, critic):
            offsets = rows["responses"].offsets()
            own = values.values()[start : start + int(offsets[-1])]
            rows["values"] = torch.nested.nested_tensor_from_jagged(own.float(), offsets=offsets)
            start += int(offsets[-1])

    def columns(self, batch: JointBatch, critic: CriticName) -> dict[str, Tensor]:
        read = self.indexed(batch, critic)
        return {
            "values": torch.cat([part["values"].values() for part in read]),
            "returns": torch.cat([part["returns"].values() for part in read]),
            "value_mask": torch.cat([part["response_mask"].values() for part in read]),  # less what was rejected
        }

    def indexed(self, batch: JointBatch, critic: CriticName) -> list[TensorDict]:
        """A local critic has its policy's name and reads its rows; the central one reads all, in their order."""
        return [batch.rows[critic]] if critic in batch.rows else list(batch.rows.values())


def place_utilities(rows: TensorDict, values: Tensor, v_ERA: Tensor, q_ERA: Tensor) -> None:
    """Write values read before answers into one grid, values read after them into the other."""
    cells, answered = rows["turn_index"].values(), rows["answered"].values().bool()
    v_ERA.view(-1)[cells[~answered]] = values.values()[~answered].float()
    q_ERA.view(-1)[cells[answered]] = values.values()[answered].float()


def gradient_rows(rows: TensorDict, dv_ERA: Tensor, dq_ERA: Tensor) -> TensorDict:
    """A critic's rows with ``gradients`` and ``value_mask``, ragged like ``read_at``: the inverse of :func:`place_utilities`."""
    cells, answered = rows["turn_index"].values(), rows["answered"].values().bool()
    gradients = torch.where(answered, dq_ERA.flatten()[cells], dv_ERA.flatten()[cells])
    rows, offsets = rows.copy(), rows["read_at"].offsets()
    rows["gradients"] = torch.nested.nested_tensor_from_jagged(gradients, offsets=offsets)
    rows["value_mask"] = torch.nested.nested_tensor_from_jagged(torch.ones_like(cells), offsets=offsets)
    return rows
