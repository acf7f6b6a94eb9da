"""Tables of a user's: CSV, JSON, parquet and Hugging Face data sets, read with errors that name the file."""

import json
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.csv

from marl.config.dataset_rows import read_table
from marl.config.errors import ConfigError
from marl.utils.near import did_you_mean

HUB = "hf://"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*DELIMITERS, ".jsonl", ".json", ".parquet")
TIMES = 4
"""Memory that reading takes, in sizes of the file."""
HEAD = 1 << 16


def read(source: str, wanted: list[str]) -> pyarrow.Table:
    """The wanted columns of a file, a folder or a data set on the hub. Raises ConfigError for one that cannot be read."""
    table = read_whole(source, wanted)
    names = table.column_names
    for column in wanted:
        if column not in names:
            raise ConfigError(
                f"{source}: no column {column!r}; it has {', '.join(names)}.{did_you_mean(column, names)} "
                "Set data.columns to columns that are there"
            )
        if names.count(column) > 1:
            raise ConfigError(f"{source}: two columns are called {column!r}; expected one of each, rename the other")
    if not table.num_rows:
        raise ConfigError(f"{source}: there are no rows; expected at least two, one of them to validate: fill the file")
    return table.select(wanted)


def read_whole(source: str, wanted: list[str]) -> pyarrow.Table:
    path = Path(source).expanduser()
    if source.startswith(HUB) or path.is_dir():
        return read_dataset(source)
    check_file(source, path)
    if path.suffix in DELIMITERS:
        return read_csv(source, path, wanted)
    if path.suffix == ".json" and begins_with(path, b"["):
        return read_list(source, path)
    return read_table(source)


def check_file(source: str, path: Path) -> None:
    """Raise ConfigError for a file that is missing, empty, of another kind, too large for the memory, or not text."""
    if not path.is_file():
        near = did_you_mean(path.name, [file.name for file in path.absolute().parent.glob("*")])
        raise ConfigError(
            f"{source}: no such file.{near} Expected {', '.join(SUFFIXES)}, a folder of a data set, or {HUB}<org>/<name>"
        )
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{source}: the name ends in {path.suffix!r}; expected {', '.join(SUFFIXES)}")
    size, free = path.stat().st_size, psutil.virtual_memory().available
    if not size:
        raise ConfigError(f"{source}: the file is empty; expected rows with a header, or one JSON object a line")
    if size * TIMES > free:
        raise ConfigError(
            f"{source}: {size / 1e9:.1f} GB, and reading takes some {TIMES} times as much memory, of which {free / 1e9:.1f} GB are "
            "free; cut it into several files and convert them one at a time, or sample from it"
        )
    if path.suffix != ".parquet" and b"\0" in head(path):
        raise ConfigError(
            f"{source}: it holds zero bytes, so it is binary and not {path.suffix}; export it as UTF-8 text, or use parquet"
        )


def head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(HEAD)


def begins_with(path: Path, mark: bytes) -> bool:
    return head(path).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(mark)


def read_csv(source: str, path: Path, wanted: list[str]) -> pyarrow.Table:
    """Every wanted column as text: 007 and 1.50 are answers as they stand."""
    options = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(wanted, pyarrow.string()), strings_can_be_null=False
    )
    layout = pyarrow.csv.ParseOptions(delimiter=DELIMITERS[path.suffix], newlines_in_values=True)
    try:
        return pyarrow.csv.read_csv(path, parse_options=layout, convert_options=options)
    except (pyarrow.ArrowException, ValueError) as error:
        raise ConfigError(
            f"{source}: cannot be read as {path.suffix[1:]}: {error}; expected UTF-8 with a header and as many fields in every row: "
            "quote texts that hold the separator"
        ) from None


def read_list(source: str, path: Path) -> pyarrow.Table:
    """A JSON file that is one list of objects."""
    try:
        return pyarrow.Table.from_pylist(json.loads(path.read_text(encoding="utf-8-sig")))
    except (ValueError, AttributeError, TypeError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{source}: cannot be read as a list of objects: {error}; expected [{{…}}, …], or one object a line"
        ) from None


def read_dataset(source: str) -> pyarrow.Table:
    """A Hugging Face data set: a folder, or ``hf://org/name[/configuration][:split]``."""
    import datasets  # heavy: only where one is named

    name, _, split = source.removeprefix(HUB).partition(":")
    try:
        if not source.startswith(HUB):
            found: Any = datasets.load_from_disk(source)
            found = found["train"] if isinstance(found, datasets.DatasetDict) else found
        else:
            parts = name.split("/")
            found = datasets.load_dataset("/".join(parts[:2]), *parts[2:3], split=split or "train")
    except Exception as error:  # of many kinds, by what is wrong: no such data set, no network, no such split
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"{source}: cannot be loaded: {said}; expected a folder of Dataset.save_to_disk, or "
            f"{HUB}<org>/<name>[/<configuration>][:<split>] that this machine may download"
        ) from None
    return found.with_format("arrow")[:]
