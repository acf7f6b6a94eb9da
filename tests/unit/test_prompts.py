"""Lengths of the prompts that agents are shown first, against lengths counted by hand."""

import copy

import pyarrow.parquet
import pytest

from marl.config.errors import ConfigError
from marl.controller.chat import ChatEncoder
from marl.preflight.prepare import prepare
from marl.preflight.prompts import prompt_lengths
from marl.quickstart.model import build_tokenizer

QUESTION = [{"role": "user", "content": "Ann has 3 apples ."}]
"""5 tokens of a word each; <|user|> before and <|assistant|> after make 7."""


@pytest.fixture
def quickstart(compose_config, cold_assets):
    return lambda *overrides: compose_config(f"assets={cold_assets}", *overrides)


def test_a_row_is_as_long_as_its_longest_prompt(quickstart):
    config = quickstart("agents.alice.role='Add it up .'", "agents.carol.role='Be brief .'")
    encoders = dict.fromkeys(("alice", "carol"), ChatEncoder(build_tokenizer()))
    private = {"prompt": QUESTION, "extra_info": {"agent_prompts": {"carol": QUESTION * 3}}}
    # a role of 4 words, and of 3; a further message is <|user|> and 5 words
    assert prompt_lengths(config, encoders, [{"prompt": QUESTION}, private]) == [7 + 4, 7 + 3 + 2 * 6]
    assert prompt_lengths(config, {"alice": encoders["alice"]}, [private]) == [7 + 4], "without those of endpoints"


@pytest.fixture
def rows(quickstart, tmp_path):
    """A file of 100 rows, some of them nine times as long."""

    def rows(*long):
        row = pyarrow.parquet.read_table(quickstart().data.train_files).slice(0, 1).to_pylist()[0]
        longer = copy.deepcopy(row) | {"extra_info": None}  # no prompts of single agents
        longer["prompt"][-1]["content"] = " ".join([row["prompt"][-1]["content"]] * 9)
        table = pyarrow.Table.from_pylist([longer if i in long else row for i in range(100)])
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        return f"data.train_files={tmp_path / 'rows.parquet'}"

    return rows


def test_a_row_that_is_too_long_is_named_at_the_start(quickstart, rows, caplog):
    file = rows(2)
    prepare(quickstart(file))
    assert "rows.parquet: 1 of the first 100 rows are longer than data.max_prompt_length=40" in caplog.text
    assert "teach nothing: row 2 (" in caplog.text and "data.filter_overlong_prompts=true" in caplog.text
    caplog.clear()
    prepare(quickstart(file, "data.filter_overlong_prompts=true"))
    assert "longer than" not in caplog.text


def test_a_file_of_rows_that_are_too_long_is_refused(quickstart, rows):
    with pytest.raises(
        ConfigError, match=r"data.max_prompt_length=40: 51 of the first 100 prompts of .*rows.parquet are"
    ):
        prepare(quickstart(rows(*range(51))))
