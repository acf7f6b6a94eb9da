"""Files that a method reads: bad ones are refused with a sentence, poor ones are counted out."""

import json
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from marl.config.errors import ConfigError
from marl.config.sources import Source
from marl.controller.method_data import read_items, within_limits
from marl.methods import METHODS
from marl.methods.examples import Example
from marl.preflight.method_files import check_answers, check_examples
from marl.report import dump
from marl.types import Turn
from tests.builders import Letters, episode
from tests.composing import compose

SPEAKERS = {"a": ["a"], "b": ["b"]}


def method(name, **options):
    cls = METHODS.get(name)
    return cls(cls.Config(name=name, **options))


@pytest.fixture
def read(tmp_path):
    def read(name, content, source=Source.rows, speakers=SPEAKERS, **options):
        path = tmp_path / "data.jsonl"
        lines = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        path.write_text(lines)
        return read_items(method(name, **options), source, [str(path)], speakers, "data.train_files")

    return read


BAD = {
    "empty": ("sft", "", ["data.jsonl", "cannot be read"]),
    "binary": ("sft", "\x00\x01", ["data.jsonl", "cannot be read"]),
    "no answer": (
        "sft",
        [{"prompt": "2", "anwser": "4"}],
        ["no column 'messages' or 'answer'", "Did you mean 'anwser'"],
    ),
    "no text": (
        "sft",
        [{"prompt": "2", "answer": "4"}, {"prompt": "2", "answer": ""}],
        ["line 2", "expected a text", "leave it out"],
    ),
    "text in place of messages": (
        "sft",
        [{"messages": "2 + 2"}],
        ["line 1: messages is '2 + 2'", "a list of messages"],
    ),
    "no role": ("sft", [{"messages": [{"content": "2"}]}], ["line 1: messages holds", "a list of messages"]),
    "no content": (
        "sft",
        [{"messages": [{"role": "user", "content": "2"}]}, {"messages": [{"role": "user", "content": None}]}],
        ["line 2: messages holds", "contents are texts"],
    ),
    "parts": (
        "dpo",
        [{"prompt": [{"role": "user", "content": [{"text": "2"}]}], "chosen": "4", "rejected": "5"}],
        ["line 1: prompt holds", "contents are texts"],
    ),
    "empty answer": (
        "sft",
        [{"messages": [{"role": "user", "content": "2"}, {"role": "assistant", "content": " "}]}],
        ["line 1: messages holds an empty message of the assistant"],
    ),
    "blank answer": ("dpo", [{"prompt": "2", "chosen": " ", "rejected": "4"}], ["line 1: chosen is ' '", "a text"]),
    "bad private prompt": (
        "sft",
        [{"prompt": "2", "answer": "4", "extra_info": {"agent_prompts": {"a": "2 + 2"}}}],
        ["line 1: extra_info.agent_prompts.a is '2 + 2'", "a list of messages"],
    ),
    "no agent": ("sft", [{"prompt": "2", "answer": "4", "agent": "c"}], ["line 1", "agent='c'", "a, b"]),
    "no contrast": (
        "dpo",
        [{"prompt": "2", "chosen": "4", "rejected": "4"}],
        ["nothing to learn", "chosen and rejected answers are identical"],
    ),
    "no dump": ("dpo", [{"prompt": "2"}], ["line 1", "rollout_data_dir"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(read, name):
    of, content, expected = BAD[name]
    with pytest.raises(ConfigError) as caught:
        read(of, content, Source.episodes if name == "no dump" else Source.rows)
    assert all(part in str(caught.value) for part in expected), str(caught.value)


def test_a_text_that_is_not_utf_8_is_refused(tmp_path):
    text = pyarrow.array([b"caf\xe9"]).view(pyarrow.string())
    path = tmp_path / "latin.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text, "answer": text}), path)
    with pytest.raises(ConfigError, match="latin.parquet: a text is not UTF-8"):
        read_items(method("sft"), Source.rows, [str(path)], SPEAKERS, "data.train_files")


def test_pairs_without_contrast_are_left_out_and_counted(read, tmp_path, caplog):
    rows = [{"prompt": "2", "chosen": "4", "rejected": other} for other in ("4", "5", "6")]
    items = read("dpo", rows)
    assert not caplog.records, "a run reads its files twice, and counts once"
    path = str(tmp_path / "data.jsonl")
    read_items(method("dpo"), Source.rows, [path], SPEAKERS, "data.train_files", counts=True)
    assert f"{path}: 2 of 3 rows are kept" in caplog.text
    assert [[side[0].text for side in item[0].sides] for item in items] == [["4", "5"], ["4", "6"]]


def dumped(tmp_path, scores):
    records = [episode("t", sample, own) for sample, own in enumerate(scores)]
    return dump.write(records, 1, tmp_path).read_text()


def test_episodes_without_contrast_or_success_are_refused(read, tmp_path):
    equal = dumped(tmp_path, [[[1], [0]], [[1], [0]]])
    with pytest.raises(ConfigError, match="no contrast in any place"):
        read("dpo", equal, Source.episodes)
    with pytest.raises(ConfigError, match="too few good ones"):
        read("sft", equal, Source.episodes, min_score=2.0)
    with pytest.raises(ConfigError, match="its agents are a, b, and this run trains solver"):
        read("sft", equal, Source.episodes, speakers={"solver": ["solver"]})


def test_episodes_are_paired_by_agent(read, tmp_path):
    items = read("dpo", dumped(tmp_path, [[[1], [0]], [[0], [1]]]), Source.episodes)
    assert [[(side[0].agent, side[0].text) for side in item[0].sides] for item in items] == [
        [("a", "1"), ("a", "0")],
        [("b", "1"), ("b", "0")],
    ]


ASKED = {"prompt": [{"role": "user", "content": "2"}], "data_source": "x", "reward_model": {"ground_truth": "four"}}


@pytest.mark.parametrize(
    ("extra", "options", "expected"),
    [
        ({"answer": {"alice": "4", "carol": "5"}}, {}, None),
        ({"answer": {"alice": "4"}}, {}, ["line 2", "extra_info.answer is None", "agent 'carol'", "method.answer_key"]),
        ({}, {}, ["line 1", "extra_info.answer is None", "reward_model.ground_truth"]),
        ({}, {"answer_key": "reward_model.ground_truth"}, None),
        (
            {"answer": {"alice": "12345", "carol": "5"}},
            {},
            ["line 2", "agent 'alice' has 6 tokens", "max_response_length allows 5"],
        ),
    ],
)
def test_the_answers_of_all_rows_are_read_before_an_opponent_plays(tmp_path, extra, options, expected):
    config = compose("data.max_response_length=5", f"data.train_files={tmp_path / 'data.jsonl'}")
    first = ASKED | {"extra_info": {"answer": {"alice": "4", "carol": "5"} if extra else {}}}
    rows = [first, ASKED | {"extra_info": extra}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    setup = SimpleNamespace(config=config, method=method("spin", **options))
    encoders = {"alice": Letters(), "carol": Letters()}
    if expected is None:
        check_answers(setup, encoders)
        return
    with pytest.raises(ConfigError) as caught:
        check_answers(setup, encoders)
    assert all(part in str(caught.value) for part in expected), str(caught.value)


def test_rows_that_are_imitated_and_measured_are_counted(tmp_path, caplog):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "answer": "4"}) + "\n" for text in ("2 + 2", "1 + 3")))
    config = compose(f"data.train_files={path}", f"data.val_files={path}", "data.train_batch_size=1", "method=sft")
    check_examples(SimpleNamespace(config=config, method=method("sft")), {name: Letters() for name in config.agents})
    assert "2 of 2 rows ask what data.train_files ask too" in caplog.text


LIMITS = {"a": 33, "b": 33}


def lengths(read, *prompts):
    return read("sft", [{"prompt": prompt, "answer": "4"} for prompt in prompts])


def test_an_example_that_is_too_long_is_named(read):
    letters = {"a": Letters(), "b": Letters()}
    within_limits(lengths(read, *("2" * length for length in (3, 30, 7))), letters, LIMITS, "data.train_files")
    with pytest.raises(ConfigError, match=r"data.train_files: an example of agent 'a' has 33 tokens.*allow 32"):
        items = lengths(read, *("2" * length for length in (3, 30, 7)))
        within_limits(items, letters, LIMITS | {"a": 32}, "data.train_files")


def test_a_prediction_that_is_too_long_is_left_out_and_counted(caplog):
    """It is another agent's: nobody could shorten it."""
    asked = [{"role": "user", "content": "2"}]
    own, short, long = (Turn("a", 1, asked, text, policy="a") for text in ("4", "5", "6" * 40))
    short.foresees = long.foresees = "b"
    items = [[Example(([own], [short, long]))], [Example(([], [long]))]]
    kept = within_limits(items, {"a": Letters()}, LIMITS, "data.train_files")
    assert [[example.sides for example in item] for item in kept] == [[([own], [short])]]
    assert "data.train_files: 1 predictions are longer than" in caplog.text
    own.text, own.response_ids = "4" * 40, []
    with pytest.raises(ConfigError, match="an example of agent 'a' has"):
        within_limits(items, {"a": Letters()}, LIMITS, "data.train_files")


def test_a_text_of_few_letters_may_have_the_most_tokens(read):
    """One token a byte: 11 letters of 3 bytes are longer than any of 70 texts of 30 letters."""
    items = lengths(read, *["2" * 30] * 70, "\u4e2d" * 11)
    with pytest.raises(ConfigError, match="an example of agent 'a' has 36 tokens"):
        within_limits(items, {"a": Bytes(), "b": Bytes()}, LIMITS, "data.train_files")


def test_every_policy_has_a_limit_of_its_own(read):
    items = [[example for example in item if example.sides[0][0].policy == "a"] for item in lengths(read, "2" * 30)]
    within_limits(items, {"a": Letters(), "b": Letters()}, {"a": 33, "b": 4}, "data.train_files")


class Bytes(Letters):
    """Encoder with a token for every byte."""

    def encode(self, observation, previous=None):
        return [1, *b"".join(message["content"].encode() for message in observation)]

    def reply(self, text, prompt_ids=(), thought=None):
        return [*text.encode(), 0]
