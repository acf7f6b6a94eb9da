"""``data.columns``: CSV, JSON, parquet and Hugging Face data become verl's rows, with a split that is made and recorded.

A question and an answer are the texts that stand in the file: 007 and 1.50 stay what they are.
"""

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

from marl.config.errors import ConfigError, shown
from marl.config.identity import content_of, digest
from marl.config.sources import Source
from marl.data.rows import BadRows, check_messages, file_list, question_of
from marl.data.tables import DELIMITERS, HUB, read
from marl.utils.manifest import replace_text
from marl.utils.near import did_you_mean
from marl.utils.numbers import Number

REQUIRED, OPTIONAL = ("prompt", "answer"), ("system", "data_source")
VAL_SHARE = Number(0, 0.9, above=True)
RECORD, CONVERTED = "split.json", ("train.parquet", "validation.parquet")
VERSION = 4
"""Bump it when the same settings would produce different rows."""
LAST_HASHES = re.compile(r"####[ \t]*([^\s#][^\n#]*)\Z")
"""Elsewhere they begin a headline."""
Row = dict[str, Any]


def use_columns(config: Any) -> None:
    """Put verl's rows in the place of a user's: ``data.train_files`` and ``data.val_files`` then name converted files."""
    data = config.data
    if not OmegaConf.is_dict(data):
        return  # the check of values names it
    if OmegaConf.select(config, "method.source") is Source.episodes:
        data.columns = None  # of the tasks that were played; a dump of their episodes has columns of its own
    if data.get("columns") is None:
        return must_be_converted(data)
    columns, train = columns_of(config), named(data, "train_files")
    if all(Path(file).name in CONVERTED and (Path(file).parent / RECORD).is_file() for file in train):
        return  # a run that is prepared again
    val = named(data, "val_files") if data.val_files is not None else []
    folder = convert(columns, train, val, float(data.val_share))
    with open_dict(config):
        data.train_files, data.val_files = (str(folder / name) for name in CONVERTED)


def must_be_converted(data: Any) -> None:
    """Raise ConfigError for files that only ``data.columns`` can read."""
    for key in ("train_files", "val_files"):
        for file in named(data, key) if data[key] is not None else []:
            if file.startswith(HUB) or Path(file).suffix in DELIMITERS or Path(file).is_dir():
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
    given, roles = config.data.columns, (*REQUIRED, *OPTIONAL)
    problem = "" if OmegaConf.is_dict(given) else "no columns"
    for role, column in given.items() if not problem else ():
        if role not in roles:
            problem = f"data.columns.{role}={column} is no role.{did_you_mean(str(role), roles)}"
        elif not isinstance(column, str) or not column:
            problem = f"data.columns.{role}={column} is not the name of a column"
    for role in REQUIRED if not problem else ():
        problem = problem or (f"no {role}" if role not in given else "")
    if not problem and len(set(given.values())) < len(given):
        problem = "one column is named twice"
    if problem:
        raise ConfigError(
            f"data.columns={given}: {problem}; expected {{prompt: <column>, answer: <column>}}, and system or data_source where there "
            "are such columns"
        )
    if not VAL_SHARE.takes(config.data.val_share):
        raise ConfigError(f"data.val_share={config.data.val_share}: {VAL_SHARE}")
    return {str(role): str(column) for role, column in given.items()}


def convert(columns: Mapping[str, str], train: Sequence[str], val: Sequence[str], share: float) -> Path:
    """The folder of the converted rows, made once for the same files and settings."""
    sources = {file: content(file) for file in (*train, *val)}
    settings = {"columns": dict(columns), "val_share": None if val else share, "version": VERSION}
    files = {"train": train, "validation": val}
    parts = {part: [(source_of(file), sources[file]) for file in of] for part, of in files.items()}
    key = digest(json.dumps({**parts, **settings}, sort_keys=True).encode()).removeprefix("sha256:")[:16]
    folder = Path(os.environ.get("MARL_CACHE", "outputs/cache")) / "data" / key
    if (folder / RECORD).is_file():
        return folder
    rows, held_out = ([row for file in of for row in rows_of(file, columns)] for of in files.values())
    if not val:
        rows, held_out = split(rows, share)
    record = {"files": sources, **settings, "train": len(rows), "validation": len(held_out)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in (("train", rows), ("validation", held_out)):
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
    there = not file.startswith(HUB) and Path(file).expanduser().exists()
    return content_of(file) if there else file


def source_of(file: str) -> str:
    """The data source of rows that name none: mathematical equality scores it."""
    return f"own/{Path(file.removeprefix(HUB)).stem}"


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


def rows_of(file: str, columns: Mapping[str, str]) -> list[Row]:
    """verl's rows of a file. Raises ConfigError for values that cannot be used."""
    bad, rows = BadRows(file), list[Row]()
    for place, values in read(file, list(columns.values()), bad):
        try:
            rows.append(row_of({role: values[column] for role, column in columns.items()}, columns, place))
        except ConfigError as error:
            bad.add(error)
        else:
            rows[-1]["data_source"] = rows[-1]["data_source"] or source_of(file)
            rows[-1]["extra_info"] = {"index": len(rows) - 1}
    bad.refuse()
    return rows


def row_of(values: Mapping[str, Any], columns: Mapping[str, str], where: str) -> Row:
    prompt, at = values["prompt"], f"{where}, column {columns['prompt']!r}"
    if isinstance(prompt, list):
        check_messages(prompt, at)
    elif not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(
            f"{at} is {shown(prompt)}; expected a text, or a list of messages: write one, or remove the row"
        )
    else:
        prompt = [{"role": "user", "content": prompt}]
    if values.get("system"):
        prompt = [{"role": "system", "content": str(values["system"])}, *prompt]
    truth = {"style": "rule", "ground_truth": answer_of(values["answer"], f"{where}, column {columns['answer']!r}")}
    return {
        "data_source": str(values.get("data_source") or ""),
        "prompt": prompt,
        "ability": "own",
        "reward_model": truth,
    }


def answer_of(value: Any, where: str) -> str:
    """An answer without blanks around it; of a solution that ends in ``#### answer``, the answer."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} is {shown(value)}; expected a text or a number: write one, or remove the row")
    text = value.strip()
    found = LAST_HASHES.search(text)
    return found[1] if found else text
