"""GSM8K's preparation and the check of its rewards, on data made here."""

import json
import random
import runpy
from pathlib import Path

import pyarrow.parquet
import pytest

from marl.data.rows import check_files

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def preprocess():
    return runpy.run_path(str(EXAMPLES / "data_preprocess" / "gsm8k.py"))["main"]


def problem(number: random.Random) -> dict[str, str]:
    a, b = number.randint(2, 3000), number.randint(2, 3000)
    return {
        "question": f"Tom has {a} apples and eats {b}\u2028and then? How many are left?",
        "answer": f"He has {a} - {b} = <<{a}-{b}={a - b}>>{a - b} apples left.\n#### {a - b:,}",
    }


def write_jsonl(folder: Path, rows: int = 60, **changes) -> Path:
    number = random.Random(0)
    for split in ("train", "test"):
        lines = [problem(number) for _ in range(rows)]
        lines[3] |= changes
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def prepared(tmp_path, preprocess):
    def prepare(*arguments: str, **changes) -> Path:
        source = write_jsonl(tmp_path, **changes)
        preprocess(["--local_dataset_path", str(source), "--local_save_dir", str(tmp_path / "out"), *arguments])
        return tmp_path / "out"

    return prepare


def test_rows_have_verls_columns(prepared):
    folder = prepared("--instruction", "Mind the sign.")
    for split in ("train", "test"):
        file = folder / f"{split}.parquet"
        check_files(str(file), "prompt", ["agent_0"])
        rows = pyarrow.parquet.read_table(file).to_pylist()
        assert len(rows) == 60 and [row["extra_info"]["index"] for row in rows] == list(range(60))
    row, (asked, answer) = rows[0], (rows[0]["extra_info"][key] for key in ("question", "answer"))
    assert row["prompt"] == [{"role": "user", "content": f"{asked} Mind the sign."}]
    assert (row["data_source"], row["ability"], row["extra_info"]["split"]) == ("openai/gsm8k", "math", "test")
    assert row["reward_model"] == {"style": "rule", "ground_truth": answer.rpartition("#### ")[2].replace(",", "")}
    assert {len(row["reward_model"]["ground_truth"]) for row in rows} > {3, 4}
    assert any(row["reward_model"]["ground_truth"].startswith("-") for row in rows)


def test_the_instruction_is_verls_where_none_is_given(prepared):
    rows = pyarrow.parquet.read_table(prepared() / "test.parquet").to_pylist()
    assert rows[0]["prompt"][0]["content"].endswith('think step by step and output the final answer after "####".')


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"answer": "She has 7."}, "train, row 3: the answer ends in 'She has 7.'; expected '#### number'"),
        ({"answer": "#### 7\nor so"}, "train, row 3"),
        ({"answer": "#### seven"}, "train, row 3"),
        ({"answer": None}, "train, row 3: answer is None; expected a text"),
        ({"question": 5}, "train, row 3: question is 5"),
    ],
)
def test_a_row_without_a_number_is_named(prepared, changes, said):
    with pytest.raises(ValueError) as caught:
        prepared(**changes)
    assert said in str(caught.value)


def test_a_folder_that_is_not_there_is_named(preprocess, tmp_path):
    with pytest.raises(FileNotFoundError, match="--local_dataset_path=/nowhere"):
        preprocess(["--local_dataset_path", "/nowhere", "--local_dir", str(tmp_path)])


def test_the_hub_is_asked_by_its_name(preprocess, tmp_path, monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options["split"]))
        return [problem(random.Random(1))]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    preprocess(["--local_save_dir", str(tmp_path)])
    assert asked == [(("openai/gsm8k", "main"), "train"), (("openai/gsm8k", "main"), "test")]
    assert pyarrow.parquet.read_table(tmp_path / "test.parquet").num_rows == 1


@pytest.mark.slow
def test_every_solution_scores_1_and_every_damaged_one_0(prepared, capsys):
    check = runpy.run_path(str(EXAMPLES / "check_gsm8k_rewards.py"))["main"]
    assert check([str(prepared() / "test.parquet"), "--processes", "1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "solutions" in line]
    assert [line.split()[0] for line in lines] == ["strict", "flexible", "in", "mathematics", "math-verify"]
    assert all("solutions 60 of 60, damaged 0 of 50" in line for line in lines), lines
