"""Examples of a method that plays nothing: rows of files, or episodes that another run dumped."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from marl.config.errors import ConfigError
from marl.config.policies import policies_by_agent
from marl.config.sources import Source
from marl.data.rows import BadRows, places_in, read_table, rows_in
from marl.methods import Method
from marl.methods.examples import Example, Speakers, encoded, without_turns
from marl.report import dump
from marl.rewards import only_answer
from marl.types import Episode, PolicyName, Turn
from marl.utils.registry import did_you_mean

MAX_SAMPLES = {"data.train_files": "train_max_samples", "data.val_files": "val_max_samples"}

logger = logging.getLogger(__name__)

Item = list[Example]
"""Everything that one row teaches."""


class ExampleDataset(Dataset):
    """Items with token ids, encoded as they are read."""

    def __init__(self, items: Sequence[Item], encoders: Mapping[PolicyName, Any]) -> None:
        self.items, self.encoders = items, encoders

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return [encoded(example, self.encoders) for example in self.items[index]]


def speakers_of(config: Any) -> Speakers:
    """The trained agents, each with its policies by round."""
    trained = {name: agent for name, agent in config.agents.items() if agent.trainable}
    return policies_by_agent(trained)


def read_items(
    method: Method, source: Source, files: Sequence[str], speakers: Speakers, key: str, counts: bool = False
) -> list[Item]:
    """The examples in the files. Raises ConfigError for a file that cannot be used, and where nothing is learned from all of them. With
    ``counts`` a warning names how much of them is left out."""
    items: list[Item] = []
    if source is Source.rows:
        for file in files:
            found = list(items_of_rows(method, file, speakers))
            items += (kept := [item for item in found if item])
            if counts and len(kept) < len(found):
                logger.warning("%s: %d of %d rows are kept, the others teach nothing", file, len(kept), len(found))
    else:
        episodes = [episode for file in files for episode in read_episodes(file)]
        check_agents(method, episodes, speakers, f"{key}={list(files)}")
        items += [[example] for example in method.of_episodes(episodes, speakers).examples]
        if counts and files:
            logger.warning("%s: %d episodes give %d examples", ", ".join(files), len(episodes), len(items))
    if not items and files:
        raise ConfigError(
            f"{key}={list(files)}: nothing to learn: {nothing(method, source)}; use other files, or other method.* settings"
        )
    return items


def nothing(method: Method, source: Source) -> str:
    if source is Source.rows:
        return "there are no rows, or every row's chosen and rejected answers are identical"
    return f"method={method.config.name} finds no example in their episodes (too few good ones, no turn to learn from, or no contrast in any place)"


def items_of_rows(method: Method, file: str, speakers: Speakers) -> Iterator[Item]:
    """The example in every row; an empty item where there is none."""
    table = read_table(file)
    for wanted in method.columns:
        if not any(key.split(".")[0] in table.column_names for key in wanted):
            hint = did_you_mean(wanted[-1], table.column_names)
            raise ConfigError(
                f"{file}: no column {' or '.join(map(repr, wanted))}; it has {', '.join(table.column_names)}.{hint} "
                f"Expected the columns that method={method.config.name} reads; method.*_key name them"
            )
    bad = BadRows(file)
    for row, place in zip(rows_in(table, file), places_in(file), strict=False):
        try:
            yield method.of_row(row, speakers)
        except ValueError as error:
            bad.add(f"{place}: {error}; correct the row, or leave it out")
    bad.refuse()


def read_episodes(file: str) -> list[Episode]:
    if not file.endswith(".jsonl"):
        raise ConfigError(
            f"{file}: expected a dump of episodes, <step>.jsonl, with method.source=episodes; for rows set method.source=rows"
        )
    try:
        return list(dump.read(file, lambda source, truth: only_answer, lambda source, truth: str))
    except ValueError as error:
        raise ConfigError(f"{error}; for rows set method.source=rows") from None


def check_agents(method: Method, episodes: Sequence[Episode], speakers: Speakers, where: str) -> None:
    """Raise ConfigError for episodes in which nobody speaks whose turns are learned."""
    spoke = {turn.agent for episode in episodes for turn in episode.turns}
    teachers = method.teachers(speakers)
    if not episodes or teachers is None:
        return
    try:
        method.check_teachers(spoke, where)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not spoke & set(teachers):
        raise ConfigError(
            f"{where}: its agents are {', '.join(sorted(spoke))}, and this run trains {', '.join(speakers)}; expected "
            "episodes in which one of these speaks: name the agents alike, or set method.from_agent"
        )


def taken(items: list[Item], data: Any, key: str) -> list[Item]:
    """The items that verl's data set would take of as many rows: the first, or with ``data.shuffle`` any."""
    wanted = data[MAX_SAMPLES[key]] if key in MAX_SAMPLES else -1
    if not 0 < wanted < len(items):
        return items
    if not data.shuffle:
        return items[:wanted]
    return [items[i] for i in np.random.default_rng(data.seed).choice(len(items), size=wanted, replace=False)]


def within_limits(
    items: Sequence[Item], encoders: Mapping[PolicyName, Any], limits: Mapping[PolicyName, int], key: str
) -> list[Item]:
    """The items without predictions of more tokens than their policy's limit: they are another agent's, and nobody can shorten
    them. Raises ConfigError for any other turn of more. Only those that could be are encoded."""
    long: set[int] = set()
    for example in (example for item in items for example in item):
        turns = [turn for side in example.sides for turn in side]
        if any(may_exceed(turn, encoders[turn.policy], limits[turn.policy]) for turn in turns):
            encoded(example, encoders)
            long |= {id(turn) for turn in turns if is_long_prediction(turn, limits[turn.policy], key)}
    if not long:
        return list(items)
    logger.warning("%s: %d predictions are longer than the policies read, and left out", key, len(long))
    return [kept for item in items if (kept := without_turns(item, long))]


def is_long_prediction(turn: Turn, limit: int, key: str) -> bool:
    length = len(turn.prompt_ids) + len(turn.response_ids)
    if length > limit and turn.foresees is None:
        raise ConfigError(
            f"{key}: an example of agent {turn.agent!r} has {length} tokens, data.max_prompt_length + "
            f"data.max_response_length allow {limit}; raise them, or leave it out"
        )
    return length > limit


def may_exceed(turn: Turn, encoder: Any, limit: int) -> bool:
    """False if a turn cannot be longer than that: no token of a text is shorter than a byte, but for a space before it."""
    contents = [turn.text, turn.thought or "", *(str(message["content"]) for message in turn.observation)]
    num_bytes = sum(len(text.encode(errors="replace")) + 1 for text in contents)
    asked = encoder.encode([{**message, "content": ""} for message in turn.observation])
    return num_bytes + len(asked) + len(encoder.reply("", asked, turn.thought and "")) > limit
