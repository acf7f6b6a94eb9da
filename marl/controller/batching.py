"""Episodes to the joint batch: dense turn grids, and ragged rows for every policy. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from marl.types import AgentId, Episode, JointBatch, PolicyName, Turn
from marl.utils.ragged import jagged


def joint_batch(
    episodes: Sequence[Episode],
    agents: Sequence[AgentId],
    temperatures: Mapping[AgentId, float],
    train_rounds: Sequence[int] | None = None,
) -> JointBatch:
    """Grids over all turns; rows of the turns that are trained: those of the agents in ``temperatures`` and of
    ``train_rounds`` (None for all)."""
    shape = (len(episodes), max((episode.num_rounds for episode in episodes), default=0), len(agents))
    mask_ERA, trained_ERA = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    verdicts_ERA = np.zeros(shape, dtype=np.float32)
    column = {agent: a for a, agent in enumerate(agents)}
    rows: dict[PolicyName, list[tuple[Turn, int]]] = {}
    for e, episode in enumerate(episodes):
        for turn in episode.turns:
            cell = (e, turn.round - 1, column[turn.agent])
            mask_ERA[cell], verdicts_ERA[cell] = True, turn.judged.score
            if turn.agent in temperatures and (train_rounds is None or turn.round in train_rounds):
                trained_ERA[cell] = True
                rows.setdefault(turn.policy, []).append((turn, int(np.ravel_multi_index(cell, shape))))
    return JointBatch(
        agents=list(agents),
        tasks_E=[episode.task.id for episode in episodes],
        mask_ERA=torch.from_numpy(mask_ERA),
        verdicts_ERA=torch.from_numpy(verdicts_ERA),
        trained_ERA=torch.from_numpy(trained_ERA),
        team_verdict_E=torch.tensor([episode.judged.score if episode.verdict else 0.0 for episode in episodes]),
        rows={policy: to_rows(turns, temperatures) for policy, turns in rows.items()},
    )


def to_rows(turns: Sequence[tuple[Turn, int]], temperatures: Mapping[AgentId, float]) -> TensorDict:
    """One row a turn, with verl's keys, from turns and their index in the flattened grid."""
    prompts = [turn.prompt_ids for turn, _ in turns]
    responses = [turn.response_ids for turn, _ in turns]
    masks = [turn.response_mask for turn, _ in turns]
    index = [[cell if on else -1 for on in turn.response_mask] for turn, cell in turns]
    rows = {
        "prompts": jagged(prompts, torch.long),
        "responses": jagged(responses, torch.long),
        "input_ids": jagged([p + r for p, r in zip(prompts, responses, strict=True)], torch.long),
        "position_ids": jagged([range(len(p) + len(r)) for p, r in zip(prompts, responses, strict=True)], torch.long),
        "response_mask": jagged(masks, torch.long),
        "loss_mask": jagged(masks, torch.long),
        "turn_index": jagged(index, torch.long),
        "rollout_log_probs": jagged([turn.log_probs for turn, _ in turns], torch.float32),
        "temperature": torch.tensor([temperatures[turn.agent] for turn, _ in turns]),
    }
    return TensorDict(rows, batch_size=[len(turns)])


def pad_rows(rows: TensorDict, multiple: int) -> TensorDict:
    """Repeat the last row, with nothing in it to learn, until the rows divide."""
    missing = -len(rows) % multiple
    if missing == 0:
        return rows
    return rows_of(rows, [*range(len(rows)), *[len(rows) - 1] * missing], silent=missing)


def rows_of(rows: TensorDict, index: Sequence[int], silent: int = 0) -> TensorDict:
    """These rows in this order; the last ``silent`` of them with empty masks."""
    picked = {}
    for key, value in rows.items():
        parts = list(value.unbind())
        chosen = [parts[i] for i in index]
        if silent and key in ("response_mask", "loss_mask", "value_mask"):
            chosen[-silent:] = [torch.zeros_like(part) for part in chosen[-silent:]]
        picked[key] = (
            torch.nested.as_nested_tensor(chosen, layout=torch.jagged) if value.is_nested else torch.stack(chosen)
        )
    return TensorDict(picked, batch_size=[len(index)])
