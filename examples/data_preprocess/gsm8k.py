"""GSM8K as parquet files with verl's columns.

From the hub:        python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
From local files:    … --local_dataset_path folder, which holds train.jsonl and test.jsonl with ``question`` and ``answer``
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

SOURCE = "openai/gsm8k"
SPLITS = ("train", "test")
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
LAST_LINE = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")


def read(split: str, folder: Path | None) -> list[dict[str, Any]]:
    """The rows of a split: of ``<split>.jsonl``, of a data set that lies in the folder, or from the hub."""
    file = folder / f"{split}.jsonl" if folder else None
    if file is not None and file.is_file():
        with open(file, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(
            f"--local_dataset_path={folder}: no such folder; expected train.jsonl and test.jsonl in it"
        )
    import datasets

    return list(datasets.load_dataset(str(folder) if folder else SOURCE, "main", split=split))


def ground_truth(answer: str, where: str) -> str:
    """The number behind ``####``, without thousands separators."""
    found = LAST_LINE.search(answer)
    if found is None:
        raise ValueError(
            f"{where}: the answer ends in {answer[-60:]!r}; expected '#### number' at its end. Mend the row"
        )
    return found[1].replace(",", "")


def to_row(row: Mapping[str, Any], split: str, index: int, instruction: str) -> dict[str, Any]:
    where = f"{split}, row {index}"
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"{where}: {key} is {row.get(key)!r}; expected a text")
    prompt = f"{row['question']} {instruction}".strip()
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth(row["answer"], where)},
        "extra_info": {"split": split, "index": index, "answer": row["answer"], "question": row["question"]},
    }


def write(rows: Iterable[Mapping[str, Any]], split: str, instruction: str, folder: Path) -> Path:
    table = pyarrow.Table.from_pylist([to_row(row, split, index, instruction) for index, row in enumerate(rows)])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{split}.parquet"
    pyarrow.parquet.write_table(table, file)
    print(f"{file}: {table.num_rows} rows")
    return file


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # verl's scripts have both names
    parser.add_argument(
        "--local_save_dir", "--local_dir", type=Path, default="~/data/gsm8k", help="where the parquet files go"
    )
    parser.add_argument("--local_dataset_path", type=Path, help="a folder to read instead of the hub")
    parser.add_argument("--instruction", default=INSTRUCTION, help="what follows every question")
    args = parser.parse_args(argv)
    source = args.local_dataset_path.expanduser() if args.local_dataset_path else None
    for split in SPLITS:
        write(read(split, source), split, args.instruction, args.local_save_dir.expanduser())


if __name__ == "__main__":
    main()
