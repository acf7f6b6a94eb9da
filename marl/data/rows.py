"""verl's rows: files of ``data.train_files`` and ``data.val_files`` are read and checked before anything starts."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.json
import pyarrow.parquet

from marl.config.errors import ConfigError, shown
from marl.config.sources import Source
from marl.utils.near import did_you_mean

logger = logging.getLogger(__name__)

CHUNK = 128
"""Rows made at a time: often only the first ones are read."""
DATA_SUFFIXES = (".parquet", ".jsonl", ".json")
ROWS_SHOWN = 10
EXACT = 2**53
"""Integers from here on are not all floats."""
REMEDY = "; expected"
REQUIRED = ("data_source", "reward_model")
MESSAGES = "expected a list of messages [{'role': 'user', 'content': '…'}]"


class BadRows:
    """Problems of a file's rows, reported together so that all can be fixed at once."""

    def __init__(self, file: str) -> None:
        self.file, self.count, self.first = file, 0, list[str]()

    def add(self, problem: object) -> None:
        """A problem begins with its place and ends with ``; expected …``."""
        self.count += 1
        if self.count <= ROWS_SHOWN:
            self.first.append(str(problem))

    def refuse(self) -> None:
        """Raise ConfigError where there are any."""
        if not self.count:
            return
        if self.count == 1:
            raise ConfigError(f"{self.file}, {self.first[0]}")
        lines, remedies = self.first, {problem.partition(REMEDY)[2] for problem in self.first}
        if self.count > ROWS_SHOWN:
            lines = [*lines, f"and {self.count - ROWS_SHOWN} more"]
        if len(remedies) == 1 and (remedy := remedies.pop()):
            lines = [*(line.removesuffix(f"{REMEDY}{remedy}") for line in lines), f"expected{remedy}"]
        raise ConfigError(f"{self.file}: {self.count} rows cannot be used:\n  " + "\n  ".join(lines))


def file_list(files: Any) -> list[str]:
    """verl takes one file or a list of them; null is none."""
    return [files] if isinstance(files, str) else list(files or [])


def check_data_files(config: Any) -> None:
    """Raise ConfigError for files that are not there, or of another kind."""
    for key in ("train_files", "val_files"):
        given = config.data[key]
        if key == "val_files" and not given and Source.of(config) is not Source.play:
            continue  # a method that plays nothing need not measure anything
        files = file_list(given) if isinstance(given, str) or hasattr(given, "__iter__") else []
        if not files or not all(isinstance(file, str) and file.strip() for file in files):
            raise ConfigError(f"data.{key}={given}: expected a file or a list of files, parquet or jsonl")
        for file in files:
            if not Path(file).expanduser().is_file():
                raise ConfigError(
                    f"data.{key}={file}: no such file; expected parquet or jsonl with verl's columns, or set data.columns for "
                    "files of your own"
                )
            if Path(file).suffix not in DATA_SUFFIXES:
                raise ConfigError(
                    f"data.{key}={file}: the name ends in {Path(file).suffix!r}; expected {', '.join(DATA_SUFFIXES)}"
                )


def check_files(files: str | Sequence[str], prompt_key: str, agents: Sequence[str]) -> list[str]:
    """Raise ConfigError naming the file, the places and the columns of rows that cannot be used; else the rows' questions."""
    return [question for file in file_list(files) for question in check_file(file, prompt_key, agents)]


def check_file(file: str, prompt_key: str, agents: Sequence[str]) -> list[str]:
    bad, questions = BadRows(file), []
    for row, place in zip(rows_of(file, prompt_key), places_in(file), strict=False):
        try:
            check_row(row, place, prompt_key, agents)
        except ConfigError as error:
            bad.add(error)
        else:
            questions.append(question_of(row, prompt_key))
    bad.refuse()
    if not questions:
        raise ConfigError(f"{file}: there are no rows; expected at least one: regenerate the file, or leave it out")
    return questions


def places_in(file: str) -> Iterator[str]:
    """Where each row stands: a line as an editor counts them, or a row as pandas does."""
    if Path(file).suffix == ".parquet":
        yield from (f"row {number}" for number in count())
    with open(Path(file).expanduser(), "rb") as lines:
        yield from (f"line {number}" for number, line in enumerate(lines, 1) if line.strip())


def question_of(row: Mapping[str, Any], prompt_key: str = "prompt") -> str:
    """Question of a row, of all agents together."""
    return asked([*row[prompt_key], *(m for private in agent_prompts(row, "").values() for m in private or ())])


def asked(messages: Sequence[Mapping[str, Any]]) -> str:
    """Question of some messages: the same under all system prompts, and for variants by blanks and case."""
    return " ".join(" ".join(m["content"].split()) for m in messages if m["role"] != "system").casefold()


def warn_of_shared(train: Collection[str], val: Sequence[str]) -> None:
    """Name the questions that are both trained and measured."""
    trained = {question for question in train if question}
    if shared := [question for question in val if question in trained]:
        logger.warning(
            "data.val_files: %d of %d rows ask what data.train_files ask too, up to blanks and case, such as %s: their accuracy shows what "
            "was learned by heart; take them out of one of the two, or have rows split: data.val_files=null with data.columns",
            len(shared), len(val), shown(shared[0]),
        )  # fmt: skip


def rows_of(file: str, prompt_key: str) -> Iterator[dict[str, Any]]:
    """The rows of a file, with the columns that are read. Raises ConfigError for a file or column that cannot be read."""
    table = read_table(file)
    for column in (prompt_key, *REQUIRED):
        if column not in table.column_names:
            hint = did_you_mean(column, table.column_names)
            raise ConfigError(
                f"{file}: no column {column!r}; it has {', '.join(table.column_names)}.{hint} "
                "Expected verl's columns; data.prompt_key names the prompt's"
            )
    columns = dict.fromkeys((prompt_key, *REQUIRED, "extra_info"))
    yield from rows_in(table.select([name for name in columns if name in table.column_names]), file)


def rows_in(table: Any, file: str) -> Iterator[dict[str, Any]]:
    """The rows of a file's table. Raises ConfigError for texts that cannot be read."""
    for batch in table.to_batches(max_chunksize=CHUNK):
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: a text is not UTF-8: {error}; expected UTF-8, write the file again") from None


def read_table(file: str) -> Any:
    path = Path(file).expanduser()
    read = pyarrow.parquet.read_table if path.suffix == ".parquet" else pyarrow.json.read_json
    kind = "parquet" if path.suffix == ".parquet" else "json lines, whose columns hold one type each"
    try:
        table = read(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: cannot be read as {path.suffix or 'parquet'}: {error}; expected {kind}: write the file again"
        ) from None
    for name in table.column_names:
        if table.column_names.count(name) > 1:
            raise ConfigError(f"{file}: two columns are called {name!r}; expected one of each, rename the other")
    return table


def check_row(row: Mapping[str, Any], where: str, prompt_key: str, agents: Sequence[str]) -> None:
    for column in (prompt_key, *REQUIRED):
        if column not in row:
            raise ConfigError(f"{where}: no {column!r}; it has {shown(list(row))}; expected verl's columns")
    check_messages(row[prompt_key], f"{where}, column {prompt_key!r}")
    source, truth = row["data_source"], row["reward_model"]
    if not isinstance(source, str) or not source.strip():
        raise ConfigError(f"{where}: data_source is {shown(source)}; expected a name, such as openai/gsm8k")
    if not isinstance(truth, dict) or truth.get("ground_truth") is None:
        raise ConfigError(f"{where}: reward_model is {shown(truth)}; expected {{'style': 'rule', 'ground_truth': …}}")
    answer = truth["ground_truth"]
    if isinstance(answer, datetime) or (isinstance(answer, float) and abs(answer) >= EXACT):
        raise ConfigError(
            f"{where}: the ground_truth is read as {shown(answer)}; expected a text: verl's JSON reader changes dates and large integers, "
            "so write the answers as texts into parquet, or read the file by data.columns"
        )
    for agent, messages in agent_prompts(row, where).items():
        if messages is None:
            continue
        if agent not in agents:
            raise ConfigError(
                f"{where}: extra_info.agent_prompts names {shown(agent)}, which is not an agent; expected: "
                f"{', '.join(agents)}.{did_you_mean(str(agent), agents)}"
            )
        check_messages(messages, f"{where}, extra_info.agent_prompts.{agent}")


def agent_prompts(row: Mapping[str, Any], where: str) -> Mapping[Any, Any]:
    found: Any = row
    for key, name, expected in (
        ("extra_info", "extra_info", "a dict, or nothing"),
        ("agent_prompts", "extra_info.agent_prompts", "{agent: messages}"),
    ):
        found = {} if found.get(key) is None else found[key]
        if not isinstance(found, Mapping):
            raise ConfigError(f"{where}: {name} is {shown(found)}; expected {expected}")
    return found


def check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where} is {shown(messages)}; {MESSAGES}")
    for message in messages:
        parts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(part, str) for part in parts) or not parts[0]:
            raise ConfigError(f"{where} holds {shown(message)}; {MESSAGES}")
    last = messages[-1]
    if last["role"] == "assistant":
        raise ConfigError(
            f"{where} ends in a message of the assistant, {shown(last)}; expected one to answer at the end: leave the solution "
            "out, which belongs into reward_model.ground_truth"
        )
    if not last["content"].strip():
        raise ConfigError(f"{where} ends in an empty message, {shown(last)}; {MESSAGES}")
