"""``marl report`` of a sweep, and of runs that differ in more than their seed: their table, names and order."""

import json
from functools import partial

import pytest

from marl import cli
from marl.comparison import groups, runs
from marl.comparison.tables import comparison, markdown
from tests.run_folders import write_run


@pytest.fixture
def make_run(tmp_path):
    return partial(write_run, tmp_path)


def test_a_run_that_imitates_stands_beside_one_that_plays(make_run):
    """Each by its own metric, and with its own curve."""
    make_run("rl", {0: 0.1, 4: 0.7})
    sft = make_run("sft", {}, method={"name": "sft"})
    lines = [{"step": step, "data": {"agent/a/loss": 1.0 / step}} for step in (1, 2)]
    (sft / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = comparison(runs.load_all([str(sft.parent)]))
    assert [group["name"] for group in result["groups"]] == ["method=None", "method=sft"]
    text = markdown(result, "Comparison")
    assert "| method=sft | 1 | - | 0.500 |" in text and "| method=None | 1 | 0.700 | - |" in text
    assert "## `agent/a/loss` by step" in text and "| method=sft | 1.000 | 0.500 |" in text


def sweep_of(make_run, words, **values):
    """Write the note that Hydra leaves of a sweep, beside runs with these votes by learning rate."""
    for lr, votes in values.items():
        for seed, vote in enumerate(votes):
            settings = {"critic": {"lr": float(lr[1:]) / 10}, "resources": {"timeout_s": 5}}
            folder = make_run(f"{lr}-{seed}", {0: 0.1, 4: vote}, seed, **settings)
    noted = {"hydra": {"overrides": {"task": words}}}
    (folder.parent / "multirun.yaml").write_text(json.dumps(noted))
    return folder.parent


def test_a_sweeps_table_has_its_keys_and_seconds_and_the_best_first(make_run, capsys):
    sweep = sweep_of(make_run, ["critic.lr=0.1,0.2", "seed=0,1", "learner=grpo"], l1=(0.2, 0.3), l2=(0.6, 0.9))
    (sweep / "l2-1" / "summary.json").write_text(json.dumps({"seconds": 8.0, "sampled_tokens": 60}))
    assert cli.main(["report", str(sweep)]) == 0
    table = capsys.readouterr().out.split("best first\n\n")[1].split("\n\n")[0].split("\n")
    assert table[0] == "| `critic.lr` | runs | `val/team/vote` | seconds | tokens |"
    assert table[2] == "| 0.2 | 2 | 0.750 [0.600, 0.900] | 5.0 [2.0, 8.0] | 50 [40, 60] |"
    assert table[3].startswith("| 0.1 | 2 | 0.250 [0.200, 0.300] |")


def test_a_swept_key_that_changes_nothing_parts_runs_too(make_run, capsys):
    sweep = sweep_of(make_run, ["resources.timeout_s=5,6", "seed=0,1"], l1=(0.2, 0.3))
    record = json.loads((sweep / "l1-1" / "run.json").read_text())
    record["config"]["resources"]["timeout_s"] = 6
    (sweep / "l1-1" / "run.json").write_text(json.dumps(record))
    assert cli.main(["report", str(sweep)]) == 0
    assert "| 6 | 1 | 0.300 |" in capsys.readouterr().out


def test_two_sweeps_of_one_key_are_told_apart_by_what_differs_between_them(tmp_path, capsys):
    for learner in ("grpo", "mappo"):
        for lr in (1, 2):
            folder = write_run(tmp_path / learner, f"lr={lr}", {0: 0.1 * lr}, learner=learner, lr=lr)
        noted = {"hydra": {"overrides": {"task": ["lr=1,2"]}}}
        (folder.parent / "multirun.yaml").write_text(json.dumps(noted))
    assert cli.main(["compare", *(str(tmp_path / learner / "sweep") for learner in ("grpo", "mappo"))]) == 0
    table = capsys.readouterr().out.split("best first\n\n")[1].split("\n\n")[0]
    for learner in ("grpo", "mappo"):
        assert all(f"lr={lr} learner={learner} | 1 |" in table for lr in (1, 2)), table


def test_a_swept_option_without_a_key_is_shown_by_the_folders_name(make_run, capsys):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        folder = make_run(f"experiment={name},seed=0", {0: lr}, lr=lr)
    noted = {"hydra": {"overrides": {"task": ["+experiment=a,b"]}}}
    (folder.parent / "multirun.yaml").write_text(json.dumps(noted))
    assert cli.main(["report", str(folder.parent)]) == 0
    printed = capsys.readouterr().out
    assert "| b | 1 | 0.200 |" in printed and "| a | 1 | 0.100 |" in printed


def test_a_sweeps_note_that_is_damaged_is_named(make_run, capsys):
    sweep = sweep_of(make_run, ["seed=0,1"], l1=(0.2, 0.3))
    (sweep / "multirun.yaml").write_text("hydra: [")
    assert cli.main(["report", str(sweep)]) == 2
    assert "multirun.yaml: cannot be read" in capsys.readouterr().err


def test_groups_of_one_option_are_told_apart_by_their_settings(make_run):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        make_run(name, {0: 0.5}, critic={"lr": lr})
    folder = make_run("c", {0: 0.4}, learner="happo", critic={"lr": 0.1})
    found = groups.groups(runs.load_all([str(folder.parent)]))
    names = [group.name for group in found]
    assert names == ["learner=grpo critic.lr=0.1", "learner=grpo critic.lr=0.2", "learner=happo critic.lr=0.1"]


def test_a_run_that_has_not_begun_hides_no_curve(make_run):
    make_run("one", {0: 0.5, 4: 0.6})
    folder = make_run("two", {}, 1, finished=False)
    (group,) = comparison(runs.load_all([str(folder.parent)]))["groups"]
    assert list(group["curves"]["val/team/vote"]) == [0, 4]
    assert group["seconds"]["runs"] == group["tokens"]["runs"] == 1 and group["unfinished"] == 1
    assert "| 2 (1 not finished) |" in markdown(comparison(runs.load_all([str(folder.parent)])), "x")


def test_options_that_set_up_one_class_are_told_apart_by_the_folders_of_a_sweep(make_run):
    """As learner=gspo sets up grpo."""
    folders = [
        make_run(f"learner={name},seed=0", {0: 0.5}, critic={"lr": lr}) for name, lr in (("grpo", 1), ("gspo", 2))
    ]
    found = runs.load_all(list(map(str, folders)))
    assert [groups.value_of(run, "learner") for run in found] == ["grpo", "gspo"]
