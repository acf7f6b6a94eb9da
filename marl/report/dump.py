"""Episodes as JSON lines: verl's rollout schema (``input output gts score step``), one line a turn, with our columns.

The first line of an episode also holds what is needed to play it again (:func:`read`).
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from marl.types import Episode, Score, Task, Turn
from marl.utils.manifest import sync_folder
from marl.utils.plain_files import opener
from marl.utils.secret_masking import masked_text

TURN = (
    "agent",
    "round",
    "policy",
    "stop_reason",
    "version",
    "seed",
    "branch",
    "kept",
    "compared",
    "answers",
    "trained",
    "thought",
    "foresees",
)
"""Columns that are fields of a turn."""
NO_TURN: dict[str, Any] = {"input": "", "output": "", "messages": [], "answer": None} | dict.fromkeys(TURN)
PLAIN = (str, int, float, bool)
Numbers = dict[str, float | None]
"""Numbers that a turn was trained on: ``reward``, ``return``, ``advantage``, ``value``; None where there is none."""
Extractor = Callable[..., Callable[[str], str | None]]
"""``(data_source, truth=…)`` -> how its texts give their final answers."""
Hider = Callable[..., Callable[[str], str]]
"""``(data_source, truth=…)`` -> how its texts are shown without them."""


def lines(
    episodes: Sequence[Episode], step: int, numbers: Sequence[Sequence[Numbers]] | None = None
) -> list[dict[str, Any]]:
    """One line per turn; ``numbers``: each turn's training numbers, if it was trained."""
    return [
        line
        for e, episode in enumerate(episodes)
        for line in lines_of(episode, step, numbers[e] if numbers else [{}] * len(episode.turns))
    ]


def lines_of(episode: Episode, step: int, numbers: Sequence[Numbers]) -> list[dict[str, Any]]:
    """One line per turn; for a failed episode without turns, one line without a turn."""
    known = {
        "gts": episode.task.ground_truth,
        "step": step,
        "task": episode.task.id,
        "data_source": episode.task.data_source,
        "sample": episode.sample,
        "team_answer": episode.answer,
        "team_score": episode.scored.value,
        "team_acc": acc_of(episode.scored),
        "failure": episode.failure,
    }
    found = [
        of_turn(turn) | {"turn": index} | known | own
        for index, (turn, own) in enumerate(zip(episode.turns, numbers, strict=True), start=1)
    ]
    found = found or [NO_TURN | {"score": episode.scored.value, "acc": acc_of(episode.scored)} | known]
    found[0]["episode"] = whole(episode)
    return found


def of_turn(turn: Turn) -> dict[str, Any]:
    extra, failure = turn.scored.extra.items(), turn.scored.failure
    return {
        **{key: value for key, value in extra if isinstance(value, PLAIN) and key != "episode"},
        "input": "\n".join(f"{message['role']}: {message['content']}" for message in turn.observation),
        "output": turn.text,
        "score": turn.scored.value,
        "acc": acc_of(turn.scored),
        **{name: getattr(turn, name) for name in TURN},
        "messages": turn.observation,
        "answer": turn.scored.answer,
        "reward_failure": None if failure is None else masked_text(failure),
    }


def acc_of(score: Score) -> float:
    """The reward's own ``acc``, else what the score decided: readers need not know ``judge.right_at``."""
    return float(score.right) if score.acc is None else score.acc


def whole(episode: Episode) -> dict[str, Any]:
    task = {"messages": episode.task.messages, "extra_info": dict(episode.task.extra)}
    known = {"agents": episode.agents, "seed": episode.seed, "counts": dict(episode.counts)}
    return known | {"accuracy": episode.accuracy} | task


def write(
    episodes: Sequence[Episode], step: int, folder: str | Path, numbers: Sequence[Sequence[Numbers]] | None = None
) -> Path:
    """Write ``<folder>/<step>.jsonl``."""
    path = Path(folder) / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = lines(episodes, step, numbers)
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.writelines(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in written)
        file.flush()
        os.fsync(file.fileno())  # as the checkpoint after it, whose run will not write it again
    sync_folder(path.parent)
    return path


def read(path: str | Path, extractor: Extractor, hider: Hider) -> Iterator[Episode]:
    """The episodes of a dump, with the texts of their turns and without tokens. Raises ValueError for another file."""
    record: Episode | None = None
    for number, text in enumerate(open_lines(path), start=1):
        if number > 1 and not text.strip():
            continue
        try:
            line = json.loads(text)
            if "episode" in line:
                if record is not None:
                    yield record
                record = begun(line, extractor, hider)
            if record is None:
                raise KeyError("episode")
            if line["agent"] is not None:
                record.turns.append(turn_of(line))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: {error!r}; expected a line that trainer.rollout_data_dir or "
                "trainer.validation_data_dir of this version wrote"
            ) from None
    if record is not None:
        yield record


def open_lines(path: str | Path) -> Iterator[bytes]:
    """One line at a time, however large the file; an empty file is one empty line."""
    with open(path, "rb") as file:
        yield from file
        if file.tell() == 0:
            yield b""


def begun(line: dict[str, Any], extractor: Extractor, hider: Hider) -> Episode:
    known, source, extra = line["episode"], line["data_source"], line["episode"]["extra_info"]
    truth = line["gts"]
    extract, hide = extractor(source, truth=truth), hider(source, truth=truth)
    task = Task(line["task"], known["messages"], truth, source, extract, extra, hide)
    record = Episode(task, line["sample"], known["agents"], seed=known["seed"], accuracy=known["accuracy"])
    record.answer, record.score = (
        line["team_answer"],
        Score(line["team_score"], line["team_answer"], acc=line.get("team_acc")),
    )
    record.counts, record.failure = Counter(known["counts"]), line["failure"]
    return record


def turn_of(line: dict[str, Any]) -> Turn:
    fields = {name: line[name] for name in TURN if name != "foresees"}
    fields["foresees"] = line.get("foresees")  # older dumps lack it
    score = Score(line["score"], line["answer"], failure=line["reward_failure"], acc=line.get("acc"))
    return Turn(observation=line["messages"], text=line["output"], score=score, **fields)
