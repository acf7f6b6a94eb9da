"""``data.columns``: rows of a user's own files, as verl's columns, with a split that is made and recorded."""

import hashlib
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from omegaconf import OmegaConf, open_dict

from marl.config.bounds import check_number
from marl.config.dataset_rows import BadRows, check_messages, file_list, question_of, shown
from marl.config.errors import ConfigError
from marl.config.identity import content_of, digest
from marl.config.sources import Source
from marl.preflight import own_tables
from marl.utils.manifest import replace_text
from marl.utils.near import did_you_mean

REQUIRED, OPTIONAL = ("prompt", "answer"), ("system", "data_source")
RECORD = "split.json"
CONVERTED = ("train.parquet", "validation.parquet")
VERSION = 4
"""Bump it when the same settings would produce different rows."""
SOURCE = "own/"
"""Begins a data source without a column of its own: mathematical equality scores it."""
LAST_HASHES = re.compile(r"####[ \t]*([^\s#][^\n#]*)\Z")
"""Elsewhere they begin a headline."""
Row = dict[str, Any]


def use_columns(config: Any) -> None:
    """Put verl's rows in the place of a user's: ``data.train_files`` and ``data.val_files`` then name converted files."""
    data = config.data
    if not OmegaConf.is_dict(data):
        return  # the check of keys names it
    if OmegaConf.select(config, "method.source") is Source.episodes:
        data.columns = None  # of the tasks that were played; a dump of their episodes has columns of its own
    if data.get("columns") is None:
        return must_be_converted(data)
    columns, train = columns_of(config), named(data, "train_files")
    if all(is_converted(Path(file)) for file in train):  # of a run that is prepared again
        return
    val = named(data, "val_files") if data.val_files is not None else []
    folder = convert(columns, train, val, float(data.val_share))
    with open_dict(config):
        data.train_files, data.val_files = str(folder / "train.parquet"), str(folder / "validation.parquet")


def is_converted(file: Path) -> bool:
    return file.name in CONVERTED and (file.parent / RECORD).is_file()


def must_be_converted(data: Any) -> None:
    """Raise ConfigError for files that only ``data.columns`` can read."""
    for key in ("train_files", "val_files"):
        for file in named(data, key) if data[key] is not None else []:
            if file.startswith(own_tables.HUB) or Path(file).suffix in own_tables.DELIMITERS or Path(file).is_dir():
                raise ConfigError(
                    f"data.{key}={file}: its columns are unknown; set data.columns, as in 'data.columns={{prompt: question, "
                    "answer: a}' (docs/your-data.md)"
                )


def named(data: Any, key: str) -> list[str]:
    files = file_list(data[key]) if isinstance(data[key], str) or OmegaConf.is_list(data[key]) else []
    if not files or not all(isinstance(file, str) and file.strip() for file in files):
        raise ConfigError(f"data.{key}={data[key]}: expected a file or a list of files, as in data.{key}=questions.csv")
    return files


def columns_of(config: Any) -> dict[str, str]:
    """The role of each of the user's columns. Raises ConfigError where that is not said, or not possible."""
    given, known = config.data.columns, (*REQUIRED, *OPTIONAL)
    expected = "expected {prompt: <column>, answer: <column>}, and system or data_source where there are such columns"
    if not OmegaConf.is_dict(given):
        raise ConfigError(f"data.columns={given}: {expected}")
    for key, column in given.items():
        if key not in known:
            raise ConfigError(f"data.columns.{key}={column}: {expected}.{did_you_mean(str(key), known)}")
        if not isinstance(column, str) or not column:
            raise ConfigError(f"data.columns.{key}={column}: expected the name of a column")
    for key in REQUIRED:
        if key not in given:
            raise ConfigError(f"data.columns={given}: no {key}; {expected}")
    if len(set(given.values())) < len(given):
        raise ConfigError(f"data.columns={given}: one column is named twice; {expected}")
    check_number(config, "data.val_share")
    return {str(key): str(column) for key, column in given.items()}


def convert(columns: Mapping[str, str], train: Sequence[str], val: Sequence[str], share: float) -> Path:
    """The folder of the converted rows, made once for the same files and settings."""
    sources = {file: content(file) for file in (*train, *val)}
    settings = {"columns": dict(columns), "val_share": None if val else share, "version": VERSION}
    parts = {
        part: [(source_of(file), sources[file]) for file in files]
        for part, files in (("train", train), ("validation", val))
    }
    made_of = {**parts, **settings}
    key = digest(json.dumps(made_of, sort_keys=True).encode()).removeprefix("sha256:")[:16]
    folder = Path(os.environ.get("MARL_CACHE", "outputs/cache")) / "data" / key
    if (folder / RECORD).is_file():
        return folder
    rows = [row for file in train for row in rows_of(file, columns)]
    validation = [row for file in val for row in rows_of(file, columns)]
    if not val:
        rows, validation = split(rows, share)
    record = {"files": sources, **settings, "train": len(rows), "validation": len(validation)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in (("train", rows), ("validation", validation)):
            write(part, name, folder / f"{name}.parquet")
        replace_text(folder / RECORD, json.dumps(record, indent=1) + "\n")
    except OSError as error:  # pyarrow's of a full disk names no file
        raise ConfigError(
            f"{folder}: the rows of data.columns cannot be written: {error.strerror or error}; set the environment variable MARL_CACHE to a "
            "folder with space that can be written"
        ) from None
    return folder


def content(file: str) -> str:
    """Digest of a file or folder; the name itself, of a data set on the hub or a file that is not there."""
    there = not file.startswith(own_tables.HUB) and Path(file).expanduser().exists()
    return content_of(file) if there else file


def source_of(file: str) -> str:
    """The data source of rows that name none."""
    return f"{SOURCE}{Path(file.removeprefix(own_tables.HUB)).stem}"


def rows_of(file: str, columns: Mapping[str, str]) -> list[Row]:
    """verl's rows of a file. Raises ConfigError for values that cannot be used."""
    bad, rows, default = BadRows(file), list[Row](), source_of(file)
    for number, (place, found) in enumerate(own_tables.read(file, list(columns.values()), bad)):
        values = {key: found[column] for key, column in columns.items()}
        try:
            rows.append(row_of(values, columns, place, default, number))
        except ConfigError as error:
            bad.add(error)
    bad.refuse()
    return rows


def row_of(values: Mapping[str, Any], columns: Mapping[str, str], where: str, default: str, number: int) -> Row:
    prompt = messages_of(values["prompt"], f"{where}, column {columns['prompt']!r}")
    if values.get("system"):
        prompt = [{"role": "system", "content": str(values["system"])}, *prompt]
    truth = answer_of(values["answer"], f"{where}, column {columns['answer']!r}")
    return {
        "data_source": str(values.get("data_source") or default),
        "prompt": prompt,
        "ability": "own",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": number},
    }


def messages_of(value: Any, where: str) -> list[dict[str, str]]:
    """A question as a message; messages stay."""
    if isinstance(value, list):
        check_messages(value, where)
        return value
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{where} is {shown(value)}; expected a text, or a list of messages: write one, or remove the row"
        )
    return [{"role": "user", "content": value}]


def answer_of(value: Any, where: str) -> str:
    """An answer without blanks around it; of a solution that ends in ``#### answer``, the answer."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} is {shown(value)}; expected a text or a number: write one, or remove the row")
    text = value.strip()
    found = LAST_HASHES.search(text)
    return found[1] if found else text


def split(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Rows to train and to validate, the same for every seed of a run; those with the same question, up to blanks and case, stay
    together, so that none is known from training."""
    asked = [question_of(row) for row in rows]
    questions = sorted(set(asked), key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(questions) < 2:
        raise ConfigError(
            f"data.columns: only {len(questions)} distinct question; expected at least two, one for validation, or set data.val_files"
        )
    random.Random("split").shuffle(questions)
    held_out = set(questions[: min(max(1, round(share * len(questions))), len(questions) - 1)])
    parts: tuple[list[Row], list[Row]] = [], []
    for question, row in zip(asked, rows, strict=True):
        parts[question in held_out].append(row)
    return parts


def write(rows: Sequence[Row], name: str, path: Path) -> None:
    marked = [row | {"extra_info": row["extra_info"] | {"split": name}} for row in rows]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(marked), temporary)
    os.replace(temporary, path)


def split_text(config: Any) -> str | None:
    """A line about the rows that ``data.columns`` made; None without."""
    if config.data.get("columns") is None:
        return None
    path = Path(file_list(config.data.train_files)[0]).parent / RECORD
    record = json.loads(path.read_text(encoding="utf-8"))
    files = ", ".join(Path(file).name for file in record["files"])
    return f"data: {record['train']} rows to train and {record['validation']} to validate, of {files} ({path})"
