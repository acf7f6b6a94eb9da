"""A user's tables: CSV, JSON, parquet and Hugging Face data sets, row by row as the texts that stand in them."""

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import psutil
import pyarrow

from marl.config.errors import ConfigError, shown
from marl.data.rows import BadRows, read_table
from marl.utils.near import did_you_mean

HUB = "hf://"
DELIMITERS = {".csv": ",;\t|", ".tsv": "\t,;|"}
"""Tried in this order: the header shows which one separates the wanted columns."""
SUFFIXES = (*DELIMITERS, ".jsonl", ".json", ".parquet")
TIMES = 4
"""Memory that reading takes, in sizes of the file."""
HEAD = 1 << 16
MIDNIGHT = " 00:00:00"
"""Time of day that pandas adds to a date."""
SEPARATORS = re.compile(r"[\s,]*")
AS_ROWS = "expected [{…}, …], or one object a line; pandas writes it by to_json(file, orient='records', lines=True)"
Rows = Iterator[tuple[str, dict[str, Any]]]
"""Rows with their places: lines as an editor counts them, or rows as pandas does."""

csv.field_size_limit(sys.maxsize)  # questions may be longer than the 131,072 characters that it allows


def read(source: str, wanted: Sequence[str], bad: BadRows) -> Rows:
    """The wanted columns of a file, a folder or a data set on the hub; rows that cannot be read go to ``bad``. Raises ConfigError
    for a source that cannot be read."""
    path, empty = Path(source).expanduser(), True
    if source.startswith(HUB) or path.is_dir():
        rows = table_rows(source, read_dataset(source), wanted)
    elif must_be_readable(source, path) == ".parquet":
        rows = table_rows(source, read_table(source), wanted)
    else:
        reader = csv_rows if path.suffix in DELIMITERS else json_rows
        rows = reader(path, text_of(source, path), wanted, bad)
    for place, row in rows:
        empty = False
        yield place, row
    if empty and not bad.count:
        raise ConfigError(f"{source}: there are no rows; expected at least two, one of them to validate: fill the file")


def must_be_readable(source: str, path: Path) -> str:
    """The kind of a file. Raises ConfigError for one that is missing, empty, of another kind, or too large for the memory."""
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
    return path.suffix


def text_of(source: str, path: Path) -> str:
    """A file's text, in UTF-8, or in UTF-16 by its mark: Excel's "Unicode text". Raises ConfigError with the line of other bytes."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return content.decode("utf-16")
        if b"\0" in content[:HEAD]:
            raise ConfigError(
                f"{source}: it holds zero bytes, so it is binary and not {path.suffix}; export it as UTF-8 text, or use parquet"
            )
        return content.decode()
    except UnicodeDecodeError as error:
        byte, line = content[error.start : error.start + 1], content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{source}, line {line}: byte 0x{byte.hex()} is not {error.encoding.upper()} (in Windows-1252: "
            f"{byte.decode('cp1252', 'replace')!r}); expected UTF-8: in Excel save as 'CSV UTF-8', or run: "
            f"iconv -f WINDOWS-1252 -t UTF-8 {path} > utf8{path.suffix}"
        ) from None


def check_columns(source: object, wanted: Sequence[str], names: Sequence[str]) -> None:
    for column in wanted:
        if column not in names:
            raise ConfigError(
                f"{source}: no column {column!r}; it has {', '.join(names)}.{did_you_mean(column, names)} "
                "Set data.columns to columns that are there"
            )
        if names.count(column) > 1:
            raise ConfigError(f"{source}: two columns are called {column!r}; expected one of each, rename the other")


def csv_rows(path: Path, text: str, wanted: Sequence[str], bad: BadRows) -> Rows:
    """Every column as text. Empty rows, which spreadsheets leave at the end, are none."""
    delimiter, names = layout_of(path, text, wanted)
    check_columns(path, wanted, names)
    where = {column: names.index(column) for column in wanted}
    lines = list(io.StringIO(text, newline=""))
    reader = csv_reader(text, delimiter)
    header_in(reader)
    while True:
        start = reader.line_num
        place = f"line {start + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            bad.add(f"{place}: {unquoted(str(error), path, ''.join(lines[start : reader.line_num]))}")
            return  # where the next row begins is unknown
        raw = "".join(lines[start : reader.line_num])
        if cells is None:
            return
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(names):
            bad.add(
                f"{place} has {len(cells)} fields, the header {len(names)}; expected as many: quote texts that hold {delimiter!r}"
            )
        elif '\\"' in "".join(cells) and '\\""' not in raw:
            bad.add(f"{place}: {unquoted('', path, raw)}")
        else:
            yield place, {column: cells[index] for column, index in where.items()}


def csv_reader(text: str, delimiter: str) -> Any:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=True)


def layout_of(path: Path, text: str, wanted: Sequence[str]) -> tuple[str, list[str]]:
    """The delimiter that separates the wanted columns, or else most columns, and the names of all, without blanks around them."""
    found: dict[str, list[str]] = {}
    for delimiter in DELIMITERS[path.suffix]:
        try:
            found[delimiter] = header_in(csv_reader(text, delimiter))
        except csv.Error as error:
            problem = unquoted(str(error), path, "")
    if not found:
        raise ConfigError(f"{path}, line 1: {problem}")
    delimiter = max(found, key=lambda one: (set(wanted) <= set(found[one]), len(found[one])))
    return delimiter, found[delimiter]


def header_in(reader: Iterator[list[str]]) -> list[str]:
    """The first row, but for empty ones and Excel's ``sep=;``."""
    rows = ([cell.strip() for cell in cells] for cells in reader)
    return next((names for names in rows if any(names) and not names[0].lower().startswith("sep=")), [])


def unquoted(error: str, path: Path, line: str) -> str:
    """A sentence on quotes that do not enclose a field."""
    if '\\"' in line:
        return (
            r'a quote is escaped by a backslash (\"), where CSV doubles it (""); expected doubled quotes: write the file again by '
            rf'python -c "import pandas; pandas.read_csv({str(path)!r}, escapechar=chr(92), dtype=str, keep_default_na=False)'
            rf'.to_csv({f"doubled_{path.name}"!r}, index=False)"'
        )
    if "end of data" in error:
        return f"{shown(line.strip())}: a quote that opens here is never closed; expected one: close it, or double it where it is a text's own"
    return f'{shown(line.strip())}: {error}; expected quotes around whole fields: double those inside a text, as in "a ""word"""'


def json_rows(path: Path, text: str, wanted: Sequence[str], bad: BadRows) -> Rows:
    """Numbers as they are written: 1.50, and 9007199254740993, which no float holds."""
    names: dict[str, None] = {}
    for place, row in json_values(path, text, wanted, bad):
        if not isinstance(row, dict):
            bad.add(f"{place} is {shown(row)}; expected an object {{{wanted[0]!r}: …}}")
            continue
        names.update(dict.fromkeys(row))
        values = {column: as_text(row.get(column)) for column in wanted}
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            bad.add(f"{place} holds half a character, {error.object[error.start]!r}; expected whole ones: remove it")
        else:
            yield place, values
    if names:
        check_columns(path, wanted, list(names))


def json_values(path: Path, text: str, wanted: Sequence[str], bad: BadRows) -> Iterator[tuple[str, Any]]:
    """The values of a JSON list, or those of its lines, with their places."""
    if text.lstrip().startswith("["):
        yield from listed(path, text)
    elif path.suffix == ".json" and (whole := one_object(path, text, wanted)):
        yield "line 1", whole
    else:
        for number, line in enumerate(io.StringIO(text), 1):
            try:
                if line.strip():
                    yield f"line {number}", DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                bad.add(
                    f"line {number}: {shown(line.strip())} is not JSON: {reason(error)}; expected one object a line, as jq -c . {path} writes them"
                )


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names if len(set(names)) < len(names) else ():
        if names.count(name) > 1:
            raise ValueError(f"two columns are called {name!r}")
    return dict(pairs)


DECODER = json.JSONDecoder(parse_float=str, parse_int=str, object_pairs_hook=unique)


def reason(error: Exception) -> str:
    where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    return f"{getattr(error, 'msg', None) or error}{where}"


def one_object(path: Path, text: str, wanted: Sequence[str]) -> dict[str, Any] | None:
    """A file's one object, where it is a row; None where each line is one. Raises ConfigError for an object of columns."""
    try:
        whole = DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(whole, dict):
        return None
    if any(column not in whole or isinstance(whole[column], dict) for column in wanted):
        raise ConfigError(f"{path}: it is one object, of {shown(list(whole))}, and no rows; {AS_ROWS}")
    return whole


def listed(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The values of a JSON list, one by one for their lines."""
    line, number, counted, at = 1, 0, 0, after(text, text.index("[") + 1)
    while not text.startswith("]", at):
        line, number, counted = line + text.count("\n", counted, at), number + 1, at
        try:
            value, end = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            place = getattr(error, "lineno", line)
            raise ConfigError(f"{path}, line {place}: not JSON: {reason(error)}; {AS_ROWS}") from None
        yield f"line {line} (object {number})", value
        at = after(text, end)
    if rest := text[at + 1 :].strip():
        raise ConfigError(f"{path}: after the list stands {shown(rest)}; {AS_ROWS}")


def after(text: str, at: int) -> int:
    """Where the next value of a list begins, or its end."""
    found = SEPARATORS.match(text, at)
    return found.end() if found else at


def table_rows(source: str, table: pyarrow.Table, wanted: Sequence[str]) -> Rows:
    labels = label_names(table)
    table = table.rename_columns([name.strip() for name in table.column_names])
    check_columns(source, wanted, table.column_names)
    columns = {name: texts_of(table.column(name), labels.get(name)) for name in wanted}
    for number in range(table.num_rows):
        yield f"row {number}", {name: values[number] for name, values in columns.items()}


def texts_of(column: pyarrow.ChunkedArray, labels: Sequence[str] | None) -> list[Any]:
    """A column's values as texts."""
    if labels is not None and pyarrow.types.is_integer(column.type):
        return [None if value is None or value < 0 else labels[value] for value in column.to_pylist()]
    if pyarrow.types.is_floating(column.type):  # of their own width: .1 of 32 bits is no .10000000149
        values = column.to_numpy()
        return [numpy.format_float_positional(v, trim="-") if numpy.isfinite(v) else float(v) for v in values]
    texts = [as_text(value) for value in column.to_pylist()]
    if pyarrow.types.is_timestamp(column.type) and all(text is None or text.endswith(MIDNIGHT) for text in texts):
        return [text and text.removesuffix(MIDNIGHT) for text in texts]
    return texts


def as_text(value: Any) -> Any:
    """A number with all its digits, a date, and ``true`` as JSON writes it; anything else stays."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value) if isinstance(value, int | date | time) else value


def label_names(table: pyarrow.Table) -> dict[str, list[str]]:
    """The names of the integers in columns of classes, which the ``datasets`` library notes in a table."""
    noted = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    features = noted.get("info", {}).get("features", {})
    return {name: kind["names"] for name, kind in features.items() if isinstance(kind, dict) and "names" in kind}


def read_dataset(source: str) -> pyarrow.Table:
    """A Hugging Face data set: a folder, or ``hf://org/name[/configuration][:split]``."""
    import datasets  # heavy: only where one is named

    name, _, split = source.removeprefix(HUB).partition(":")
    try:
        if not source.startswith(HUB):
            found: Any = datasets.load_from_disk(source)
            if isinstance(found, datasets.DatasetDict):
                if "train" not in found:
                    raise ValueError(
                        f"its splits are {', '.join(found)}: name the folder of one, {source}/{next(iter(found))}"
                    )
                found = found["train"]
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
