"""Transfer of values from critics to the learner, and of returns back. Pure."""

import torch
from tensordict import TensorDict
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.types import CriticName, PolicyName


def place_values(batch: JointBatch, critic: CriticName, values: Tensor) -> None:
    """Put a critic's values, ragged like ``read_at`` of its rows, where the learner looks for them.

    Values of turns go to the grid, values of tokens into the rows of the policies whose rows the critic reads.
    """
    rows = batch.critic_data.value_rows[critic]
    if "answered" in rows:
        if batch.critic_data.values_ERA is None or batch.critic_data.utilities_ERA is None:
            batch.critic_data.values_ERA, batch.critic_data.utilities_ERA = torch.zeros(
                2, *batch.spoken_ERA.shape
            ).unbind()
        place_utilities(rows, values, batch.critic_data.values_ERA, batch.critic_data.utilities_ERA)
        return
    if "turn_index" in rows:
        if batch.critic_data.values_ERA is None:
            batch.critic_data.values_ERA = torch.zeros(batch.spoken_ERA.shape)
        batch.critic_data.values_ERA.view(-1)[rows["turn_index"].values()] = values.values().float()
        return
    start = 0
    for name in policies_read(batch, critic):
        offsets = batch.rows[name]["responses"].offsets()
        own = values.values()[start : start + int(offsets[-1])]
        batch.rows[name]["values"] = torch.nested.nested_tensor_from_jagged(own.float(), offsets=offsets)
        start += int(offsets[-1])


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


def policies_read(batch: JointBatch, critic: CriticName) -> list[PolicyName]:
    """A local critic has its policy's name and reads its rows; the central one reads all, in their order."""
    return [critic] if critic in batch.rows else list(batch.rows)


def training_rows(batch: JointBatch, critic: CriticName) -> TensorDict:
    """A critic's rows with ``values``, ``returns`` and ``value_mask``, ragged like ``read_at``."""
    rows = batch.critic_data.value_rows[critic].copy()
    if "turn_index" in rows:
        if batch.critic_data.values_ERA is None or batch.returns_ERA is None:
            raise ValueError(f"critic {critic!r} has no values and returns to learn from: the learner wrote none")
        cells = rows["turn_index"].values()
        columns = {
            "values": batch.critic_data.values_ERA.flatten()[cells],
            "returns": batch.returns_ERA.flatten()[cells],
            "value_mask": batch.trained_ERA.flatten()[cells].long(),
        }
    else:
        read = [batch.rows[name] for name in policies_read(batch, critic)]
        columns = {
            "values": torch.cat([part["values"].values() for part in read]),
            "returns": torch.cat([part["returns"].values() for part in read]),
            "value_mask": torch.cat([part["response_mask"].values() for part in read]),  # less what was rejected
        }
    for key, column in columns.items():
        rows[key] = torch.nested.nested_tensor_from_jagged(column, offsets=rows["read_at"].offsets())
    return rows
