"""``marl collect``: which episodes are kept, what is written, and what is refused before anything is played."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from marl.commands import collect
from marl.config.errors import ConfigError
from marl.config.external import VARIABLE
from marl.config.sources import Source as Examples
from marl.controller.method_data import read_items
from marl.data.columns import use_columns
from marl.evaluation import collect as playing
from marl.evaluation.collect import Collected, Wanted
from marl.evaluation.source import Source
from marl.methods import METHODS
from marl.report import dump
from marl.rewards import only_answer
from marl.types import Score
from tests.builders import episode

BAD = {
    "no output": (["run"], "no --out: expected a new file, such as --out episodes.jsonl"),
    "another format": (["run", "--out", "a.csv"], "--out a.csv: the name ends in '.csv'; expected .jsonl"),
    "a file that exists": (["run", "--out", "old.jsonl"], "old.jsonl exists, and existing files are never overwritten"),
    "its origin exists": (["run", "--out", "new.jsonl"], "new.README.md exists, and existing files are never overwr"),
    "a draft exists": (
        ["run", "--out", "cut.jsonl"],
        "cut.partial.jsonl exists, and existing files are never overwritt",
    ),
    "no folder": (["run", "--out", "old.jsonl/a.jsonl"], "old.jsonl cannot be written; name a file in a folder"),
    "no team": (["--out", "a.jsonl"], "no team: expected a run, a checkpoint or a model; usage: marl collect"),
    "an unknown flag": (["run", "--out", "a.jsonl", "--best", "2"], "--best: expected a run, a checkpoint or a model"),
    "no episodes of a task": (["run", "--out", "a.jsonl", "--best-of", "0"], "--best-of 0: expected a whole number"),
    "no number": (["run", "--out", "a.jsonl", "--filter-reward", "nan"], "--filter-reward nan: expected"),
    "no samples": (["run", "--out", "a.jsonl", "n=0"], "n=0: expected a whole number at least 1"),
    "no such run": (["runn", "--out", "a.jsonl"], "runn: no such folder; Did you mean 'run'?"),
    "no such checkpoint": (
        ["run/global_step_3", "--out", "a.jsonl"],
        "global_step_3: no such checkpoint.",
    ),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.jsonl").touch()
    (tmp_path / "new.README.md").touch()
    (tmp_path / "cut.partial.jsonl").touch()
    (tmp_path / "run").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_to_do(here, name):
    words, said = BAD[name]
    with pytest.raises(ConfigError) as error:
        collect.run(words)
    assert said in str(error.value)
    assert {path.name for path in here.iterdir()} == {"old.jsonl", "new.README.md", "cut.partial.jsonl", "run"}


def scored(task, sample, score):
    record = episode(task, sample, [[score], [score]])
    record.score, record.answer = Score(score, "1"), "1"
    record.task.extra["index"] = task
    return record


def of_teams():
    """Two teams, two samples of two tasks each."""
    found = Collected()
    found.add("one", 4, [scored("t", 0, 1.0), scored("t", 1, 0.25), scored("u", 0, 0.0), scored("u", 1, 0.5)])
    found.add("two", 0, [scored("t", 0, 1.0), scored("t", 1, 1.0), scored("u", 0, 0.25), scored("u", 1, 0.75)])
    return found


def two_teams(monkeypatch, episodes):
    """Two teams that play these episodes; returns them, and how they were asked."""
    played = iter([(episodes[:4], 0.0), (episodes[4:], 0.0)])
    team = SimpleNamespace(controller=None, tasks=list, step=4)
    saved = {"actor_rollout_ref": {"rollout": {"n": 2}}, "data": {"train_max_samples": 7}}
    asked = []

    def opened(source, words):
        assert words[0] == "controller.max_error_rate=1.0", "one's own comes later, and holds"
        return nullcontext(team)

    monkeypatch.setattr(playing, "opened", opened)
    monkeypatch.setattr(playing, "played", lambda *words, validate: asked.append((words[3], validate)) or next(played))
    return [Source(Path("a"), 4, saved), Source(Path("b"), 4, saved)], asked


def kept_by(monkeypatch, wanted, found=None):
    """The episodes that are kept of two teams' by :func:`marl.evaluation.collect.collect`."""
    teams, asked = two_teams(monkeypatch, (found or of_teams()).episodes)
    result = playing.collect(teams, ["one", "two"], [], wanted)
    assert asked == [(wanted.samples or 2, False)] * 2, "with the training's sampling, as often as in training"
    return result


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (Wanted(), [("t", 1.0)] * 3 + [("t", 0.25)] + [("u", score) for score in (0.75, 0.5, 0.25, 0.0)]),
        (Wanted(min_score=0.5), [("t", 1.0)] * 3 + [("u", 0.75), ("u", 0.5)]),
        (Wanted(best_of=1), [("t", 1.0), ("u", 0.75)]),
        (Wanted(min_score=1.0, best_of=2), [("t", 1.0)] * 2),
        (Wanted(best_of=3), [("t", 1.0)] * 3 + [("u", 0.75), ("u", 0.5), ("u", 0.25)]),
    ],
)
def test_the_best_of_all_teams_are_kept(monkeypatch, wanted, kept):
    result = kept_by(monkeypatch, wanted)
    assert [(record.task.id, record.scored.value) for record in result.kept] == kept
    counts = result.counts()
    assert counts["episodes played"] == 8 and counts["episodes kept"] == len(kept)
    assert counts["tasks kept"] == len({task for task, _ in kept}) and counts["accuracy of all"] == 3 / 8


def test_a_filter_that_keeps_nothing_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"--filter-reward 1\.5: none of 8 episodes is kept, the best score is 1;"):
        kept_by(monkeypatch, Wanted(min_score=1.5))


def test_episodes_that_all_failed_are_not_blamed_on_the_filter(monkeypatch):
    found = of_teams()
    for record in found.episodes:
        record.failure = "no server"
    with pytest.raises(
        ConfigError, match=r"^none of 8 episodes is kept: all of them failed, the first: no server; noth"
    ):
        kept_by(monkeypatch, Wanted(), found)


def test_more_than_is_played_is_not_kept(monkeypatch):
    with pytest.raises(
        ConfigError, match="--best-of 5: each task is played 4 times; expected at most as many, raise n"
    ):
        kept_by(monkeypatch, Wanted(best_of=5))


def written_by(monkeypatch, teams, *flags):
    flags, _ = collect.flags_of([*flags, "--out", "best.jsonl"])
    monkeypatch.setattr(collect, "task_files", lambda options, sources: [])
    return collect.played_and_written(flags, collect.Options(), teams, [])


def test_the_first_teams_episodes_outlive_an_interrupted_second_one(here, monkeypatch, capsys):
    episodes = of_teams().episodes
    teams, _ = two_teams(monkeypatch, episodes)
    played = iter([(episodes[:4], 0.0)])

    def interrupted(*words, validate):
        if (found := next(played, None)) is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(playing, "played", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written_by(monkeypatch, teams, "--best-of", "1")
    draft = here / "best.partial.jsonl"
    assert "chosen of the episodes that were played: best.partial.jsonl" in capsys.readouterr().err
    lines = [json.loads(line) for line in draft.read_text().splitlines()]
    assert [(line["task"], line["team_score"]) for line in lines if "episode" in line] == [("t", 1.0), ("u", 0.5)]
    assert not (here / "best.jsonl").exists()


def test_a_file_that_appears_while_teams_play_stays(here, monkeypatch):
    episodes = of_teams().episodes
    teams, _ = two_teams(monkeypatch, episodes)
    monkeypatch.setattr(playing, "best_episodes", lambda found, *_: (here / "best.jsonl").write_text("mine") and found)
    with pytest.raises(ConfigError, match="best.jsonl exists, and existing files are never overwritten"):
        written_by(monkeypatch, teams)
    assert (here / "best.jsonl").read_text() == "mine" and (here / "best.partial.jsonl").stat().st_size


def untrained(monkeypatch, *words):
    """The team that is played, of a configuration."""
    seen = []
    monkeypatch.setattr(collect, "prepared", lambda config, prepare: SimpleNamespace(config=config))
    monkeypatch.setattr(collect, "played_and_written", lambda flags, options, sources, *words: seen.extend(sources))
    assert collect.main(["--config-name", "quickstart", "--out", "a.jsonl", *words]) == 0
    return seen[0]


def test_an_untrained_team_keeps_its_secrets(here, monkeypatch):
    words = ("+reward.reward_kwargs.api_key=sk-1234", "+ray_kwargs.ray_init.runtime_env.env_vars.WORD=blue")
    saved = untrained(monkeypatch, *words).saved
    assert saved["reward"]["reward_kwargs"]["api_key"] == "sk-1234"
    assert saved["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]["WORD"] == "blue"


@pytest.mark.parametrize(
    ("words", "composed", "code"), [(["--cfg", "job"], 0, 0), ([], 0, 2), (["-m", "seed=0,1"], 2, 2)]
)
def test_no_team_or_two_of_a_configuration(here, monkeypatch, capsys, words, composed, code):
    """Hydra prints the configuration, or sweeps."""

    def hydra(words, keep):
        for _ in range(composed):
            keep({})
        return 0

    monkeypatch.setattr(collect, "run_composed", hydra)
    monkeypatch.setattr(collect, "collect_untrained", lambda *_: pytest.fail("played"))
    assert collect.main(["--config-name", "quickstart", "--out", "a.jsonl", *words]) == code
    assert (f"{composed} configurations: expected one" in capsys.readouterr().err) == (code == 2)


def test_the_origin_of_weights_that_are_not_here_is_told(here):
    agents = {"ann": {"policy": "a", "policy_by_round": []}}
    hub = {"agents": agents, "policies": {}}
    served = {"agents": agents, "policies": {"a": {"endpoint": {"base_url": "http://x"}}}}
    (here / "run" / "config.json").touch()
    teams = [Source(Path(path), None, saved, True) for path, saved in (("Q/w", hub), ("~/m", served), ("run", hub))]
    hub_id, endpoints, folder, *_ = collect.origin_of(teams, ["one", "two", "three"], []).values()
    assert hub_id == "a hub id, not a folder here" and endpoints == "none here: endpoints alone answer"
    assert folder.startswith("sha256:")


def test_an_origin_that_cannot_be_told_is_known_before_anything_is_played(here, monkeypatch):
    teams, asked = two_teams(monkeypatch, of_teams().episodes)
    monkeypatch.setattr(collect, "weights_of", lambda source: (here / "gone").read_text())
    with pytest.raises(FileNotFoundError):
        written_by(monkeypatch, teams)
    assert not asked and not (here / "best.jsonl").exists()


def test_the_training_tasks_are_those_that_the_run_reads(here, monkeypatch):
    """A folder of that name is no file of tasks."""
    (here / "train").mkdir()
    (here / "rows.parquet").touch()
    saved = {"data": {"train_files": ["rows.parquet"], "train_max_samples": 7}, "method": {"name": "rl"}}
    monkeypatch.setattr("marl.commands.evaluate.reads_examples", lambda source: False)
    teams = [Source(Path("run"), 4, saved)]
    assert collect.task_files(collect.Options(), teams) == [str(here / "rows.parquet")]
    assert collect.split_limit(collect.Options(), teams, []) == ["data.val_max_samples=7"]
    assert collect.split_limit(collect.Options(task="other.jsonl"), teams, []) == ["data.val_max_samples=-1"]
    fewer = ["data.train_max_samples=3", "++data.train_max_samples=2"]
    assert collect.split_limit(collect.Options(), teams, fewer) == ["data.val_max_samples=2"]
    assert collect.split_limit(collect.Options(task="rows.parquet"), teams, []) == ["data.val_max_samples=-1"]


@pytest.mark.parametrize("start", [["run"], ["--config-name", "quickstart"]])
@pytest.mark.parametrize(
    ("word", "task", "said"),
    [
        ("data.val_max_samples=2", [], "it does not limit task=train; expected data.train_max_samples=2"),
        ("data.train_max_samples=2", ["task=validation"], "task=validation; expected data.val_max_samples=2"),
        ("data.train_max_samples=2", ["task=rows.jsonl"], "task=rows.jsonl; expected data.val_max_samples=2"),
    ],
)
def test_a_limit_on_the_other_split_is_not_ignored(here, capsys, start, word, task, said):
    assert collect.main([*start, "--out", "a.jsonl", *task, word]) == 2
    assert f"configuration error: {word}: " in (error := capsys.readouterr().err) and said in error


def test_an_untrained_team_plays_as_many_tasks_as_it_would_train_on(here, monkeypatch):
    saved = untrained(monkeypatch, "data.train_max_samples=2").saved
    teams = [Source(Path("model"), None, saved, untrained=True)]
    assert collect.split_limit(collect.Options(), teams, []) == ["data.val_max_samples=2"]


def test_the_words_that_imitate_what_is_kept_are_told():
    found = of_teams()
    found.kept = found.episodes[:2]
    text = collect.said(found.counts(), Path("a.jsonl"), Path("a.README.md"))
    assert text.startswith("kept 2 of 8 episodes (1 of 2 tasks); accuracy")
    assert text.endswith("method=sft method.source=episodes data.train_files=[a.jsonl] data.val_files=null\n")


def test_a_team_plays_as_often_as_in_its_training(monkeypatch):
    """Even where it was once: servers that only answer are opened with two. A word, or the option, is heard."""
    opened = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 3}}})
    monkeypatch.setattr(playing, "config_of", lambda source, words: opened)
    trained = Source("a", 4, {"actor_rollout_ref": {"rollout": {"n": 1}}})
    asked = [(trained, [], None), (trained, ["actor_rollout_ref.rollout.n=3"], None), (trained, [], 5)]
    asked += [(Source("model", None), [], None)]
    assert [playing.samples_of(source, words, Wanted(n)) for source, words, n in asked] == [1, 3, 5, 3]


def test_what_is_kept_is_read_by_the_methods(monkeypatch, tmp_path):
    found = of_teams()
    found.kept = [found.episodes[0], found.episodes[7]]
    lines = found.lines()
    assert [(line["team"], line["step"], line["sampled_tokens"]) for line in lines] == [("one", 4, 1)] * 2 + [
        ("two", 0, 1)
    ] * 2
    path = tmp_path / "kept.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = list(dump.read(path, lambda source, truth: only_answer, lambda source, truth: str))
    assert [(record.task.id, record.sample, record.scored.value) for record in again] == [("t", 0, 1.0), ("u", 1, 0.75)]
    sft = METHODS.get("sft")
    method = sft(sft.Config(name="sft", source=Examples.episodes))
    items = read_items(method, Examples.episodes, [str(path)], {"a": ["a"], "b": ["b"]}, "data.train_files")
    assert [turn.text for (example,) in items for side in example.sides for turn in side] == ["1.0", "1.0"]


def test_the_columns_of_tasks_are_not_looked_for_in_episodes(tmp_path):
    """The configuration of the run that played may be kept as it is."""
    data = {"columns": {"prompt": "question", "answer": "a"}, "train_files": ["kept.jsonl"], "val_files": None}
    config = OmegaConf.create({"method": {"source": Examples.episodes}, "data": data})
    use_columns(config)
    assert config.data.columns is None and config.data.train_files == ["kept.jsonl"] and config.data.val_files is None


def test_the_command_of_a_collection_names_the_modules_of_ones_own(here, monkeypatch):
    (here / "mine_c.py").touch()
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv(VARIABLE, "mine_c")
    flags = SimpleNamespace(filter_reward=None, best_of=2, out="a.jsonl")
    said = collect.command_of(flags, collect.Options(task=["a", "b"]), ["run"], ["seed=1"])
    words = "marl collect run 'task=[a,b]' --best-of 2 --out a.jsonl seed=1"
    assert said == f"PYTHONPATH={here}:$PYTHONPATH {VARIABLE}=mine_c {words}"
