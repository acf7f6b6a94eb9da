"""A run's progress: lines and a live screen, from the metrics of a step."""

import io
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from marl import main as marl_main
from marl.report import progress, progress_live
from marl.report.progress import Display, Lines, Pace, Show, display_of, duration, line, split_flags, tokens_per_second
from marl.report.progress_live import LiveScreen, last_transcript, screen

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


def test_flags_are_ours_and_all_other_words_are_hydras():
    assert split_flags(["a=1", "--quiet", "-m", "b=--live"]) == (["a=1", "-m", "b=--live"], Show.quiet)
    assert split_flags(["--live"]) == ([], Show.live) and split_flags([]) == ([], Show.lines)


def test_a_live_screen_needs_a_terminal_and_quiet_prints_nothing():
    console = terminal(False)
    for show, kind in ((Show.live, Lines), (Show.lines, Lines), (Show.quiet, Display)):
        with display_of(show, console) as display:
            assert type(display) is kind
    display(1, 2, METRICS)
    assert console.file.getvalue() == ""
    with display_of(Show.live, terminal(True)) as display:
        assert type(display) is LiveScreen


def run_of(folder):
    return SimpleNamespace(trainer=SimpleNamespace(rollout_data_dir=str(folder), validation_data_dir=None))


def written(folder, step, *texts, cut=False, last=()):
    turns = [{"agent": f"a{i}", "round": 1, "score": 0.5, "output": text} for i, text in enumerate(texts)]
    turns[0]["episode"] = {}
    turns[-1] |= dict(last)
    lines = [
        json.dumps(turn) + "\n"
        for turn in [*turns, {"agent": "x", "round": 1, "score": 1.0, "output": "next", "episode": {}}]
    ]
    (folder / f"{step}.jsonl").write_text("".join(lines)[: -20 if cut else None])


def test_the_screen_shows_agents_rounds_phases_and_the_transcript(tmp_path):
    written(tmp_path, 1, "four", "five")
    console = terminal(True)
    live = LiveScreen(console)
    live.begin(run_of(tmp_path))
    live(3, 3, METRICS)
    live.end()
    shown = console.file.getvalue()
    wanted = (
        "3/3",
        "credit share",
        "0.75",
        "0.125",
        "round 2",
        "0.375",
        "collect",
        "75%",
        "a0, round 1",
        "four",
        "five",
    )
    assert [word for word in wanted if word not in shown] == [] and "next" not in shown


def test_the_transcript_is_the_first_episode_of_the_newest_file_even_half_written(tmp_path):
    assert last_transcript([tmp_path, tmp_path / "none"]) == []
    written(tmp_path, 1, "old", cut=True)
    assert last_transcript([tmp_path]) == [("a0, round 1 [0.5]", "old")]
    for half in ('{"agent": "a0", "rou', '{"agent": "a0", "output": "é'):  # cut, and within a letter of two bytes
        (tmp_path / "2.jsonl").write_bytes(half.encode()[:-1])
        assert last_transcript([tmp_path]) == [("a0, round 1 [0.5]", "old")]
    (tmp_path / "2.jsonl").write_text('{"agent": "a0", "rou')
    assert last_transcript([tmp_path]) == [("a0, round 1 [0.5]", "old")]


def test_predictions_are_no_part_of_the_screens_transcript(tmp_path):
    written(tmp_path, 1, "four", "five", last={"foresees": "a0"})
    assert last_transcript([tmp_path]) == [("a0, round 1 [0.5]", "four")]


def test_an_agent_without_a_number_has_a_dash():
    console = terminal(False)
    console.print(screen(1, 2, METRICS, None, []))
    row = next(text for text in console.file.getvalue().splitlines() if text.startswith(" b ") or text.startswith("b "))
    assert row.split()[:4] == ["b", "-", "0.375", "-"]


def test_drawing_never_takes_more_than_its_share_of_a_run(monkeypatch, tmp_path):
    """Each drawing takes a second here, and a step ten: one step in ten may be drawn, and the last one is."""
    now, drawn = [0.0], []
    live = LiveScreen(terminal(True), clock=lambda: now[0])

    def draw(step, *rest):
        drawn.append(step)
        now[0] += 1.0
        return ""

    monkeypatch.setattr(progress_live, "screen", draw)
    live.begin(run_of(tmp_path))
    for step in range(1, 41):
        now[0] += 10.0
        live(step, 40, METRICS)
        assert live.spent <= progress_live.MAX_SHARE * now[0] + 1.0
    live.end()
    assert drawn == [1, *[step for step in drawn if 1 < step < 40], 40] and len(drawn) <= 6


@pytest.mark.parametrize(("flags", "kind"), [([], Lines), (["--quiet"], Display), (["--live"], Lines)])
def test_a_run_shows_what_its_command_line_asks_for(monkeypatch, capsys, flags, kind):
    shown = []

    def run(config, display):
        shown.append(display)
        display(1, 2, METRICS)
        history = {0: {"vote": 0.25, "accuracy/round_1": 0.5}, 2: {"vote": 0.75, "accuracy/round_1": 0.5}}
        return SimpleNamespace(
            history=history, report_folder="outputs/run", folder="outputs/run", validation=[None] * 4
        )

    monkeypatch.setattr(marl_main, "run", run)
    assert marl_main.main(["--config-name", "quickstart", *flags]) == 0
    out = capsys.readouterr().out
    assert type(shown[0]) is kind and ("step 1/2" in out) is (kind is Lines)
    ended = [line.split() for line in out.splitlines() if "vote" in line and "+0.500" in line]
    assert [*map(bool, ended)] == [True] * (flags != ["--quiet"]) == [True] * ("marl report outputs/run" in out)


def test_a_run_of_losses_ends_with_its_folder(monkeypatch, capsys):
    where = {"report_folder": "outputs/run/validation_1", "folder": "outputs/run"}
    ended = SimpleNamespace(history={0: {"loss": 1.0}}, validation=[], **where)
    monkeypatch.setattr(marl_main, "run", lambda config, display: ended)
    assert marl_main.main(["--config-name", "quickstart"]) == 0
    assert capsys.readouterr().out == "results: outputs/run/validation_1   full report: marl report outputs/run\n"


def test_the_flag_of_a_sweep_may_stand_anywhere(monkeypatch):
    asked = []
    monkeypatch.setattr(marl_main, "run_composed", lambda words, work: asked.append(words) or 0)
    assert marl_main.main(["learner=grpo", "-m", "--quiet", "seed=0,1"]) == 0
    assert asked[0][0] == "-m" and asked[0][2:4] == ["learner=grpo", "seed=0,1"]


@pytest.mark.parametrize("validates", [False, True])
def test_a_display_begins_with_the_runs_configuration(monkeypatch, tmp_path, validates):
    """Once, before the first attempt; every attempt's steps are shown on it. A validation leaves the run's own README."""
    seen, written = [], []
    config = OmegaConf.create({"verbose": True, "resources": {"max_restarts": 0}, "trainer": {"val_only": validates}})

    async def attempt(setup, note_step, again):
        note_step(1, 2, {})

    monkeypatch.setattr(
        marl_main, "prepare", lambda config: SimpleNamespace(config=config, method=SimpleNamespace(learns=True))
    )
    monkeypatch.setattr(marl_main, "split_text", lambda config: "")
    monkeypatch.setattr(marl_main, "claimed", lambda config: nullcontext(tmp_path))
    monkeypatch.setattr("marl.preflight.plan_report.summary_text", lambda setup: "")
    monkeypatch.setattr("marl.preflight.endpoints.check_endpoints", lambda setup: None)
    monkeypatch.setattr(marl_main.run_readme, "write", lambda folder, learns: written.append(folder))
    monkeypatch.setattr("marl.cluster.session.session", lambda setup: nullcontext())
    monkeypatch.setattr(marl_main, "blocked_alarm", lambda config: nullcontext())
    monkeypatch.setattr(marl_main, "_train", attempt)
    monkeypatch.setattr(Display, "begin", lambda self, config: seen.append(config))
    monkeypatch.setattr(Display, "__call__", lambda self, *step: seen.append(step))
    marl_main.run(config, Display())
    assert seen == [config, (1, 2, {})] and written == [tmp_path], "a folder without one gets one"
    (tmp_path / "README.md").write_text("of the run")
    marl_main.run(config, Display())
    assert len(written) == 2 - validates


@pytest.mark.parametrize("show", list(Show))
def test_a_display_ends_after_an_error(show, monkeypatch):
    ended = []
    for kind in (Display, Lines, LiveScreen):
        monkeypatch.setattr(kind, "end", lambda self: ended.append(self))
    with pytest.raises(OSError), display_of(show, terminal(True)):
        raise OSError
    assert len(ended) == 1 and progress.FLAGS
