"""A command of the quick start's configuration on a machine where its tiny model has not been made."""

import sys

import pytest

from marl.config.errors import ConfigError, ModelMissing
from marl.quickstart import assets
from marl.quickstart.assets import Recipe, prepared
from tests.composing import compose


@pytest.fixture
def small(monkeypatch):
    """The embedded model after two steps of its warm-up."""
    recipe = Recipe("smudged_note", steps=2, batch=2, train_problems=8, test_problems=4)
    monkeypatch.setitem(assets.RECIPES, "smudged_note", recipe)


def test_a_plan_of_the_quick_start_makes_its_model_first(small, tmp_path, monkeypatch, capsys):
    from marl.commands import plan

    monkeypatch.setattr(sys, "argv", ["marl plan"])
    words = ["--config-name", "quickstart", f"assets={tmp_path}/made", "data.train_batch_size=4"]
    assert plan.main(words) == 0
    first = capsys.readouterr().out
    assert f"{tmp_path}/made: making the tiny model" in first and "alice" in first
    weights = (tmp_path / "made" / "model" / "model.safetensors").read_bytes()
    assert plan.main(words) == 0 and "making" not in capsys.readouterr().out
    assert (tmp_path / "made" / "model" / "model.safetensors").read_bytes() == weights


def test_a_model_of_the_users_own_is_not_made(small, tmp_path):
    config = compose(f"assets={tmp_path}/made", f"actor_rollout_ref.model.path={tmp_path}/mine")

    def prepare(config):
        raise ModelMissing("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)

    with pytest.raises(ConfigError, match="mine: no config.json there; expected a folder"):
        prepared(config, prepare)
    assert not (tmp_path / "made").exists()


def test_another_error_comes_before_the_model_is_made(small, tmp_path, monkeypatch, capsys):
    from marl.commands import plan

    monkeypatch.setattr(sys, "argv", ["marl plan"])
    words = ["--config-name", "quickstart", f"assets={tmp_path}/made", "trainer.total_training_steps=-3"]
    assert plan.main(words) == 2 and "trainer.total_training_steps=-3" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_model_that_another_run_made_meanwhile_stays(small, tmp_path, monkeypatch):
    folder, recipe = tmp_path / "made", assets.RECIPES["smudged_note"]
    assets.ensure(folder, recipe, 0)
    (folder / "read by a run").touch()
    answers = iter([False, True])
    monkeypatch.setattr(assets, "is_made", lambda *_: next(answers))
    assets.ensure(folder, recipe, 0)
    assert (folder / "read by a run").exists() and [path.name for path in tmp_path.iterdir()] == ["made"]
