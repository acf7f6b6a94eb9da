"""Episodes as JSON lines: verl's rollout schema (``input output gts score step``), one line a turn, with our columns."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marl.types import Episode


def lines(episodes: Sequence[Episode], step: int) -> list[dict[str, Any]]:
    return [
        {
            **{key: value for key, value in turn.judged.extra.items() if isinstance(value, str | int | float | bool)},
            "input": "\n".join(f"{message['role']}: {message['content']}" for message in turn.observation),
            "output": turn.text,
            "gts": episode.task.ground_truth,
            "score": turn.judged.score,
            "step": step,
            "task": episode.task.id,
            "data_source": episode.task.data_source,
            "sample": episode.sample,
            "agent": turn.agent,
            "policy": turn.policy,
            "round": turn.round,
            "answer": turn.judged.answer,
            "stop_reason": turn.stop_reason,
            "version": turn.version,
            "seed": turn.seed,
            "team_answer": episode.answer,
            "team_score": episode.judged.score,
        }
        for episode in episodes
        for turn in episode.turns
    ]


def write(episodes: Sequence[Episode], step: int, folder: str | Path) -> Path:
    """Write ``<folder>/<step>.jsonl``."""
    path = Path(folder) / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines(episodes, step)))
    return path
