"""A command of the quick start's configuration on a machine where its tiny model has not been made."""

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from marl.config.errors import ConfigError, ModelMissing
from marl.quickstart import assets
from marl.quickstart.assets import Recipe, prepared
from tests.composing import compose


@pytest.fixture
def small(monkeypatch):
    """The embedded model after two steps of its warm-up."""
    recipe = Recipe("smudged_note", steps=2, batch=2, train_problems=8, test_problems=4)
    monkeypatch.setitem(assets.RECIPES, "smudged_note", recipe)


def test_a_plan_does_not_train_the_tiny_model(small, tmp_path, monkeypatch, capsys):
    from marl.commands import plan

    monkeypatch.setattr(sys, "argv", ["marl plan"])
    words = ["--config-name", "quickstart", f"assets={tmp_path}/made", "data.train_batch_size=4"]
    assert plan.main(words) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path}/made: the model is not made yet; marl train makes it" in said and "memory of one rank" in said
    assert not (tmp_path / "made").exists()


def test_the_first_run_makes_the_model_and_says_how_far_it_is(small, tmp_path, capsys):
    def prepare(config):
        return config if (tmp_path / "made" / "model" / "config.json").is_file() else no_model(config)

    config = compose(f"assets={tmp_path}/made")
    assert prepared(config, prepare) is config
    first, *steps = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/made: making the model") and steps[-1] == "making the model: 2/2 steps"
    assert prepared(config, prepare) is config and not capsys.readouterr().out


def test_a_long_warm_up_says_four_times_how_far_it_is(capsys):
    for of in (600, 700, 150):
        for step in range(1, of + 1):
            assets.tell_quarters(step, of)
        assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_model_lies_in_a_cache_of_the_users(monkeypatch):
    for name in ("MARL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    places = [compose().assets]
    for name in ("XDG_CACHE_HOME", "MARL_CACHE"):
        monkeypatch.setenv(name, f"/of/{name}")
        places.append(compose().assets)
    model = "smudged_note-seed0"
    assert places == [
        f"/home/somebody/.cache/marl/{model}",
        f"/of/XDG_CACHE_HOME/marl/{model}",
        f"/of/MARL_CACHE/{model}",
    ]


def test_a_cache_that_cannot_be_made_is_named(small):
    with pytest.raises(ConfigError, match=r"^assets=/dev/null/marl/made: cannot be made: .*MARL_CACHE"):
        assets.ensure(Path("/dev/null/marl/made"), assets.RECIPES["smudged_note"], 0)


def test_the_quick_start_says_how_far_it_is_in_a_pipe_too(monkeypatch):
    from marl.quickstart import __main__ as quickstart

    monkeypatch.setattr(quickstart, "console", Console(file=StringIO(), width=200))
    warm, training = quickstart.Bar("warming up the tiny model"), quickstart.Bar("training")
    for step in range(1, 701):
        warm(step, 700)
    for step in range(1, 4):
        training(step, 3, "vote 0.50")
    printed = quickstart.console.file.getvalue().splitlines()
    assert (
        printed[:2] == ["warming up the tiny model 70/700", "warming up the tiny model 140/700"] and len(printed) == 13
    )
    assert printed[-1] == "training 3/3 vote 0.50"


def no_model(config):
    raise ModelMissing("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)


@pytest.mark.parametrize("path", ["mine", "made/modell"])
def test_a_model_of_the_users_own_is_not_made(small, tmp_path, capsys, path):
    config = compose(f"assets={tmp_path}/made", f"actor_rollout_ref.model.path={tmp_path}/{path}")
    with pytest.raises(ConfigError, match=f"{path}: no config.json there; expected a folder"):
        prepared(config, no_model)
    assert not (tmp_path / "made").exists() and not capsys.readouterr().out


@pytest.mark.parametrize("beside", [{}, {"settings.json": "{}"}, {"settings.json": '{"task": "game", "seed": 0}'}])
def test_other_files_are_never_removed(small, tmp_path, capsys, beside):
    """A folder of the user's, even one with settings in it, or one that quick start's runs went into."""
    folder = tmp_path / "outputs"
    (folder / "run").mkdir(parents=True)
    for name, text in beside.items():
        (folder / name).write_text(text)
    config = compose(f"assets={folder}")
    for attempt in (
        lambda: prepared(config, no_model),
        lambda: assets.ensure_for(config, renew=True),
        lambda: assets.ensure(folder, assets.RECIPES["smudged_note"], 0),
    ):
        with pytest.raises(ConfigError, match="outputs: holds other files; name a new or empty folder"):
            attempt()
    assert {path.name for path in folder.iterdir()} == {"run", *beside} and not capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


def test_files_that_appear_while_the_model_is_made_stay(small, tmp_path):
    folder = tmp_path / "made"

    def on_step(done, of):
        folder.mkdir(exist_ok=True)
        (folder / "run").touch()

    with pytest.raises(ConfigError, match="holds other files"):
        assets.ensure(folder, assets.RECIPES["smudged_note"], 0, on_step)
    assert (folder / "run").exists() and [path.name for path in tmp_path.iterdir()] == ["made"]


def test_only_the_quick_start_makes_another_seeds_model_again(small, tmp_path, capsys):
    folder, recipe = tmp_path / "made", assets.RECIPES["smudged_note"]
    (tmp_path / "made.making-of another host").mkdir()
    assets.ensure(folder, recipe, 0)
    (folder / "model" / "config.json").unlink()
    config = compose(f"assets={folder}", "seed=1")
    for refused in (lambda: prepared(config, no_model), lambda: assets.ensure_for(config)):
        with pytest.raises(
            ConfigError, match=r"made: holds those of task=smudged_note seed=0.*expected task=smudged_no"
        ):
            refused()
    assert not capsys.readouterr().out and not assets.is_made(folder, assets.fingerprint_of(recipe, 0))
    assert assets.ensure_for(config, renew=True) and assets.is_made(folder, assets.fingerprint_of(recipe, 1))
    assert {path.name for path in tmp_path.iterdir()} == {"made", "made.making-of another host"}


def test_another_error_comes_before_the_model_is_made(small, tmp_path, monkeypatch, capsys):
    from marl.commands import plan

    monkeypatch.setattr(sys, "argv", ["marl plan"])
    words = ["--config-name", "quickstart", f"assets={tmp_path}/made", "trainer.total_training_steps=-3"]
    assert plan.main(words) == 2 and "trainer.total_training_steps=-3" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_model_that_another_run_made_meanwhile_stays(small, tmp_path, monkeypatch):
    folder, recipe = tmp_path / "made", assets.RECIPES["smudged_note"]
    assets.ensure(folder, recipe, 0)
    (folder / "model" / "read by a run").touch()
    answers = iter([False, True])
    monkeypatch.setattr(assets, "is_made", lambda *_: next(answers))
    assets.ensure(folder, recipe, 0)
    assert (folder / "model" / "read by a run").exists() and [path.name for path in tmp_path.iterdir()] == ["made"]


def test_marl_quickstart_may_make_its_model_again(small, tmp_path, monkeypatch):
    from marl.quickstart import __main__ as quickstart

    def trained(config, progress):
        raise KeyboardInterrupt

    assets.ensure(tmp_path / "made", assets.RECIPES["smudged_note"], 0)
    monkeypatch.setattr(quickstart.marl_main, "run", trained)
    with pytest.raises(KeyboardInterrupt):
        quickstart.warm_up_and_train(compose(f"assets={tmp_path}/made", "seed=1"))
    assert assets.fingerprint_in(tmp_path / "made")["seed"] == 1
