"""``marl compare`` and ``marl report``: numbers by hand, from the files of runs."""

import fcntl
import json
import tracemalloc
from functools import partial

import pytest

from marl import cli
from marl.config.errors import ConfigError
from marl.report import readme, runs
from marl.report.comparison import comparison, costs, groups, markdown
from marl.utils.manifest import seal
from tests.run_folders import write_run


@pytest.fixture
def make_run(tmp_path):
    return partial(write_run, tmp_path)


def turn(agent, round, score, **more):
    known = {"task": "t", "sample": 0, "answers": True, "kept": True, "acc": None, "reward": None, "advantage": None}
    return known | {"agent": agent, "round": round, "score": score} | more


def test_runs_of_one_setting_are_one_group_with_median_and_spread(make_run):
    for seed, vote in enumerate((0.2, 0.4, 0.9)):
        make_run(f"grpo{seed}", {0: 0.1, 4: vote}, seed)
    make_run("mappo0", {0: 0.1, 4: 0.7}, 0, "mappo")
    found = runs.load_all([str(make_run("mappo1", {0: 0.3, 2: 0.5}, 1, "mappo").parent)])
    result = comparison(found)
    mappo, grpo = result["groups"]  # the best first
    assert (grpo["name"], mappo["name"]) == ("learner=grpo", "learner=mappo") and grpo["seeds"] == [0, 1, 2]
    assert grpo["last"]["val/team/vote"] == {"median": 0.4, "min": 0.2, "max": 0.9, "runs": 3}
    assert mappo["last"]["val/team/vote"]["median"] == 0.6
    assert list(mappo["curves"]["val/team/vote"]) == [0], "the steps that all of its runs have"
    assert result["differences"] == {"learner.name": ["grpo"] * 3 + ["mappo"] * 2}
    text = markdown(result, "Comparison")
    assert (
        "| learner=grpo | 3 | 0.400 [0.200, 0.900] | 2.0 [2.0, 2.0] | 40 [40, 40] |" in text
        and "`learner.name` | grpo" in text
    )


def test_runs_that_did_not_end_move_no_median_and_cut_no_curve(make_run):
    done = [make_run(f"seed{seed}", {0: 0.1, 2: 0.4, 4: 0.8}, seed) for seed in (0, 1)]
    dead = make_run("seed2", {0: 0.0}, 2, finished=False)
    result = comparison([runs.load(folder) for folder in (*done, dead)])
    (group,) = result["groups"]
    assert group["last"]["val/team/vote"] == {"median": 0.8, "min": 0.8, "max": 0.8, "runs": 2}
    assert list(group["curves"]["val/team/vote"]) == [0, 2, 4] and group["left_out"] == [str(dead)]
    assert group["seconds"]["runs"] == group["tokens"]["runs"] == 2
    text = markdown(result, "Comparison")
    assert f"`{dead}`: ended before its last step, at step 0 of 4; left out of medians and curves." in text
    assert "| 3 (1 not finished) | 0.800 [0.800, 0.800] |" in text


def test_runs_of_which_none_has_ended_are_shown_after_those_that_have(make_run):
    make_run("mappo0", {0: 0.1, 2: 0.9}, 0, "mappo", finished=False)
    make_run("grpo0", {0: 0.1, 4: 0.5})
    result = comparison(runs.load_all([str(make_run("grpo1", {0: 0.1, 4: 0.5}, 1).parent)]))
    done, begun = result["groups"]
    assert (done["name"], begun["name"]) == ("learner=grpo", "learner=mappo")
    assert begun["last"]["val/team/vote"]["median"] == 0.9 and begun["left_out"] == []


def test_a_seed_that_counts_twice_is_named(make_run):
    folders = [make_run(f"grpo{index}", {0: 0.1, 4: 0.5}, seed) for index, seed in enumerate((0, 1, 0))]
    text = markdown(comparison([runs.load(folder) for folder in folders]), "Comparison")
    assert text.count("runs of seed") == 1 and "has 2 runs of seed 0" in text
    text = markdown(comparison([runs.load(folder) for folder in folders[:2]]), "Comparison")
    assert "runs of seed" not in text


def test_costs_are_sums_over_the_steps_until_there_is_a_summary(make_run):
    folder = make_run("one", {0: 0.1, 1: 0.2, 2: 0.3})
    found = costs(runs.load(folder))
    assert (found["steps"], found["seconds_in_steps"], found["tokens"]) == (2, 4.0, 2 * 4 * 2 * 5)
    assert found["seconds_by_phase"] == {"step": 4.0, "update": 3.0}
    (folder / "summary.json").write_text(json.dumps({"sampled_tokens": 77, "seconds": 9.5}))
    found = costs(runs.load(folder))
    assert (found["tokens"], found["seconds"], found["seconds_in_steps"]) == (77, 9.5, 4.0)


def test_transitions_and_credit_by_hand(make_run):
    folder = make_run("one", {0: 0.1})
    said = [turn("a", 1, 1.0), turn("a", 2, 0.0), turn("b", 1, 0.0), turn("b", 2, 1.0), turn("b", 3, 1.0)]
    said += [turn("a", 1, 0.0, sample=1), turn("a", 3, 0.5, sample=1), turn("a", 2, 1.0, sample=1, kept=False)]
    got = runs.transitions(said)
    assert runs.transitions(reversed(said)) == got, "the rounds count, not the order of the lines"
    assert got["1 → 2"] == {
        "wrong → wrong": 0,
        "wrong → right": 0.5,
        "right → wrong": 0.5,
        "right → right": 0,
        "answers": 2,
    }
    assert got["2 → 3"]["right → right"] == 1.0 and got["1 → 3"]["wrong → wrong"] == 1.0
    (folder / "validation").mkdir()
    (folder / "rollouts").mkdir()
    (folder / "validation" / "4.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in said) + '{"agent": "a", "rou'
    )
    with open(folder / "validation" / "4.jsonl", "ab") as file:
        file.write("é".encode()[:1])  # within a letter of two bytes
    trained = [
        turn("a", 1, 1.0, reward=2.0, advantage=-1.0),
        turn("a", 1, 0.0, reward=0.0, advantage=3.0),
        turn("a", 1, 0.5),
    ]
    (folder / "rollouts" / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trained))
    found = runs.evidence(runs.load(folder))
    assert found["transitions"] == got
    assert found["credit"] == {
        "a, round 1": {"turns": 3, "score": 0.5, "reward": 1.0, "advantage": 1.0, "size of advantage": 2.0}
    }


def test_transitions_ask_acc_before_the_score():
    """Rewards from 0 to 100, as a dump holds them; an older dump has no acc."""
    lines = [
        turn("a", 1, 40.0, acc=0.0),
        turn("a", 2, 90.0, acc=1.0),
        turn("c", 1, 0.5, acc=1.0),
        turn("c", 2, 2.0, acc=0.5),
    ]
    assert runs.transitions(lines)["1 → 2"]["wrong → right"] == runs.transitions(lines)["1 → 2"]["right → wrong"] == 0.5
    old = [turn("a", 1, 0.5, acc=None), turn("a", 2, 1.0, acc=None)]
    assert runs.transitions(old)["1 → 2"]["wrong → right"] == 1.0


def test_a_run_that_was_moved_keeps_its_dumps(make_run, tmp_path):
    folder = make_run("one", {0: 0.1})
    (folder / "validation").mkdir()
    (folder / "validation" / "10.jsonl").touch()
    (folder / "validation" / "9.jsonl").touch()
    moved = folder.rename(tmp_path / "moved")
    assert runs.dumps_of(runs.load(moved), "validation_data_dir") == [
        (9, moved / "validation" / "9.jsonl"),
        (10, moved / "validation" / "10.jsonl"),
    ]


def test_runs_that_have_not_ended_are_said_to_be_so(make_run, capsys):
    make_run("one", {0: 0.5})
    ended, killed = make_run("two", {0: 0.5}, 1), make_run("three", {0: 0.5, 3: 0.5}, 2, finished=False)
    with open(ended / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["compare", str(ended), str(killed), str(ended.parent)]) == 0
    text = capsys.readouterr().out
    assert f"`{ended}`: still being written, at step 0 of 4" in text
    assert f"`{killed}`: ended before its last step, at step 3 of 4; left out of medians and curves." in text
    assert "one`:" not in text
    assert text.count(f"`{ended}` | 1 |") == 1, "each run once"


def test_a_line_that_is_still_written_is_left_out_and_others_must_be_whole(make_run):
    folder = make_run("one", {0: 0.5})
    file = folder / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"step": 1, "da')
    assert list(runs.load(folder).steps) == [0]
    for bad, said in (
        ('{"step": 1}\n', "line 2: 'data'"),
        ("\x00\x01\n", "line 2"),
        ("[]\n", "line 2"),
    ):
        file.write_text(whole + bad)
        with pytest.raises(ConfigError, match=said):
            runs.load(folder)
    for content in ("{}", "[]", "5", '{"config": {}}', '{"config": []}', '{"config": {"trainer": 1}}'):
        (folder / "run.json").write_text(content)
        with pytest.raises(ConfigError, match=r"run\.json: no settings"):
            runs.load(folder)
    (folder / "run.json").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match=r"run\.json: cannot be read"):
        runs.load(folder)
    (folder / "run.json").write_text("")
    with pytest.raises(ConfigError, match=r"run\.json: cannot be read"):
        runs.load(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x01\n", b"[]\n", b'{"agent": "a"}\n', b"7\n"])
def test_a_dump_that_is_something_else_is_named(make_run, content):
    folder = make_run("one", {0: 0.5})
    (folder / "validation").mkdir()
    (folder / "validation" / "4.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"4\.jsonl, line 1: .*expected a turn"):
        runs.evidence(runs.load(folder))


@pytest.mark.parametrize("content", ["", "[1]", "null", '{"config": ', '{"config": 5}'])
@pytest.mark.parametrize("command", [["chat"], ["eval"], ["replay", "step=1"], ["report"]], ids=lambda words: words[0])
def test_a_record_that_is_something_else_is_named(make_run, capsys, command, content):
    folder = make_run("one", {0: 0.1})
    (folder / "run.json").write_text(content)
    (folder / "global_step_1").mkdir()
    seal(folder / "global_step_1", {"step": 1})
    assert cli.main([command[0], str(folder), *command[1:]]) == 2
    said = capsys.readouterr().err
    assert "run.json: " in said and "expected" in said and "Traceback" not in said


@pytest.mark.parametrize("content", ["", "[1]", "null", '{"seconds": ', "\x00"])
def test_a_summary_that_is_something_else_is_named(make_run, capsys, content):
    folder = make_run("one", {0: 0.1})
    (folder / "summary.json").write_text(content)
    assert cli.main(["compare", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "summary.json: " in said and "expected" in said and "Traceback" not in said


def test_of_a_dump_no_text_is_kept_in_memory(make_run):
    """A run's dumps may be larger than the memory."""
    folder = make_run("one", {0: 0.5})
    (folder / "rollouts").mkdir()
    text = "x" * 100_000
    said = json.dumps(turn("a", 1, 1.0, input=text, output=text, messages=[text])) + "\n"
    (folder / "rollouts" / "1.jsonl").write_text(said * 100)
    tracemalloc.start()
    found = runs.evidence(runs.load(folder))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["credit"]["a, round 1"]["turns"] == 100 and most < 3_000_000


def test_an_unknown_folder_is_answered_with_the_nearest(make_run, tmp_path, capsys):
    make_run("one", {0: 0.5})
    (tmp_path / "sweep" / "latest").symlink_to("one")
    assert runs.find(tmp_path) == [tmp_path / "sweep" / "one"]
    assert runs.find(tmp_path / "sweep" / "latest") == [tmp_path / "sweep" / "latest"]
    assert cli.main(["report", str(tmp_path / "swep")]) == 2
    assert "no such folder" in (said := capsys.readouterr().err) and "Did you mean 'sweep'?" in said
    (tmp_path / "empty").mkdir()
    assert cli.main(["compare", str(tmp_path / "empty")]) == 2 and "no run below it" in capsys.readouterr().err


def test_a_checkpoints_copy_of_the_record_is_no_run(make_run, tmp_path):
    """A run whose own record is lost is not the sum of its checkpoints."""
    make_run("one", {0: 0.5})
    run = tmp_path / "sweep" / "one"
    for step in (10, 20):
        (run / f"global_step_{step}").mkdir()
        (run / f"global_step_{step}" / "trainer.json").write_text("{}")
        (run / f"global_step_{step}" / "run.json").write_text((run / "run.json").read_text())
    assert runs.find(tmp_path) == [run]
    (run / "run.json").unlink()
    for path in (run, tmp_path):
        with pytest.raises(ConfigError, match="no run below it"):
            runs.find(path)


def test_a_report_is_written_beside_its_runs(make_run, tmp_path, monkeypatch):
    sweep = make_run("one", {0: 0.5, 2: 0.75}).parent
    assert cli.main(["report", str(sweep)]) == 0
    result = json.loads((sweep / "report.json").read_text())
    assert result["groups"][0]["curves"]["val/team/vote"]["2"]["median"] == 0.75
    assert (sweep / "report.md").read_text().startswith("# Report of sweep") and (
        sweep / "report.png"
    ).stat().st_size > 5000
    monkeypatch.setattr("marl.report.comparison.find_spec", lambda name: None)  # matplotlib is not there
    assert cli.main(["compare", str(sweep), "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["comparison.json", "comparison.md"]


def test_runs_that_play_nothing_are_compared_by_their_losses(make_run):
    folder = make_run("one", {})
    lines = [{"step": step, "data": {"agent/a/loss": 1.0 / step, "agent/a/entropy": 2.0}} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group,) = comparison(runs.load_all([str(folder)]))["groups"]
    assert list(group["last"]) == ["agent/a/loss"] and group["last"]["agent/a/loss"]["median"] == 0.5


@pytest.mark.parametrize("worse,better", [
    ({"agent/a/loss": 0.01, "val/agent/a/loss": 3.9}, {"agent/a/loss": 0.6, "val/agent/a/loss": 0.65}),
    ({"val/agent/a/loss": 1.0, "val/agent/a/preference_accuracy": 0.5}, {"val/agent/a/loss": 4.0, "val/agent/a/preference_accuracy": 0.9}),
], ids=["overfitted", "another beta"])  # fmt: skip
def test_runs_without_scores_are_ranked_by_what_they_measure_on_held_out_data(make_run, worse, better):
    for learner, data in (("grpo", worse), ("mappo", better)):
        folder = make_run(learner, {}, 0, learner)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": data}) + "\n")
    found = comparison(runs.load_all([str(folder.parent)]))["groups"]
    assert [group["name"] for group in found] == ["learner=mappo", "learner=grpo"]


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


def test_groups_of_one_option_are_told_apart_by_their_settings(make_run):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        make_run(name, {0: 0.5}, critic={"lr": lr})
    folder = make_run("c", {0: 0.4}, learner="happo", critic={"lr": 0.1})
    found = groups(runs.load_all([str(folder.parent)]))
    names = [group.name for group in found]
    assert names == ["learner=grpo critic.lr=0.1", "learner=grpo critic.lr=0.2", "learner=happo critic.lr=0.1"]


def test_a_run_that_has_not_begun_hides_no_curve(make_run):
    make_run("one", {0: 0.5, 4: 0.6})
    folder = make_run("two", {}, 1, finished=False)
    (group,) = comparison(runs.load_all([str(folder.parent)]))["groups"]
    assert list(group["curves"]["val/team/vote"]) == [0, 4]
    assert group["seconds"]["runs"] == group["tokens"]["runs"] == 1 and group["unfinished"] == 1
    assert "| 2 (1 not finished) |" in markdown(comparison(runs.load_all([str(folder.parent)])), "x")


def test_a_run_without_numbers_says_why(make_run, capsys):
    folder = make_run("one", {})
    assert cli.main(["report", str(folder)]) == 0 and "`file` is not in `trainer.logger`" in capsys.readouterr().out
    (folder / "metrics.jsonl").unlink()
    assert cli.main(["report", str(folder)]) == 0 and not (folder / "report.png").exists()


def test_settings_that_change_nothing_do_not_part_runs(make_run):
    one, two = make_run("one", {0: 0.5}), make_run("two", {0: 0.6}, 3, controller={"num_workers": 4})
    assert len(groups(runs.load_all([str(one), str(two)]))) == 1
    other = make_run("other", {0: 0.6}, 3, data={"seed": 3, "train_files": ["mine.parquet"]})
    assert len(groups(runs.load_all([str(one), str(other)]))) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer": {"total_training_steps": 600}},
        {"trainer": {"total_epochs": 2}},
        {"data": {"val_files": ["hard.parquet"]}},
        {"actor_rollout_ref": {"rollout": {"val_kwargs": {"temperature": 1.0}}}},
    ],
)
def test_runs_of_another_length_or_validation_are_not_one_over_seeds(make_run, settings):
    one, two = make_run("one", {0: 0.5}), make_run("two", {0: 0.6}, 3)
    record = json.loads((two / "run.json").read_text())
    for part, changes in settings.items():
        record["config"].setdefault(part, {}).update(changes)
    (two / "run.json").write_text(json.dumps(record))
    assert len(groups(runs.load_all([str(one), str(two)]))) == 2


def test_a_folder_explains_itself_without_secrets(make_run, monkeypatch):
    folder = make_run("one", {0: 0.5})
    words = [
        "/x/bin/python3.11",
        "/x/bin/marl",
        "train",
        "learner=grpo",
        "a.api_key=hf_abcdefghijklmnopqrstuv",
        "b='c d'",
    ]
    record = json.loads((folder / "run.json").read_text()) | {"modules": {"mine": "/here", "too": "/here"}}
    (folder / "run.json").write_text(json.dumps(record))
    text = readme.write(folder, True, words).read_text()
    assert (
        "\nVERL_USE_EXTERNAL_MODULES=mine,too marl train learner=grpo" in text
        and "abcdefghijklmnop" not in text
        and "/x/bin" not in text
    )
    assert "runner " in text and "learner " in text
    for method, source, learns, others in (
        ("sft", "episodes", False, []),
        ("rft", "play", False, ["runner"]),
        ("hybrid", "play", True, ["runner", "learner", "credit"]),
        ("rl", "play", True, ["runner", "learner", "credit"]),
    ):
        record["config"]["method"] = {"name": method, "source": source}
        (folder / "run.json").write_text(json.dumps(record))
        parts = [f"{part} {record['config'][part]['name']}" for part in ["method", *others][method == "rl" :]]
        assert f"\n{', '.join(parts)}; agents: " in readme.write(folder, learns, words).read_text()
    assert "| content of `data.train_files` | sha256:1 |" in text and "| version of verl | 0.9.1 |" in text
    assert readme.command_line(["/x/python3.12", "-m", "marl.main", "seed=1"]) == "python -m marl.main seed=1"


def test_a_commit_is_named_with_its_changes(tmp_path, monkeypatch):
    assert readme.commit_of(tmp_path) == "unknown: no git repository"
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "a")
        monkeypatch.setenv(f"{name}_EMAIL", "a@b")
    (tmp_path / "file").write_text("1")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        readme.git(tmp_path, *words)
    assert len(readme.commit_of(tmp_path)) == 40
    (tmp_path / "file").write_text("2")
    assert readme.commit_of(tmp_path).endswith(", with changes")
