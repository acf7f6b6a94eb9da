"""The rows of a dataset are checked before anything starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.json
import pyarrow.parquet

from marl.config.errors import ConfigError
from marl.utils.registry import did_you_mean


def file_list(files: str | Sequence[str]) -> list[str]:
    """verl takes one file or a list of them."""
    return [files] if isinstance(files, str) else list(files)


def check_files(files: str | Sequence[str], prompt_key: str, agents: Sequence[str]) -> None:
    """Raise ConfigError naming the file, the row and the column of the first row that cannot be used."""
    for file in file_list(files):
        path = Path(file).expanduser()
        read = pyarrow.parquet.read_table if path.suffix == ".parquet" else pyarrow.json.read_json
        try:
            table = read(path)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ConfigError(f"{file}: cannot be read as {path.suffix or 'parquet'}: {error}") from None
        columns = [
            name for name in (prompt_key, "data_source", "reward_model", "extra_info") if name in table.column_names
        ]
        for needed in (prompt_key, "data_source", "reward_model"):
            if needed not in columns:
                hint = did_you_mean(needed, table.column_names)
                raise ConfigError(f"{file}: no column {needed!r}; it has {', '.join(table.column_names)}.{hint}")
        for number, row in enumerate(table.select(columns).to_pylist()):
            check_row(row, f"{file}, row {number}", prompt_key, agents)


def check_row(row: dict[str, Any], where: str, prompt_key: str, agents: Sequence[str]) -> None:
    check_messages(row[prompt_key], f"{where}, column {prompt_key!r}")
    if not isinstance(row["data_source"], str):
        raise ConfigError(f"{where}: data_source is {row['data_source']!r}; expected a name, such as openai/gsm8k")
    truth = row["reward_model"]
    if not isinstance(truth, dict) or truth.get("ground_truth") is None:
        raise ConfigError(f"{where}: reward_model is {truth!r}; expected {{'style': 'rule', 'ground_truth': …}}")
    for agent, messages in ((row.get("extra_info") or {}).get("agent_prompts") or {}).items():
        if messages is None:
            continue
        if agent not in agents:
            raise ConfigError(
                f"{where}: extra_info.agent_prompts names {agent!r}, which is no agent; agents: {', '.join(agents)}."
                f"{did_you_mean(agent, agents)}"
            )
        check_messages(messages, f"{where}, extra_info.agent_prompts.{agent}")


def check_messages(messages: Any, where: str) -> None:
    expected = "expected a list of messages [{'role': 'user', 'content': '…'}]"
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where} is {str(messages)[:80]!r}; {expected}")
    for message in messages:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            raise ConfigError(f"{where} holds {str(message)[:80]!r}; {expected}")
