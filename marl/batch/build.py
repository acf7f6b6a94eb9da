"""Episodes to the joint batch: dense turn grids, and ragged rows for every policy. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from marl.batch.evidence import evidence_grids
from marl.batch.joint import Alternatives, Evidence, JointBatch
from marl.batch.packing import Chain, chains_of
from marl.batch.rows import rows_of
from marl.types import AgentId, Episode, PolicyName, Turn
from marl.utils.ragged import jagged


def joint_batch(
    episodes: Sequence[Episode],
    agents: Sequence[AgentId],
    temperatures: Mapping[AgentId, float],
    train_rounds: Sequence[int] | None = None,
    pack_turns: bool | Collection[PolicyName] = False,
) -> JointBatch:
    """Grids over all turns, at least one round wide, and rows for the trained turns: those of the agents in ``temperatures``
    and of ``train_rounds`` (None for all). With ``pack_turns``, for all policies or for these, a turn whose prompt extends
    another one of its agent shares that one's row."""
    num_rounds = max((episode.num_rounds for episode in episodes), default=0)
    places = [columns_of(episode, num_rounds) for episode in episodes]
    width = max((column + 1 for columns in places for column in columns), default=0)
    shape = (len(episodes), max(num_rounds, width, 1), len(agents))  # an empty round, where no turn was kept
    spoken_ERA, trained_ERA, answers_ERA = np.zeros((3, *shape), dtype=bool)
    scores_ERA, penalties_ERA = np.zeros((2, *shape))  # double: 200000.1 and 200000.2 are two scores
    siblings_ERA = np.full(shape, -1)
    lengths_ERA = np.zeros(shape, dtype=np.int64)
    seat = {agent: a for a, agent in enumerate(agents)}
    sets: dict[tuple, int] = {}
    trained: list[Chain] = [[] for _ in episodes]
    cells: list[list[int]] = []
    for e, episode in enumerate(episodes):
        cells.append([-1] * len(episode.turns))
        for i, (turn, column) in enumerate(zip(episode.turns, places[e], strict=True)):
            if column < 0:
                continue
            cell = (e, column, seat[turn.agent])
            cells[e][i] = int(np.ravel_multi_index(cell, shape))
            spoken_ERA[cell], scores_ERA[cell] = True, turn.scored.value - turn.scored.penalty
            penalties_ERA[cell] = turn.scored.penalty
            answers_ERA[cell], lengths_ERA[cell] = turn.answers, sum(turn.response_mask)
            if turn.compared:
                siblings_ERA[cell] = sets.setdefault((e, turn.agent, turn.round), len(sets))
            rounds = train_rounds is None or turn.round in train_rounds
            if turn.trained and rounds and turn.agent in temperatures:
                trained_ERA[cell] = True
                trained[e].append((turn, cells[e][i]))
    return JointBatch(
        cells=cells,
        evidence=Evidence(evidence_grids(episodes, cells, shape)),
        alternatives=Alternatives(torch.from_numpy(siblings_ERA), num_rounds)
        if sets or shape[1] > num_rounds
        else None,
        agents=list(agents),
        tasks_E=[episode.task.id for episode in episodes],
        sources_E=[episode.task.data_source for episode in episodes],
        spoken_ERA=torch.from_numpy(spoken_ERA),
        scores_ERA=torch.from_numpy(scores_ERA),
        penalties_ERA=torch.from_numpy(penalties_ERA),
        trained_ERA=torch.from_numpy(trained_ERA),
        answers_ERA=torch.from_numpy(answers_ERA),
        lengths_ERA=torch.from_numpy(lengths_ERA),
        team_score_E=torch.tensor(
            [episode.scored.value if episode.score else 0.0 for episode in episodes], dtype=torch.float64
        ),
        rows={policy: to_rows(turns, temperatures) for policy, turns in chains_of(trained, pack_turns).items()},
        failed_E=torch.tensor([episode.failure is not None for episode in episodes], dtype=torch.bool),
    )


def columns_of(episode: Episode, num_rounds: int) -> list[int]:
    """The grid column of each turn: its round for turns of the path, the next free column behind all rounds for alternatives
    that are trained or compared; -1 for turns outside the grid."""
    behind: Counter[AgentId] = Counter()
    columns = []
    for turn in episode.turns:
        if turn.kept:
            columns.append(turn.round - 1)
        elif turn.trained or turn.compared:
            columns.append(num_rounds + behind[turn.agent])
            behind[turn.agent] += 1
        else:
            columns.append(-1)
    return columns


def to_rows(chains: Sequence[Chain], temperatures: Mapping[AgentId, float]) -> TensorDict:
    """One row per chain, with verl's keys: its last turn's prompt and answer. Text between two answers is part of the
    response, masked out."""
    columns: dict[str, list[list]] = {key: [] for key in ("prompts", "responses", "mask", "index", "log_probs")}
    for chain in chains:
        prompt = chain[0][0].prompt_ids
        row: dict[str, list] = {"responses": [], "mask": [], "index": [], "log_probs": []}
        for turn, cell in chain:
            require_ids(turn)
            between = turn.prompt_ids[len(prompt) + len(row["responses"]) :]
            row["responses"] += [*between, *turn.response_ids]
            row["mask"] += [*([0] * len(between)), *turn.response_mask]
            row["index"] += [*([-1] * len(between)), *(cell if on else -1 for on in turn.response_mask)]
            row["log_probs"] += [*([0.0] * len(between)), *turn.log_probs]
        for key, values in {"prompts": prompt, **row}.items():
            columns[key].append(values)
    whole = [p + r for p, r in zip(columns["prompts"], columns["responses"], strict=True)]
    responses, input_ids = jagged(columns["responses"], torch.long), jagged(whole, torch.long)
    said = responses.offsets()  # type: ignore[attr-defined]
    rows = {
        "prompts": jagged(columns["prompts"], torch.long),
        "responses": responses,
        "input_ids": input_ids,
        "position_ids": jagged([range(len(ids)) for ids in whole], torch.long, input_ids.offsets()),  # type: ignore[attr-defined]
        "response_mask": jagged(columns["mask"], torch.long, said),
        "loss_mask": jagged(columns["mask"], torch.long, said),
        "turn_index": jagged(columns["index"], torch.long, said),
        "rollout_log_probs": jagged(columns["log_probs"], torch.float32, said),
        "version": torch.tensor([min(turn.version for turn, _ in chain) for chain in chains]),
        "temperature": torch.tensor([temperatures[chain[0][0].agent] for chain in chains]),
    }
    return TensorDict(rows, batch_size=[len(chains)])


def require_ids(turn: Turn) -> None:
    """Raise ValueError for a turn of text alone: an endpoint's, which no configuration trains."""
    if not (turn.prompt_ids and turn.response_ids):
        raise ValueError(
            f"the turn of agent {turn.agent!r} in round {turn.round} (policy {turn.policy!r}) has no token ids and cannot be "
            f"trained; set agents.{turn.agent}.trainable=false"
        )


def pad_rows(rows: TensorDict, multiple: int) -> TensorDict:
    """Pad to a multiple by repeating the last row with an empty mask."""
    missing = -len(rows) % multiple
    if missing == 0:
        return rows
    return rows_of(rows, [*range(len(rows)), *[len(rows) - 1] * missing], silent=missing)
