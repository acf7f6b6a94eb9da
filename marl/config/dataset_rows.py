"""The rows of a dataset are checked before anything starts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.json
import pyarrow.parquet

from marl.config.errors import ConfigError
from marl.utils.registry import did_you_mean

CHUNK = 128
"""Rows made at a time: often only the first ones are read."""
DATA_SUFFIXES = (".parquet", ".jsonl", ".json")


def file_list(files: str | Sequence[str] | None) -> list[str]:
    """verl takes one file or a list of them; null is none."""
    return [files] if isinstance(files, str) else list(files or [])


def check_files(files: str | Sequence[str], prompt_key: str, agents: Sequence[str]) -> int:
    """Raise ConfigError naming the file, the row and the column of the first row that cannot be used; else count them."""
    return sum(check_file(file, prompt_key, agents) for file in file_list(files))


def check_file(file: str, prompt_key: str, agents: Sequence[str]) -> int:
    number = -1
    for number, row in enumerate(rows_of(file, prompt_key)):
        check_row(row, f"{file}, row {number}", prompt_key, agents)
    if number < 0:
        raise ConfigError(f"{file}: there are no rows; expected at least one: regenerate the file, or leave it out")
    return number + 1


def rows_of(file: str, prompt_key: str) -> Iterator[dict[str, Any]]:
    """The rows of a file, with the columns that are read. Raises ConfigError for a file or column that cannot be read."""
    table = read_table(file)
    needed = (prompt_key, "data_source", "reward_model")
    for column in needed:
        if column not in table.column_names:
            hint = did_you_mean(column, table.column_names)
            raise ConfigError(
                f"{file}: no column {column!r}; it has {', '.join(table.column_names)}.{hint} "
                "Expected verl's columns; data.prompt_key names the prompt's"
            )
    optional = [name for name in ("extra_info",) if name in table.column_names]
    columns = list(dict.fromkeys([*needed, *optional]))
    yield from rows_in(table.select(columns), file)


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
    kind = "parquet" if path.suffix == ".parquet" else "json lines"
    try:
        table = read(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: cannot be read as {path.suffix or 'parquet'}: {error}; expected {kind}: write the file again"
        ) from None
    doubled = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if doubled:
        raise ConfigError(f"{file}: two columns are called {doubled[0]!r}; expected one of each, rename the other")
    return table


def check_row(row: Mapping[str, Any], where: str, prompt_key: str, agents: Sequence[str]) -> None:
    for column in (prompt_key, "data_source", "reward_model"):
        if column not in row:
            raise ConfigError(f"{where}: no {column!r}; it has {shown(list(row))}; expected verl's columns")
    check_messages(row[prompt_key], f"{where}, column {prompt_key!r}")
    source = row["data_source"]
    if not isinstance(source, str) or not source.strip():
        raise ConfigError(f"{where}: data_source is {shown(source)}; expected a name, such as openai/gsm8k")
    truth = row["reward_model"]
    if not isinstance(truth, dict) or truth.get("ground_truth") is None:
        raise ConfigError(f"{where}: reward_model is {shown(truth)}; expected {{'style': 'rule', 'ground_truth': …}}")
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
    extra = row.get("extra_info")
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{where}: extra_info is {shown(extra)}; expected a dict, or nothing")
    prompts = extra.get("agent_prompts")
    if prompts is None:
        return {}
    if not isinstance(prompts, Mapping):
        raise ConfigError(f"{where}: extra_info.agent_prompts is {shown(prompts)}; expected {{agent: messages}}")
    return prompts


def check_messages(messages: Any, where: str) -> None:
    expected = "expected a list of messages [{'role': 'user', 'content': '…'}]"
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where} is {shown(messages)}; {expected}")
    for message in messages:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not message["role"]
            or not isinstance(message.get("content"), str)
        ):
            raise ConfigError(f"{where} holds {shown(message)}; {expected}")
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where} ends in a message of the assistant, {shown(messages[-1])}; expected one to answer at the end: leave the solution "
            "out, which belongs into reward_model.ground_truth"
        )
    if not messages[-1]["content"].strip():
        raise ConfigError(f"{where} ends in an empty message, {shown(messages[-1])}; {expected}")


def shown(value: Any) -> str:
    """A value in a message: not longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
