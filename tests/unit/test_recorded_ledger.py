"""A run's ledger, read for a replay: by what was asked, whatever the settings and source files are now."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from marl.commands.replay import main
from marl.config.errors import ConfigError
from marl.controller import ledger
from marl.controller.ledger import Ledger
from marl.controller.recorded_ledger import RecordedLedger
from marl.evaluation.recorded_run import RecordedRun, comparable, different_lines, different_metrics
from marl.evaluation.replay import LiveFrom, Wanted, ledger_of
from marl.types import Score, Turn
from marl.utils.seeding import derive_seed
from tests.builders import controller, task

ASKED = [{"role": "user", "content": "2 + 2"}]
TURN = Turn("a", 1, ASKED, "4", "p", [1], [2], [1], [-0.5], seed=7)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A ledger that other source files of marl wrote."""
    monkeypatch.setattr(ledger, "code_fingerprint", lambda: "of then")
    kept = Ledger(tmp_path)
    kept.begin(1, {"p": {"weight": ((2,), 2, 5)}})
    kept.add_turn(TURN, 7, kept.digest("p", ASKED, {"temperature": 1.0}, 9))
    kept.add_score(TURN, Score(0.5, "4"), kept.digest("x", "4", {}, "4"))
    kept.add("lost", 1, kept.digest([("val/0", 0)], True), {"known_by": ["v", True, 1], "errors": {"0": "late"}})
    kept.add("lost", 1, kept.digest([("train/0", 0)], False), {"known_by": ["t", False, 1], "errors": {"3": "late"}})
    kept.close()
    monkeypatch.setattr(ledger, "code_fingerprint", lambda: "of now")
    return tmp_path


def opened(run, **options):
    kept = RecordedLedger(run, **options)
    kept.open(1)
    return kept


def test_what_a_validation_retried_is_not_the_replayed_steps(tmp_path):
    """It lost nothing in the end: no play names its tasks."""
    lost = []

    def does(agent, round, task, **_):
        if task.id == "val/1" and not lost:
            lost.append(task)
            raise RuntimeError("once")
        return "4"

    settings = {"max_error_rate": 1.0, "min_sample_share": 1.0, "max_attempts": 2}
    team = controller(does, folder=tmp_path, **settings)
    trained, validated = ([replace(task(), id=f"{kind}/{index}") for index in range(2)] for kind in ("train", "val"))
    assert asyncio.run(team.collect(trained, 1, step=1)).retried == 0
    assert asyncio.run(team.collect(validated, 1, step=1, validate=True)).retried == 1
    team.ledger.close()
    again = controller(does, folder=None, **settings)
    again.ledger = RecordedLedger(tmp_path)
    assert asyncio.run(again.collect(trained, 1, step=1)).retried == 0


def test_a_turn_is_found_by_what_was_asked(run):
    kept = opened(run)
    assert kept.turn(7, kept.digest("p", ASKED, {"temperature": 0.5}, 99)) == TURN
    for policy, observation in (("q", ASKED), ("p", [])):
        assert kept.turn(7, kept.digest(policy, observation, {"temperature": 1.0}, 9)) is None


def test_a_score_is_that_of_the_text(run):
    kept, other = opened(run), Turn("a", 1, ASKED, "five", seed=7)
    assert kept.score(TURN, "") == Score(0.5, "4") and kept.score(other, "") is None
    assert opened(run, scores=False).score(TURN, "") is None


def test_a_turn_is_found_whatever_kind_of_sequence_and_text_it_was_asked_with(run):
    """JSON reads lists and plain texts back."""

    class Named(str):
        """A text with more to it."""

    asked = [{"role": Named("user"), "content": ({"type": "text", "text": "caf\u00e9"},)}]
    kept = Ledger(run)
    kept.open(2)
    kept.add_turn(Turn("a", 1, asked, "4", Named("p"), [1], [2], [1], [-0.5], seed=9), 9, "x")
    kept.close()
    again = RecordedLedger(run)
    again.open(2)
    assert again.turn(9, again.digest(Named("p"), asked)) is not None


def test_the_plays_that_training_lost_are_lost_again(run):
    assert opened(run).find("lost", 1, "")["errors"] == {"3": "late"}


def test_the_weights_of_a_step_are_known(run):
    assert opened(run).weights(1) == {"p": {"weight": [[2], 2, 5]}} and opened(run).weights(2) is None


def test_the_numbers_of_a_step_may_be_on_several_lines(tmp_path):
    """A validation that was repeated, or baselines at the end; the last line of a run whose disk was full is cut off."""
    step = {"team/score": 0.5, "agent/a/loss": float("nan")}
    lines = [
        (2, {"team/score": 0.1}),
        (3, step),
        (3, {"val/team/vote": 0.4}),
        (3, {"baseline/solo/accuracy": 0.4}),
        (4, {"val/team/vote": 0.4}),
    ]
    text = "".join(json.dumps({"step": number, "data": data}).replace("NaN", "null") + "\n" for number, data in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step":5,"da')
    recorded = RecordedRun(tmp_path, {"config": {}})
    assert recorded.metrics(3) == {"team/score": 0.5, "agent/a/loss": None}
    assert not different_metrics(recorded.metrics(3), comparable(step))
    assert different_metrics(recorded.metrics(2), comparable(step))
    assert recorded.metrics(4) is None and recorded.metrics(5) is None


def test_nothing_is_written(run):
    before = {path: path.read_bytes() for path in run.rglob("*.jsonl")}
    kept = opened(run)
    kept.begin(2, {"p": {}})
    kept.add_turn(TURN, 8, "")
    kept.close()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_turns_that_are_left_out_are_not_known(run):
    kept = opened(run, keeps=lambda step, seed, turn: turn["round"] > 1)
    assert kept.turn(7, kept.digest("p", ASKED)) is None and kept.score(TURN, "") is None


ROUND, ONE = LiveFrom.of(4, "2"), LiveFrom.of(4, "train/7/0/a/2")


@pytest.mark.parametrize(
    "live, agent, round, task, step, out",
    [
        (ROUND, "a", 1, "train/7", 4, False), (ROUND, "b", 2, "train/7", 4, True), (ROUND, "a", 2, "train/7", 3, False),
        (ONE, "a", 2, "train/7", 4, True), (ONE, "b", 2, "train/7", 4, False), (ONE, "b", 3, "train/7", 4, True),
        (ONE, "a", 2, "train/8", 4, False), (ONE, "a", 1, "train/7", 4, False),
    ],
)  # fmt: skip
def test_what_is_generated_from_a_turn_on(live, agent, round, task, step, out):
    for branch in (0, 2):
        seed = derive_seed(0, step, task, 0, agent, round, *([branch] if branch else []))
        turn = {"agent": agent, "round": round, "branch": branch}
        assert live.leaves_out(0, step, seed, turn) is out


@pytest.mark.parametrize("text", ["2", "train/7/0/a/2"])
def test_a_turn_that_no_ledger_holds_is_named_as_it_was_asked_for(run, text):
    played = SimpleNamespace(folder=run)
    config = SimpleNamespace(seed=0)
    wanted = Wanted(run, 1, LiveFrom.of(1, text))
    with pytest.raises(ConfigError, match=rf"^from={text}: {run}/ledger holds no such turn of step 1"):
        ledger_of(played, wanted, config, [])


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\u0085"])
def test_a_text_may_hold_any_end_of_a_line(tmp_path, end):
    """Dumps hold them as they are."""
    turn = {"task": "train/0", "sample": 0, "agent": "a", "round": 1, "output": f"4{end}4"}
    dumps = [tmp_path / "then.jsonl", tmp_path / "now.jsonl"]
    for path, score in zip(dumps, (0.5, 1.0), strict=True):
        path.write_text(json.dumps(turn | {"score": score}, ensure_ascii=False) + "\n")
    assert different_lines(dumps[0], dumps[0]) == []
    assert different_lines(*dumps) == ["task train/0, sample 0, a, round 1: score: recorded 0.5, replayed 1.0"]


WRONG = {
    "step=1": "0 folders",
    "a b step=1": "2 folders",
    "{}": "step=: expected the number of a step",
    "{} step=0": "step=0: expected",
    "{} step=one": "step=one: expected",
    "{} step=1 from=alice": "from=alice: expected a round",
    "{} step=1 rescore=yes": "rescore=yes: expected true or false",
    "{} step=1": "holds no run.json: expected the folder of a run",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_command_line_is_refused_by_name(words, tmp_path, capsys):
    assert main(words.format(tmp_path).split()) == 2
    assert WRONG[words] in capsys.readouterr().err
