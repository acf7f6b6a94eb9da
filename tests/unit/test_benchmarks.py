"""The arithmetic of ``benchmarks/``: ratios, order of steps, equal work, the regression check. No system is started."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import check, run, work
from benchmarks.cases import EXTRA, FIGURES, QUICK_START, RATIOS, SYSTEMS, Selection, ratio
from benchmarks.gate import SYSTEM, cpu_of_others
from benchmarks.interleave import Child, SystemFailed, interleave, turns
from benchmarks.ratios import KEYS, Spread, WorkDiffers, paired, paired_rates, require_same_work, require_training
from benchmarks.run import Bench, as_json, parse, table
from benchmarks.work import Load, questions, score
from marl.utils.background import Background


def step(cpu=1.0, changed=True, rollout=0.5, **work):
    return {
        "cpu": cpu,
        "wall": 2 * cpu,
        "parts": {"rollout": rollout},
        "work": dict.fromkeys(KEYS, 8) | work,
        "changed": changed,
    }


REPORT = step(cpu=2.0) | {"processes": 1}


def test_a_ratio_is_of_the_same_round_and_its_figure_the_median():
    ours, theirs = [step(2.0), step(9.0), step(3.0)], [step(1.0), step(3.0), step(6.0)]
    assert paired(ours, theirs) == [2.0, 3.0, 0.5]
    assert Spread.of(paired(ours, theirs)) == Spread(median=2.0, lowest=0.5, highest=3.0, rounds=3)
    assert paired([step(rollout=0.6)], [step(rollout=0.2)], "rollout") == [pytest.approx(3.0)]


def test_a_rate_counts_tokens_over_seconds():
    assert paired_rates([step(2.0, response_tokens=10)], [step(1.0, response_tokens=10)]) == [0.5]
    assert paired_rates([step(1.0, response_tokens=5)], [step(1.0, response_tokens=10)]) == [0.5]


def test_systems_take_turns_and_each_opens_a_round():
    assert list(turns(["a", "b", "c"], 2)) == [
        (0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a"), (2, "c"), (2, "a"), (2, "b"),
    ]  # fmt: skip


class Numbered:
    def __init__(self, name, log, last=99):
        self.name, self.log, self.last, self.taken = name, log, last, 0

    def step(self):
        if self.taken == self.last:
            raise SystemFailed(f"{self.name} ended")
        self.taken += 1
        self.log.append(self.name)
        return {"step": self.taken}


def test_nobody_steps_twice_before_the_others_and_one_that_fails_is_left_out():
    log, failures = [], {}
    systems = {"a": Numbered("a", log), "b": Numbered("b", log, last=1)}
    reports = list(interleave(systems, 2, lambda name, error: failures.update({name: str(error)})))
    assert log == ["a", "b", "a", "a"] and failures == {"b": "b ended"}
    assert reports[-1] == (2, "a", {"step": 3})


@pytest.mark.parametrize("key", KEYS)
def test_one_token_less_is_no_equal_work(key):
    require_same_work(("ours", [step()]), ("theirs", [step()]))
    with pytest.raises(WorkDiffers, match=rf"round 2: {key} of ours is 8, of theirs 7"):
        require_same_work(("ours", [step(), step()]), ("theirs", [step(), step(**{key: 7})]))


def test_what_a_peer_leaves_out_of_every_sample_is_named_exactly():
    ours, theirs = [step(samples=3, trained_tokens=30)], [step(samples=3, trained_tokens=27)]
    require_same_work(("ours", ours), ("theirs", theirs), left_out={"trained_tokens": 1})
    with pytest.raises(WorkDiffers):
        require_same_work(("ours", ours), ("theirs", theirs), left_out={"trained_tokens": 2})


def test_a_step_without_an_update_is_no_training():
    require_training("ours", [step(), step(changed=None)])
    with pytest.raises(WorkDiffers, match="round 2: ours did not change its parameters"):
        require_training("ours", [step(), step(changed=False)])


def test_a_figure_refuses_unequal_work():
    figure = ratio("", "ours", "theirs")
    assert figure.of({"ours": [step(3.0)], "theirs": [step(2.0)]}) == [1.5]
    with pytest.raises(WorkDiffers):
        figure.of({"ours": [step(3.0)], "theirs": [step(2.0, forwarded_tokens=16)]})


def test_only_the_systems_of_the_selected_figures_run():
    assert Selection(["floor_tiny", "trl_tiny"]).systems == {"tiny": ["floor_tiny", "trl_tiny", "ours_tiny"]}
    assert Selection([QUICK_START]).systems == {}
    everything = Selection([*FIGURES])
    assert sorted(name for names in everything.systems.values() for name in names) == sorted(SYSTEMS)
    with pytest.raises(ValueError, match="there is no figure 'trl_huge'; expected some of trl_tiny"):
        Selection(["trl_huge"])


FLOORS = ("floor_small", "floor_two", "floor_debate")
"""Ratios to a floor beside those of the table."""


def test_a_figure_compares_systems_of_one_case_only():
    for name, figure in FIGURES.items():
        assert len({SYSTEMS[system].case for system in figure.needs}) == 1, name


@pytest.mark.parametrize(("name", "more", "code"), [("floor_tiny", 1.101, 1), ("floor_tiny", 1.099, 0), ("floor_tiny", 0.5, 0), ("prefilled", 1.101, 1), ("floor_two", 1.101, 1), ("trl_tiny", 2.0, 0)])  # fmt: skip
def test_the_check_is_red_where_a_ratio_to_the_floor_is_more_than_a_tenth_worse(tmp_path, capsys, name, more, code):
    committed = dict.fromkeys([*RATIOS, *FLOORS], 1.25)
    assert check_with(tmp_path, committed, committed | {name: 1.25 * more}) == code
    assert (f"{name}: " in capsys.readouterr().err) == bool(code)


def test_the_check_wants_a_measured_ratio(tmp_path, capsys):
    committed = dict.fromkeys([*RATIOS, *FLOORS], 1.25)
    assert check_with(tmp_path, committed, committed | {"floor_tiny": None}) == 1
    assert "floor_tiny: not measured" in capsys.readouterr().err
    assert check_with(tmp_path, committed, committed | {"trl_tiny": None}) == 0
    assert check_with(tmp_path, committed, committed, smoke=True) == 2
    assert check.main(["--measured", str(tmp_path / "none.json")]) == 2
    assert "run `make bench` first" in capsys.readouterr().err


def test_accepted_figures_are_the_committed_ones_from_then_on(tmp_path):
    committed = dict.fromkeys([*RATIOS, *FLOORS], 1.25)
    assert (
        check_with(tmp_path, committed, committed | {"floor_tiny": 2.0, "floor_two": 1.5, "trl_tiny": None}, "--accept")
        == 0
    )
    accepted = check.figures_of(json.loads((tmp_path / "committed.json").read_text()))
    assert accepted == committed | {"floor_tiny": 2.0, "floor_two": 1.5}


def check_with(folder, committed, measured, *words, smoke=False):
    paths = []
    for name, ratios in (("committed", committed), ("measured", measured)):
        paths += [f"--{name}", str(folder / f"{name}.json")]
        sections = {"ratios": dict.fromkeys(RATIOS), "extra": dict.fromkeys(FLOORS)}
        result = {section: {key: ratios[key] for key in keys} for section, keys in sections.items()}
        (folder / f"{name}.json").write_text(json.dumps(result | {"smoke": smoke}))
    return check.main([*paths, *words])


def test_the_committed_figures_have_every_ratio():
    committed = check.read(check.COMMITTED)
    assert committed["ratios"].keys() == RATIOS.keys() and committed["extra"].keys() == set(FLOORS)
    assert set(FLOORS) == set(check.CHECKED) - set(RATIOS) <= set(EXTRA) and not set(RATIOS) & set(EXTRA)


def test_every_figure_is_explained():
    text = (check.COMMITTED.parent / "README.md").read_text()
    assert [name for name in [*FIGURES, QUICK_START] if f"`{name}`" not in text] == []


def test_the_fewest_tokens_of_a_debate_by_hand():
    # 2 questions of 64, 8 episodes of 3 agents; later rounds: two peers' 32 tokens, 21 of the template, 1 of the own answer
    debate = Load(questions=2, samples=4, response=32, agents=3, rounds=3)
    assert debate.contexts == [64, 181, 298]
    assert debate.fewest_prefilled == 2 * 64 + 8 * 3 * 2 * (64 + 21 + 1)
    assert debate.fewest_forwarded == 8 * 3 * (298 + 32)
    assert (Load().fewest_prefilled, Load().fewest_forwarded) == (8 * 64, 64 * 128)


def test_a_load_travels_to_its_system_unchanged():
    load = Load(size="small", bf16=True, ragged=True, questions=3)
    assert Load.loads(load.dumps()) == load
    assert questions(5) == questions(5) and {len(text) for text in questions(50)} == {45}
    assert score("some answer") == score("some answer")


def test_without_peers_their_ratios_are_null_and_the_reason_is_told(tmp_path):
    words = ["--only", "trl_tiny,floor_tiny", "--peers", str(tmp_path / "none"), "--out", str(tmp_path / "bench.json")]
    bench = Bench(parse(words))
    bench.run_case("tiny", ["trl_tiny"])
    bench.outcome.reports |= {"floor_tiny": [REPORT], "ours_tiny": [REPORT | {"cpu": 3.0}]}
    bench.outcome.starts |= {"floor_tiny": 1.0, "ours_tiny": 1.0}
    bench.derive()
    result = as_json(bench, [0.0, 0.0], None)
    assert result["ratios"] == dict.fromkeys(RATIOS) | {"floor_tiny": 1.5}
    assert result["not_measured"]["trl_tiny"] == f"trl is not installed in {tmp_path / 'none'}"
    assert result["not_measured"]["comlrl_two"] == "not selected" and bench.outcome.errors == []
    assert "trl_tiny                 not measured: trl is not installed" in table(result)


@pytest.mark.parametrize(
    "words,fast,measured",
    [
        ("", False, False),
        ("--smoke", False, True),
        ("--only trl_bf16_small,floor_small", False, True),
        ("", True, True),
    ],
)
def test_bf16_is_measured_where_it_is_fast_or_asked_for(tmp_path, monkeypatch, words, fast, measured):
    says_that_it_is_up = """print('{"event": "ready", "cpu": 1.0}', flush=True)"""
    monkeypatch.setattr(run, "has_fast_bf16", lambda: fast)
    monkeypatch.setattr(Bench, "command", lambda *_: [sys.executable, "-c", says_that_it_is_up])
    bench = Bench(parse([*words.split(), "--peers", str(tmp_path / "none"), "--out", str(tmp_path / "bench.json")]))
    for name in ("floor_small", "ours_small", "floor_tiny"):
        if child := bench.start(name):
            child.stop()
    assert list(bench.outcome.starts) == [*["floor_small", "ours_small"] * measured, "floor_tiny"]
    bench.outcome.reports = {name: [REPORT] for name in bench.outcome.starts}
    bench.outcome.missing = dict.fromkeys(SYSTEMS.keys() - bench.outcome.starts, "left out") | bench.outcome.missing
    bench.derive()
    assert ("floor_small" in bench.outcome.spreads) == measured
    assert ("no fast kernels" in bench.outcome.not_measured.get("floor_small", "")) == (not measured)


def test_unequal_work_is_an_error_of_the_run_and_no_figure(tmp_path):
    bench = Bench(parse(["--only", "floor_tiny", "--out", str(tmp_path / "bench.json")]))
    bench.outcome.reports |= {"floor_tiny": [REPORT], "ours_tiny": [REPORT | {"work": dict.fromkeys(KEYS, 7)}]}
    bench.derive()
    assert "samples of ours_tiny is 7, of floor_tiny 8" in bench.outcome.errors[0]
    assert "floor_tiny" not in bench.outcome.spreads and "floor_tiny" in bench.outcome.not_measured


def test_a_text_of_any_sampled_tokens_has_as_many_tokens(monkeypatch, tmp_path):
    from transformers import AutoTokenizer

    monkeypatch.setattr(work, "TOKENIZER", tmp_path)
    work.make_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for shift in range(0, work.CHARACTERS, 7):
        ids = [(i + shift) % work.CHARACTERS for i in range(work.CHARACTERS)]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
    asked = [{"role": "user", "content": questions(1)[0]}]
    assert tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True) == work.prompt_of(
        asked[0]["content"]
    )
    assert len(tokenizer.encode(work.prompt_of(asked[0]["content"]), add_special_tokens=False)) == work.PROMPT


CHILD = """
import subprocess, sys
from benchmarks.gate import Gate, Stopped
from benchmarks.work import Work
gate = Gate()
print("noise of a library")
gate.ready(1.0)
for sum in (1.0, 2.0):
    gate.begin()
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.4: pass"])
    gate.stop_clocks()
    gate.report(Work(samples=3), sum)
"""


def test_a_step_of_ours_ends_with_its_dump():
    from benchmarks.systems.ours import Run

    dumps, written = Background("a dump"), []

    async def step(tasks):
        dumps.start(lambda: time.sleep(0.05) or written.append(tasks))
        return {"score": 1.0}

    async def next_tasks():
        return "tasks"

    run = object.__new__(Run)
    run.trainer = SimpleNamespace(step=step, tasks=SimpleNamespace(next=next_tasks), dumps=dumps)
    assert asyncio.run(run.step()) == {"score": 1.0} and written == ["tasks"]


def test_a_system_pays_for_its_children_and_its_noise_goes_to_its_log(tmp_path):
    child = Child("burner", [sys.executable, "-c", CHILD], tmp_path, patience_s=60)
    try:
        child.wait_ready()
        first, second = child.step(), child.step()
        assert 0.35 < first["cpu"] < 2 and first["work"]["samples"] == 3
        assert (first["changed"], second["changed"]) == (False, True)
        with pytest.raises(SystemFailed, match="burner ended"):
            child.step()
    finally:
        child.stop()
    assert "noise of a library" in child.log.read_text()


def test_an_orphan_counts_by_its_mark_alone(monkeypatch):
    monkeypatch.setenv(SYSTEM, "mine")
    command = ["sh", "-c", "sleep 30 >/dev/null 2>&1 & echo $!"]  # its parent ends at once, as a daemon's does
    for value, counts in (("mine", True), ("yours", False)):
        environment = {"PATH": os.environ["PATH"], SYSTEM: value}
        orphan = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
        try:
            assert (orphan in cpu_of_others()) == counts
        finally:
            os.kill(orphan, signal.SIGKILL)


PYTHON = """#!/bin/sh
mkdir -p .venv-bench/bin && cp pip .venv-bench/bin/pip
"""
PIP = """#!/bin/sh
echo "$@" >> asked
case "$*" in *"${MISSING:-nothing}"*) exit 1;; esac
"""


def test_a_peer_that_cannot_be_installed_does_not_stop_the_others(tmp_path):
    root = Path(__file__).parents[2]
    (tmp_path / "benchmarks").mkdir()
    for name in ("Makefile", "benchmarks/peers.txt"):
        shutil.copy(root / name, tmp_path / name)
    for name, text in (("python", PYTHON), ("pip", PIP)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": os.environ["PATH"]}

    def install(**settings):
        words = ["make", "PYTHON=./python", ".venv-bench/installed"]
        return subprocess.run(
            words, cwd=tmp_path, env=environment | settings, capture_output=True, text=True, timeout=60
        )

    done = install(MISSING="comlrl")
    assert done.returncode == 0 and "not installed: comlrl==" in done.stdout
    assert [line.rsplit(" ", 1)[1].split("==")[0] for line in (tmp_path / "asked").read_text().splitlines()] == [
        "torch", "trl", "comlrl", "psutil",
    ]  # fmt: skip
    assert not (tmp_path / ".venv-bench" / "installed").exists()
    install()
    assert (tmp_path / ".venv-bench" / "installed").exists(), "the next attempt tries again"
