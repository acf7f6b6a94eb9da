"""``marl collect``: a team plays, the best episodes are kept, and imitating them teaches."""

import json
import re
import shlex
from pathlib import Path

import pytest

from marl import main as marl_main
from marl.commands import collect, evaluate
from marl.quickstart.assets import Recipe, ensure
from tests.composing import compose

QUICK = ("--config-name", "quickstart")


def lines_in(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def team_scores(path):
    return {(line["task"], line["sample"]): line["team_score"] for line in lines_in(path)}


@pytest.mark.slow
def test_an_untrained_team_is_collected_from(cold_assets, tmp_path, monkeypatch, capsys):
    """All episodes without a filter, as many as asked for, with what tells where they come from; then nothing is kept."""
    monkeypatch.chdir(tmp_path)
    words = [*QUICK, f"assets={cold_assets}", "task=validation", "n=3"]
    assert collect.main([*words, "--out", "all.jsonl"]) == 0
    scores = team_scores("all.jsonl")
    assert set(scores) == {(f"val/{task}", sample) for task in range(8) for sample in range(3)}
    assert {(line["agent"], line["round"]) for line in lines_in("all.jsonl")} == {
        (agent, round) for agent in ("alice", "carol") for round in (1, 2)
    }
    told = Path("all.README.md").read_text()
    assert "| episodes played | 24 |" in told and "| episodes kept | 24 |" in told and f"`{cold_assets}/model`" in told
    assert re.search(r"content of `.*/test.parquet` \| sha256:[0-9a-f]{64}", told) and "commit of marl" in told
    capsys.readouterr()
    assert collect.main([*words, "--filter-reward", "2", "--out", "none.jsonl"]) == 2
    assert "none of 24 episodes is kept, the best score is" in capsys.readouterr().err
    assert not Path("none.jsonl").exists() and not Path("none.README.md").exists()


def trained(assets, folder, *words):
    marl_main.run(
        compose(f"assets={assets}", f"trainer.default_local_dir={folder}", "resources.one_process=true", *words)
    )
    return str(folder)


@pytest.mark.slow
def test_imitating_the_best_episodes_of_an_untrained_team_teaches(tmp_path, monkeypatch):
    """From half a warm start, on held-out problems, over what chance gives."""
    monkeypatch.chdir(tmp_path)
    assets = tmp_path / "assets"
    ensure(assets, Recipe("smudged_note", steps=300, batch=32, train_problems=512, test_problems=256), seed=0)
    words = [*QUICK, f"assets={assets}", "n=8", "--filter-reward", "1", "--best-of", "2", "--out", "best.jsonl"]
    assert collect.main(words) == 0
    assert set(team_scores("best.jsonl").values()) == {1.0}
    run = trained(
        assets, tmp_path / "run", "method=sft", "method.source=episodes", "data.train_files=[best.jsonl]", "data.val_files=null",
        "trainer.total_training_steps=60",
    )  # fmt: skip
    task = f"task={assets}/test.parquet"
    first = trained(
        assets, tmp_path / "start", "trainer.total_training_steps=1", "actor_rollout_ref.actor.optim.lr=1e-9"
    )
    (before,) = evaluate.run([first, task, "n=4"])["teams"]
    (after,) = evaluate.run([run, task, "n=4"])["teams"]
    assert after["interval"].low > before["interval"].high


@pytest.mark.slow
def test_a_run_is_collected_from_as_its_command_says_again(cold_assets, tmp_path, monkeypatch):
    """Its training tasks by default, with the weights of the checkpoint that is named."""
    monkeypatch.chdir(tmp_path)
    words = ("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null")
    small = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.entropy_coeff=1")
    run = trained(cold_assets, tmp_path / "run", *words, *small, "actor_rollout_ref.actor.optim.lr_warmup_steps=0")
    assert collect.main([run, "--out", "last.jsonl"]) == 0
    assert len(team_scores("last.jsonl")) == 64 * 2
    program, *typed = shlex.split(re.search(r"```bash\nmarl (.*)\n```", Path("last.README.md").read_text())[1])
    assert program == "collect"
    Path("last.jsonl").rename("was.jsonl")
    Path("last.README.md").unlink()
    assert collect.main(typed) == 0 and lines_in("last.jsonl") == lines_in("was.jsonl")
    assert collect.main([f"{run}/global_step_1", "--out", "first.jsonl"]) == 0
    assert [line["output"] for line in lines_in("first.jsonl")] != [line["output"] for line in lines_in("last.jsonl")]
    assert collect.main([f"{run}/global_step_1", run, "task=validation", "--out", "both.jsonl"]) == 0
    episodes = [line["team"] for line in lines_in("both.jsonl") if "episode" in line]
    assert sorted(episodes) == ["run@1"] * 16 + ["run@2"] * 16
