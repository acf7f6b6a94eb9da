"""A user's own files by ``data.columns``: what is read, how it is split, and what is refused."""

import json
import re
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf, open_dict

from marl.config.errors import ConfigError
from marl.data import columns, tables
from marl.data.columns import split_text, use_columns
from marl.data.rows import check_files, question_of, warn_of_shared
from marl.preflight.prepare import prepare

ROWS = [{"question": f"What is {n} + {n}?", "a": str(2 * n)} for n in range(20)]
COLUMNS = "data.columns={prompt: question, answer: a}"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def config_of(train, val=None, columns=None, **data):
    given = {"prompt": "question", "answer": "a"} if columns is None else columns
    return OmegaConf.create(
        {"seed": 0, "data": {"columns": given, "val_share": 0.1, "train_files": train, "val_files": val} | data}
    )


def converted(*words, **settings):
    """(rows to train, rows to validate, the record) of a configuration."""
    config = config_of(*words, **settings)
    use_columns(config)
    files = Path(config.data.train_files), Path(config.data.val_files)
    rows = [pyarrow.parquet.read_table(file).to_pylist() for file in files]
    check_files([str(file) for file in files], "prompt", ["agent"])
    return *rows, json.loads((files[0].parent / "split.json").read_text())


def csv(path, rows=ROWS, sep=","):
    lines = [sep.join(rows[0]), *(sep.join(f'"{value}"' for value in row.values()) for row in rows)]
    Path(path).write_text("\n".join(lines) + "\n")
    return str(path)


def parquet(path, rows=ROWS):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def jsonl(path, rows=ROWS):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def listed(path, rows=ROWS):
    Path(path).write_text("\ufeff" + json.dumps(rows))
    return str(path)


def dataset(path, rows=ROWS):
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(path)
    return str(path)


KINDS = {
    "mine.csv": csv,
    "mine.tsv": lambda path: csv(path, sep="\t"),
    "mine.jsonl": jsonl,
    "mine.json": listed,
    "mine.parquet": parquet,
    "mine": dataset,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_rows(name):
    train, validation, record = converted(KINDS[name](name))
    rows = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in (*train, *validation)}
    assert rows == {row["question"]: row["a"] for row in ROWS}
    assert (len(train), len(validation)) == (record["train"], record["validation"]) == (18, 2)
    assert {row["data_source"] for row in train} == {"own/mine"} and {row["extra_info"]["split"] for row in train} == {
        "train"
    }


def test_a_split_is_the_same_for_every_seed_and_keeps_equal_questions_together():
    doubled = jsonl("mine.jsonl", [*ROWS, *reversed(ROWS)])
    train, validation, _ = converted(doubled)
    again, _, _ = converted(
        jsonl("other.jsonl", [*reversed(ROWS), *ROWS]), columns={"prompt": "question", "answer": "a"}
    )

    def asked(rows):
        return {row["prompt"][0]["content"] for row in rows}

    assert len(validation) == 4 and not asked(train) & asked(validation) and asked(train) == asked(again)
    once, other = config_of(doubled), config_of(doubled)
    use_columns(once)
    other.seed = 1
    use_columns(other)
    assert asked(pyarrow.parquet.read_table(other.data.train_files).to_pylist()) == asked(train)
    assert Path(other.data.val_files).parent == Path(once.data.val_files).parent, "runs over seeds have the same files"
    train, validation, _ = converted(doubled, val_share=0.9)
    assert len(asked(train)) == 2 and len(asked(validation)) == 18


def test_a_users_own_file_called_split_json_does_not_hide_theirs():
    """Only files that were converted stand beside ours."""
    file = csv("mine.csv")
    Path("split.json").write_text("{}")
    assert converted(file)[2]["train"] == 18


def test_files_of_their_own_to_validate_are_not_split(here):
    train, validation, record = converted([csv("one.csv"), csv("two.csv")], csv("val.csv", ROWS[:3]))
    assert (len(train), len(validation), record["val_share"]) == (40, 3, None)
    assert len(record["files"]) == 3 and all(digest.startswith("sha256:") for digest in record["files"].values())


def test_texts_numbers_messages_and_solutions():
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    rows = [
        {"q": said, "a": "so it is\n#### 42", "s": None, "kind": "mine"},
        {"q": [{"role": "user", "content": "2?"}], "a": "#### 7", "s": "Think.", "kind": None},
    ]
    train, validation, _ = converted(
        jsonl("mine.jsonl", rows), columns={"prompt": "q", "answer": "a", "system": "s", "data_source": "kind"}
    )
    first, second = sorted((*train, *validation), key=lambda row: row["extra_info"]["index"])
    assert first["prompt"] == said and first["reward_model"]["ground_truth"] == "42" and first["data_source"] == "mine"
    assert second["prompt"][0] == {"role": "system", "content": "Think."} and second["data_source"] == "own/mine"


def read_from(file):
    """Questions and answers of a file, in its order."""
    rows = sorted((row for part in converted(file)[:2] for row in part), key=lambda row: row["extra_info"]["index"])
    return [(row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]) for row in rows]


@pytest.mark.parametrize("name", ["mine.json", "mine.jsonl"])
def test_numbers_of_json_are_texts_as_they_stand(name):
    written = [
        "9007199254740993",
        "9" * 400,
        "0.00005",
        "1.50",
        "14.0",
        "1e3",
        "-0",
        "true",
        '"two"',
        '"2024-01-01"',
        '"007"',
        "7",
    ]
    rows = [f'{{"question": "q{number}", "a": {text}}}' for number, text in enumerate(written)]
    Path(name).write_text("[" + ",\n".join(rows) + "]" if name == "mine.json" else "\r\n".join(rows))
    assert read_from(name) == [(f"q{number}", text.strip('"')) for number, text in enumerate(written)]


COLUMN_TYPES = {
    "integers": (pyarrow.array([2**60 + 1, 7]), ["1152921504606846977", "7"]),
    "floats": (pyarrow.array([0.00005, 14.0]), ["0.00005", "14"]),
    "large floats": (pyarrow.array([1e22, 2.5]), ["1" + "0" * 22, "2.5"]),
    "narrow floats": (pyarrow.array([0.1, 1.5], pyarrow.float32()), ["0.1", "1.5"]),
    "decimals": (pyarrow.array([Decimal("1.50"), Decimal("0.00")]), ["1.50", "0.00"]),
    "dates": (pyarrow.array([date(2024, 1, 1), date(2024, 2, 1)]), ["2024-01-01", "2024-02-01"]),
    "dates of pandas": (pyarrow.array([datetime(2024, 1, 1), datetime(2024, 2, 1)]), ["2024-01-01", "2024-02-01"]),
    "times": (pyarrow.array([datetime(2024, 1, 1, 10), datetime(2024, 2, 1)]), ["2024-01-01 10:00:00", "2024-02-01 00:00:00"]),
    "truth values": (pyarrow.array([True, False]), ["true", "false"]),
    "categories": (pyarrow.array(["x", "y"]).dictionary_encode(), ["x", "y"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", COLUMN_TYPES)
def test_columns_of_parquet_are_texts(kind):
    column, texts = COLUMN_TYPES[kind]
    pyarrow.parquet.write_table(pyarrow.table({" question": ["q0", "q1"], "a": column}), "mine.parquet")
    assert read_from("mine.parquet") == [("q0", texts[0]), ("q1", texts[1])]


def test_classes_of_a_data_set_are_names():
    import datasets

    features = datasets.Features({"question": datasets.Value("string"), "a": datasets.ClassLabel(names=["no", "yes"])})
    datasets.Dataset.from_dict({"question": ["b", "c"], "a": [1, 0]}, features=features).save_to_disk("mine")
    assert read_from("mine") == [("b", "yes"), ("c", "no")]


QUOTED = '"one\nline, two",007\nb,1.50\n'
LAYOUTS = {
    "plain": f"question,a\n{QUOTED}".encode(),
    "Excel": ("\ufeffquestion,a\n" + QUOTED + ",\n,\n\n").replace("\n", "\r\n").replace("one\r", "one").encode(),
    "Excel with semicolons": f"sep=;\nquestion;a\n{QUOTED}".replace('",', '";').replace("b,", "b;").encode(),
    "Excel's Unicode text": f"question\ta\n{QUOTED}".replace('",', '"\t').replace("b,", "b\t").encode("utf-16"),
    "tabs": f"question\ta\n{QUOTED}".replace('",', '"\t').replace("b,", "b\t").encode(),
    "blanks": ' question , "a" \n"one\nline, two", "007"\nb, 1.50 \n'.replace('"a" ', '"a"').encode(),
    "an index of pandas": b',question,a\n0,"one\nline, two",007\n1,b,1.50\n',
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_of_csv_gives_the_same_rows(kind):
    Path("mine.csv").write_bytes(LAYOUTS[kind])
    assert read_from("mine.csv") == [("one\nline, two", "007"), ("b", "1.50")]


def test_all_bad_rows_are_named_at_once_by_the_lines_of_an_editor():
    lines = ["question,a", '"two', 'lines",1', "", ",2", "c,3,3", *[f"q{number}," for number in range(12)]]
    Path("mine.csv").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        use_columns(config_of("mine.csv"))
    said = str(caught.value).splitlines()
    assert said[0] == "mine.csv: 14 rows cannot be used:" and len(said) == 12 and said[-1] == "  and 4 more"
    assert said[1].startswith("  line 5, column 'question' is ''; expected a text")
    assert said[2].startswith("  line 6 has 3 fields") and said[3].startswith("  line 7, column 'a' is ''; expected")
    Path("mine.csv").write_text("\n".join(["question,a", *[f"q{number}," for number in range(3)]]))
    with pytest.raises(ConfigError) as caught:
        use_columns(config_of("mine.csv"))
    assert str(caught.value).splitlines()[1:3] == ["  line 2, column 'a' is ''", "  line 3, column 'a' is ''"]
    assert str(caught.value).count("expected") == 1


def test_rows_of_verls_columns_are_named_together_too():
    good = {"data_source": "x", "prompt": [{"role": "user", "content": "b"}], "reward_model": {"ground_truth": "4"}}
    dated = good | {"reward_model": {"ground_truth": "2024-01-01"}}
    Path("rows.jsonl").write_text("\n\n".join(json.dumps(row) for row in (dated, dated)))
    with pytest.raises(
        ConfigError, match=r"2 rows cannot be used:\n  line 1: .*2024, 1, 1.*\n  line 3: .*\n.*JSON reader"
    ):
        check_files("rows.jsonl", "prompt", ["agent"])


VARIANTS = [{"question": text, "a": "1"} for n in range(10) for text in (f"Is {n} odd?", f"is  {n} ODD? ")]


def test_variants_by_blanks_and_case_are_on_one_side():
    train, validation, _ = converted(jsonl("mine.jsonl", VARIANTS), val_share=0.5)
    digits = [{row["prompt"][0]["content"].split()[1] for row in part} for part in (train, validation)]
    assert len(train) == len(validation) == 10 and not digits[0] & digits[1]
    asked = [{"question": "b", "a": "1", "s": system} for system in "xyz"] + [{"question": "c", "a": "1", "s": "x"}]
    columns = {"prompt": "question", "answer": "a", "system": "s"}
    assert sorted(map(len, converted(jsonl("mine.jsonl", asked), columns=columns)[:2])) == [1, 3], (
        "system prompts ask nothing"
    )


def test_questions_that_are_trained_and_measured_are_counted(caplog):
    train, val = csv("train.csv", VARIANTS[::2]), csv("val.csv", [*VARIANTS[1:6:2], {"question": "new?", "a": "1"}])
    config = config_of(train, val)
    use_columns(config)
    warn_of_shared(*(check_files(config.data[key], "prompt", ["agent"]) for key in ("train_files", "val_files")))
    assert "3 of 4 rows ask what data.train_files ask too" in caplog.text and "'is 0 odd?'" in caplog.text
    private = {"extra_info": {"agent_prompts": {"a": [{"role": "user", "content": "a note"}], "b": None}}}
    row = {"prompt": [{"role": "user", "content": "b"}]}
    assert question_of(row) != question_of(row | private), "a row asks what each agent is shown"
    caplog.clear()
    warn_of_shared(["a", "b"], ["c"])
    assert not caplog.text


def test_hashes_that_end_no_text_begin_a_headline():
    texts = [
        "# Title\n#### Step 1\nfoo\n\\boxed{7}",
        "so it is\n#### 42",
        "#### Step 1\nfoo\n####   1,000 \n",
        "7 ####",
    ]
    truths = [columns.answer_of(text, "here") for text in texts]
    assert truths == [texts[0], "42", "1,000", "7 ####"]


def test_a_copy_under_another_name_is_a_source_of_its_own():
    csv("a.csv"), csv("b.csv")
    for name in ("a", "b"):
        rows, *_ = converted(f"{name}.csv")
        assert {row["data_source"] for row in rows} == {f"own/{name}"}


def test_rows_are_made_once_and_anew_where_a_file_has_changed(monkeypatch):
    file, calls = csv("mine.csv"), []
    monkeypatch.setattr(columns, "write", lambda *words, write=columns.write: calls.append(1) or write(*words))
    first = converted(file)
    assert converted(file) == first and len(calls) == 2
    csv("mine.csv", ROWS[:10])
    assert converted(file)[2]["train"] == 9 and len(calls) == 4
    config = config_of(file)
    use_columns(config)
    once = OmegaConf.to_container(config)
    use_columns(config)
    assert OmegaConf.to_container(config) == once, "a run that is prepared again"
    assert "9 rows to train and 1 to validate, of mine.csv" in split_text(config)
    config.data.columns = None
    assert split_text(config) is None


def written(name, content):
    return lambda: Path(name).write_bytes(content) and name


BAD = {
    "missing": (lambda: csv("mine.csv") and "mien.csv", ["mien.csv: no such file", "Did you mean 'mine.csv'"]),
    "empty": (lambda: Path("x.csv").touch() or "x.csv", ["x.csv: the file is empty"]),
    "only a header": (written("x.csv", b"question,a\n"), ["x.csv: there are no rows"]),
    "binary": (written("x.csv", b"question,a\n\0\x01\x02,4\n"), ["zero bytes", "binary", "use parquet"]),
    "a picture": (written("x.png", b"\x89PNG"), ["ends in '.png'", ".csv, .tsv"]),
    "another encoding": (written("x.csv", b"question,a\nb,3\n\xe9t\xe9,4\n"), ["x.csv, line 3: byte 0xe9 is not UTF-8 (in Windows-1252: 'é')", "iconv"]),
    "another column": (lambda: csv("x.csv", [{"questoin": "?", "a": "4"}]), ["no column 'question'", "questoin, a", "Did you mean 'questoin'"]),
    "double columns": (written("x.csv", b"question,a,a\nb,3,4\n"), ["two columns are called 'a'", "rename"]),
    "double columns in JSON": (written("x.jsonl", b'{"question": "b", "a": 1, "a": 2}\n'), ["x.jsonl, line 1", "two columns are called 'a'"]),
    "double columns but for blanks": (written("x.csv", b"question,a, a \nb,3,4\n"), ["two columns are called 'a'"]),
    "ragged": (written("x.csv", b"question,a\n\nb,3,4,5\n"), ["x.csv, line 3 has 4 fields, the header 2", "quote texts"]),
    "quotes behind backslashes": (written("x.csv", b'question,a\n"say \\"hi\\", twice",2\n'), ["x.csv, line 2: a quote is escaped by a backslash", "pandas.read_csv('x.csv', escapechar"]),
    "the same outside quotes": (written("x.csv", b'question,a\nb,3\nsay \\"hi\\",2\n'), ["x.csv, line 3: a quote is escaped by a backslash"]),
    "a quote that is not closed": (written("x.csv", b'question,a\n"b\nc",2\n"d,3\ne,4\n'), ["x.csv, line 4", "never closed"]),
    "words behind a quote": (written("x.csv", b'question,a\n"b" c,2\n'), ["x.csv, line 2", "expected quotes around whole fields"]),
    "no JSON": (written("x.jsonl", b"question\n"), ["x.jsonl, line 1: 'question' is not JSON", "one object a line"]),
    "no objects": (written("x.json", b"[1,\n 2]"), ["2 rows", "line 1 (object 1) is '1'\n  line 2 (object 2) is '2'", "expected an object"]),
    "a broken list": (written("x.json", b'[{"question": "b",\n "a" 1}]'), ["x.json, line 2: not JSON", "expected [{"]),
    "two lists": (written("x.json", b'[{"question": "b", "a": 1}]\n[]'), ["after the list stands '[]'"]),
    "columns of JSON": (written("x.json", b'{"question": {"0": "b"}, "a": {"0": 4}}'), ["one object", "to_json(file, orient='records'"]),
    "rows in an object": (written("x.json", b'{"data": [{"question": "b", "a": 4}]}'), ["one object, of ['data']"]),
    "a nested answer": (written("x.jsonl", b'{"question": "b", "a": ["4"]}\n'), ["x.jsonl, line 1, column 'a' is ['4']"]),
    "no number": (written("x.jsonl", b'{"question": "b", "a": NaN}\n'), ["x.jsonl, line 1, column 'a' is nan"]),
    "half a character": (written("x.jsonl", b'{"question": "\\ud83d", "a": 1}\n'), ["x.jsonl, line 1", "half a character"]),
    "a blank question": (written("x.csv", b"question,a\n  ,3\nb,4\n"), ["x.csv, line 2, column 'question'", "expected a text"]),
    "no answer": (written("x.csv", b"question,a\nc,3\nb,\n"), ["x.csv, line 3, column 'a' is ''", "text or a number"]),
    "a null of parquet": (lambda: parquet("x.parquet", [{"question": "b", "a": 1}, {"question": "c", "a": None}]), ["x.parquet, row 1, column 'a' is None"]),
    "bytes": (lambda: parquet("x.parquet", [{"question": b"b", "a": 1}]), ["x.parquet, row 0, column 'question' is b'b'"]),
    "one question": (lambda: csv("x.csv", ROWS[:1] * 3), ["only 1 distinct question", "data.val_files"]),
    "a folder of something else": (lambda: Path("folder").mkdir() or "folder", ["folder: cannot be loaded", "save_to_disk"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_files_that_cannot_be_used_are_refused_in_a_sentence(kind):
    make, said = BAD[kind]
    with pytest.raises(ConfigError) as caught:
        use_columns(config_of(make()))
    assert [part for part in said if part not in str(caught.value)] == [], caught.value
    assert (
        "expected" in str(caught.value).lower() or "set " in str(caught.value).lower() or "export" in str(caught.value)
    )


def test_a_file_that_does_not_fit_into_memory_is_refused(monkeypatch):
    file = csv("mine.csv")
    monkeypatch.setattr(
        tables.psutil, "virtual_memory", lambda: type("Memory", (), {"available": Path(file).stat().st_size})()
    )
    with pytest.raises(ConfigError, match="times as much memory.*cut it into several"):
        use_columns(config_of(file))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"columns": "question"}, ["data.columns=question", "expected {prompt:"]),
        ({"columns": {"prompt": "question"}}, ["no answer"]),
        ({"columns": {"prompt": "question", "anser": "a"}}, ["data.columns.anser=a", "Did you mean 'answer'"]),
        ({"columns": {"prompt": "a", "answer": "a"}}, ["named twice"]),
        ({"columns": {"prompt": 3, "answer": "a"}}, ["data.columns.prompt=3", "name of a column"]),
        ({"val_share": 1}, ["data.val_share=1", "at most 0.9"]),
        ({"val_share": 0}, ["data.val_share=0", "above 0"]),
        ({"train_files": 3}, ["data.train_files=3"]),
        ({"train_files": [None]}, ["data.train_files=[None]"]),
        ({"train_files": ""}, ["data.train_files=: expected a file", "as in data.train_files=questions.csv"]),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, said):
    config = config_of(csv("mine.csv"))
    with open_dict(config):
        config.data.update(settings)
    with pytest.raises(ConfigError) as caught:
        use_columns(config)
    assert [part for part in said if part not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize("file", ["mine.csv", "hf://openai/gsm8k/main", "mine"])
def test_a_file_of_unknown_columns_says_how_to_name_them(file):
    Path("mine").mkdir()
    config = config_of(file)
    config.data.columns = None
    with pytest.raises(ConfigError, match=r"set data\.columns, as in 'data\.columns=\{prompt: question"):
        use_columns(config)


def test_a_run_is_prepared_from_a_csv(compose_config, cold_assets):
    words = ["data.train_batch_size=4", "data.val_files=null", COLUMNS, "trainer.default_local_dir=x"]
    config = compose_config(f"assets={cold_assets}", f"data.train_files={csv('mine.csv')}", *words)
    setup = prepare(config)
    assert setup.config.data.columns.prompt == "question" and "18 rows to train" in split_text(setup.config)


def test_a_cache_that_cannot_be_written_is_named(monkeypatch):
    Path("file").touch()
    monkeypatch.setenv("MARL_CACHE", "file/cache")
    with pytest.raises(
        ConfigError, match=r"file/cache/data/\w+: .* Not a directory; set the environment variable MARL_CACHE"
    ):
        use_columns(config_of(csv("mine.csv")))


def test_an_error_without_words_is_named(monkeypatch):
    import datasets

    def fails(source):
        raise AssertionError

    monkeypatch.setattr(datasets, "load_from_disk", fails)
    Path("mine").mkdir()
    with pytest.raises(ConfigError, match="mine: cannot be loaded: AssertionError"):
        use_columns(config_of("mine"))


def test_the_reward_of_the_page_takes_whole_answers():
    page, names = Path(__file__).parents[2] / "docs" / "your-data.md", {}
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(code, names)

    def score(text, truth="4"):
        return names["compute_score"]("own/questions", text, truth)

    right = ["4", "it is 4", "it is 4.", "#### 4\n"]
    wrong = ["14", "it is 14", "-4", "3.4", "1/4", "4 or 5", "4.0", ""]
    assert [score(text) for text in [*right, *wrong]] == [1.0] * len(right) + [0.0] * len(wrong)
    assert score("it is New York", "New York") == score("a.b", "a.b") == 1.0 and score("acb", "a.b") == 0.0
