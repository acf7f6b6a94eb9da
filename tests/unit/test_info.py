"""``marl info``: everything that can be named, from the registries and the schema."""

import json
from dataclasses import dataclass

import pytest
import yaml
from omegaconf import OmegaConf

from marl import catalogue, cli
from marl.config import short_help
from marl.config.errors import ConfigError, plain
from marl.envs import ENVIRONMENTS, GAMES
from marl.learners import CREDITS, LEARNERS
from marl.methods import METHODS
from marl.runners import RUNNERS
from marl.utils.numbers import bounded, count

BUILT_IN = {"learners": LEARNERS, "runners": RUNNERS, "credits": CREDITS, "methods": METHODS, "worlds": ENVIRONMENTS}


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_registered_class_is_listed_with_all_its_keys(kind):
    found = {entry.name: entry for entry in catalogue.entries(kind)}
    for name in BUILT_IN[kind].names():
        keys = {key.name for key in found[name].keys}
        assert keys == set(BUILT_IN[kind].get(name).Config.__dataclass_fields__) - {"name"}
        assert found[name].file.endswith(".py") and found[name].use.endswith(f"={name}")


def test_every_option_of_hydra_is_listed():
    known = short_help.option_names()
    for kind in ("learner", "runner", "credit", "method"):
        assert known[kind] <= {entry.name for entry in catalogue.entries(f"{kind}s")}
    assert {entry.name for entry in catalogue.entries("worlds")} >= {*GAMES.names(), *ENVIRONMENTS.names()}
    assert {f"hardware={name}" for name in known["hardware"]} <= {entry.name for entry in catalogue.entries("engines")}


def test_an_entry_has_defaults_texts_and_papers():
    happo = catalogue.named("learners", "happo")
    keys = {key.name: key for key in happo.keys}
    assert (keys["clip"].default, keys["clip"].doc) == (
        "2.0",
        "M is kept between its inverse and this; null for the exact form.",
    )
    assert keys["ratio"].type == "sequence | geometric | token" and keys["gamma"].default == "${algorithm.gamma}"
    assert keys["lam"].doc.startswith("GAE's lambda"), "a parent's text"
    assert happo.papers == ["2109.11251", "2504.16129"]
    assert catalogue.named("learners", "dapo").papers == ["2503.14476"]
    assert (
        catalogue.named("credits", "influence").papers == ["2502.18439"]
        and not catalogue.named("credits", "own").papers
    )
    assert catalogue.named("learners", "dr_grpo").summary.startswith("Dr. GRPO (arXiv:2503.20783): no division")


@pytest.mark.parametrize("kind", catalogue.KINDS)
def test_every_key_has_a_text(kind):
    """Its own, or those of its choices; of the package's classes, for other tests register their own."""
    built_in = [entry for entry in catalogue.entries(kind) if entry.file.startswith("marl/") or not entry.file]
    silent = [f"{entry.name}.{key.name}" for entry in built_in for key in entry.keys if not key.doc]
    assert not silent, "write a docstring below these fields"


def test_the_texts_of_choices_stand_for_a_key_without_one():
    keys = {key.name: key for key in catalogue.named("runners", "debate").keys}
    assert "majority: The most frequent answer; verifier: The answer with the largest sum" in keys["decide"].doc
    assert keys["num_rounds"].doc.startswith("Number of rounds")


def test_fields_without_a_text_have_none():
    @dataclass
    class Config:
        name: str
        laps: int = bounded(3, count())

    assert [(key.name, key.default, key.doc) for key in catalogue.keys_of(Config)] == [("laps", "3", "")]


def test_a_wrong_kind_or_name_is_answered_with_the_nearest():
    for words, said in (
        (("learnrs",), "'learners'"),
        (("runners", "debaet"), "'debate'"),
        (("worlds", "zzz"), "known: verifier"),
    ):
        with pytest.raises(ConfigError, match=said):
            catalogue.named(*words) if len(words) == 2 else catalogue.entries(*words)


def test_the_command(capsys):
    assert cli.main(["info"]) == 0
    page = capsys.readouterr().out
    assert all(kind in page for kind in catalogue.KINDS)
    assert cli.main(["info", "learners"]) == 0 and "arXiv:1803.11485" in capsys.readouterr().out
    assert cli.main(["info", "learners", "happo"]) == 0
    page = capsys.readouterr().out
    assert "learner.clip = 2.0" in page and "https://arxiv.org/abs/2109.11251" in page
    assert cli.main(["info", "settings", "controller", "--json"]) == 0
    (controller,) = json.loads(capsys.readouterr().out)
    assert {"name": "ledger", "type": "bool", "default": "true"}.items() <= next(
        key for key in controller["keys"] if key["name"] == "ledger"
    ).items()
    assert cli.main(["info", "learnrs"]) == 2 and "Did you mean 'learners'?" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["learners", "runners", "credits", "methods"])
def test_a_class_is_printed_as_a_file_that_changes_nothing(kind, capsys):
    for name in BUILT_IN[kind].names():
        config = BUILT_IN[kind].get(name).Config
        if not catalogue.named(kind, name).keys:
            continue
        assert cli.main(["info", kind, name, "--yaml"]) == 0
        written = yaml.safe_load(capsys.readouterr().out)
        assert written.pop("defaults") == [name]
        own = OmegaConf.structured(config(name=name))
        assert written.keys() == set(own) - {"name"}
        assert plain(OmegaConf.merge(own, written)) == plain(own)


def test_environments_are_the_worlds(capsys):
    assert catalogue.entries("environments") == catalogue.entries("worlds")
    assert (
        cli.main(["info", "learners", "--yaml"]) == 2 and "marl info learners happo --yaml" in capsys.readouterr().err
    )
