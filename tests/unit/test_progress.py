"""A run's progress: a line for every step, from its metrics."""

import io
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from marl import main as marl_main
from marl.report.progress import Lines, Pace, duration, line, tokens_per_second

METRICS = {
    "team/vote": 0.5, "team/score": 0.25, "team/accuracy/round_1": 0.4, "team/accuracy/round_2": 0.6, "team/episodes": 10.0,
    "timing_s/step": 2.0, "timing_s/collect": 1.5, "timing_s/update": 0.5,
    "agent/a/turns": 2.0, "agent/a/response_length": 5.0, "agent/a/credit_share": 0.75, "agent/a/ppo_kl": 0.125,
    "agent/b/turns": 1.0, "agent/b/response_length": 3.0, "agent/b/accuracy/round_2": 0.375,
}  # fmt: skip


def terminal(is_terminal):
    return Console(
        file=io.StringIO(), force_terminal=is_terminal, width=160, color_system="standard" if is_terminal else None
    )


def test_tokens_a_second_by_hand():
    assert tokens_per_second(METRICS) == 10 * (2 * 5 + 1 * 3) / 2
    assert tokens_per_second({key: value for key, value in METRICS.items() if "length" not in key}) is None
    assert tokens_per_second(METRICS | {"timing_s/step": 0.0}) is None


def test_the_time_left_is_of_the_last_steps_and_at_first_of_the_steps_own_time():
    now = iter([100.0, 103.0, 110.0]).__next__
    pace = Pace(now)
    assert pace.left(5, 10, METRICS) == 2.0 * 5
    assert pace.left(6, 10, METRICS) == 3.0 * 4
    assert pace.left(7, 10, METRICS) == 5.0 * 3
    assert Pace(lambda: 0.0).left(1, 10, {}) is None


def test_a_line_says_what_there_is():
    assert line(7, 120, METRICS, 102.4) == (
        "step   7/120  1:42 left  65 tokens/s  vote 0.500  round 1 0.400  round 2 0.600  score 0.250"
    )
    assert (
        line(7, 7, {"team/vote": 1.0, "team/score": 1.0, "val/team/vote": 0.5}, None)
        == "step 7/7  vote 1.000  val/vote 0.500"
    )
    assert [duration(seconds) for seconds in (0, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]


def test_a_line_of_a_run_that_plays_nothing_says_its_losses():
    assert line(1, 2, {"agent/a/loss": 0.25, "agent/a/grad_norm": 3.0}, None) == "step 1/2  a loss 0.250"


def test_lines_are_plain_and_whole_where_there_is_no_terminal():
    plain, coloured = terminal(False), terminal(True)
    for console in (plain, coloured):
        Lines(console)(1, 2, METRICS | {f"team/accuracy/round_{r}": 0.5 for r in range(30)})
    assert "\x1b" not in plain.file.getvalue() and "\x1b[1m" in coloured.file.getvalue()
    assert plain.file.getvalue().count("\n") == 1


@pytest.mark.parametrize("flags", [[], ["--quiet"]])
def test_a_run_shows_what_its_command_line_asks_for(monkeypatch, capsys, flags):
    def run(config, progress):
        if progress is not None:
            progress(1, 2, METRICS)
        history = {0: {"vote": 0.25, "accuracy/round_1": 0.5}, 2: {"vote": 0.75, "accuracy/round_1": 0.5}}
        return SimpleNamespace(
            history=history, report_folder="outputs/run", folder="outputs/run", validation=[None] * 4
        )

    monkeypatch.setattr(marl_main, "run", run)
    assert marl_main.main(["--config-name", "quickstart", *flags]) == 0
    out = capsys.readouterr().out
    assert ("step 1/2" in out) is (flags == [])
    ended = [line.split() for line in out.splitlines() if "vote" in line and "+0.500" in line]
    assert [*map(bool, ended)] == [True] * (flags == []) == [True] * ("marl report outputs/run" in out)


def test_a_run_of_losses_ends_with_its_folder(monkeypatch, capsys):
    where = {"report_folder": "outputs/run/validation_1", "folder": "outputs/run"}
    ended = SimpleNamespace(history={0: {"loss": 1.0}}, validation=[], **where)
    monkeypatch.setattr(marl_main, "run", lambda config, progress: ended)
    assert marl_main.main(["--config-name", "quickstart"]) == 0
    assert capsys.readouterr().out == "results: outputs/run/validation_1   full report: marl report outputs/run\n"


def test_the_flag_of_a_sweep_may_stand_anywhere(monkeypatch):
    asked = []
    monkeypatch.setattr(marl_main, "run_composed", lambda words, work: asked.append(words) or 0)
    assert marl_main.main(["learner=grpo", "-m", "--quiet", "seed=0,1"]) == 0
    assert asked[0][0] == "-m" and asked[0][2:4] == ["learner=grpo", "seed=0,1"]


@pytest.mark.parametrize("validates", [False, True])
def test_every_attempts_steps_are_shown_and_a_validation_leaves_the_runs_readme(monkeypatch, tmp_path, validates):
    seen, written = [], []
    config = OmegaConf.create({"verbose": True, "resources": {"max_restarts": 0}, "trainer": {"val_only": validates}})

    async def attempt(setup, note_step, again):
        note_step(1, 2, {})

    monkeypatch.setattr(
        marl_main, "prepare", lambda config: SimpleNamespace(config=config, method=SimpleNamespace(learns=True))
    )
    monkeypatch.setattr(marl_main, "split_text", lambda config: "")
    monkeypatch.setattr(marl_main, "claimed", lambda config: nullcontext(tmp_path))
    monkeypatch.setattr("marl.preflight.plan.summary_text", lambda setup: "")
    monkeypatch.setattr("marl.preflight.checks.check_endpoints", lambda setup: None)
    monkeypatch.setattr(marl_main.readme, "write", lambda folder, learns: written.append(folder))
    monkeypatch.setattr("marl.cluster.session.session", lambda setup: nullcontext())
    monkeypatch.setattr(marl_main, "blocked_alarm", lambda config: nullcontext())
    monkeypatch.setattr(marl_main, "_train", attempt)
    marl_main.run(config, lambda *step: seen.append(step))
    assert seen == [(1, 2, {})] and written == [tmp_path], "a folder without one gets one"
    (tmp_path / "README.md").write_text("of the run")
    marl_main.run(config, None)
    assert len(written) == 2 - validates
