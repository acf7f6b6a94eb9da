"""A help and a refused configuration import nothing that they do not need: asserted on modules, not on seconds."""

import json
import os
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from marl.config import short_help
from marl.config.composing import name_and_overrides
from marl.config.errors import ConfigError, plain
from marl.config.external import VARIABLE
from marl.config.identity import leaves
from marl.config.keys import known_keys
from marl.config.overrides import hydra_overrides
from marl.config.policies import own_settings
from marl.main import run_composed

HEAVY = ("torch", "tensordict", "transformers", "verl", "ray")
REPORT = """
import runpy, sys
heavy, module, *words = sys.argv[1:]
sys.argv = [module, *words]
try:
    runpy.run_module(module, run_name="__main__")
except SystemExit as end:
    print("code", end.code, "loaded", *sorted(set(heavy.split(",")) & set(sys.modules)), file=sys.stderr)
"""


def start(module, *words, heavy=HEAVY):
    """(what it printed, its code and the heavy modules that it imported) of a process of its own."""
    command = [sys.executable, "-c", REPORT, ",".join(heavy), module, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [("marl.main", "--help"), ("marl.cli", "train", "-h"), ("marl.cli", "--help")])
def test_a_help_imports_not_even_hydra(words):
    began = time.monotonic()
    printed, end = start(*words, heavy=(*HEAVY, "hydra", "omegaconf", "numpy"))
    assert "usage:" in printed and end.split() == ["code", "0", "loaded"]
    assert time.monotonic() - began < 20  # a tenth of a second on an idle machine


GROUPS = """
import json
import os
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
import marl.main
from marl.config.overrides import hydra_overrides
from marl.config.short_help import GROUPS
with initialize_config_module("marl.configs", version_base="1.3"):
    compose("quickstart", overrides=hydra_overrides([]))
    known = GlobalHydra.instance().config_loader().get_group_options
    print(json.dumps({group: known(group) for group in GROUPS}))
"""


@pytest.mark.slow
def test_the_help_names_every_option_that_hydra_knows():
    """Asked of a process of its own, because tests register further options."""
    done = subprocess.run([sys.executable, "-c", GROUPS], capture_output=True, text=True, timeout=120, check=True)
    known = {group: set(names) for group, names in json.loads(done.stdout.splitlines()[-1]).items()}
    assert short_help.option_names() == known
    assert all(name in short_help.help_text() for name in ("happo", "debate_graph", "shapley", "gpu"))


def test_the_short_help_gives_way_to_further_words_and_own_modules(monkeypatch, capsys):
    short_help.show_help(["--help", "learner=happo"])
    monkeypatch.setenv(VARIABLE, "mine")
    short_help.show_help(["--help"])
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("learner.lm=3", "unknown key 'learner.lm'"),
        ("trainer.nnodes=-1", "trainer.nnodes=-1: expected"),
        ("learner=qmix", "credit=influence: learner=qmix is defined for"),
        ("data.val_files=/nowhere.parquet", "data.val_files=/nowhere.parquet"),
    ],
)
def test_a_refused_configuration_imports_neither_verl_nor_ray(word, said, cold_assets):
    words = ["--config-name", "quickstart", f"assets={cold_assets}", word]
    printed, end = start("marl.main", *words, heavy=(*HEAVY[1:], "torch.distributed.tensor"))
    assert f"configuration error: {said}" in printed and end.split() == ["code", "2", "loaded"]


@pytest.mark.slow
def test_own_modules_still_register_options_before_they_are_read(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from marl.learners import register_learner\nfrom marl.learners.grpo import GRPO\n"
        "@register_learner('my_own')\nclass Mine(GRPO):\n    pass\n"
    )
    monkeypatch.setenv(VARIABLE, "mine")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    printed, _ = start("marl.main", "--config-name", "quickstart", "learner=my_own", "learner.lm=3")
    assert "unknown key 'learner.lm'" in printed


def test_a_plain_run_is_composed_once_and_as_hydra_composes_it(monkeypatch):
    passes, found = [], []
    composed = ConfigLoaderImpl.load_configuration
    monkeypatch.setattr(
        ConfigLoaderImpl,
        "load_configuration",
        lambda *words, **options: passes.append(1) or composed(*words, **options),
    )
    monkeypatch.setattr(sys, "argv", ["marl"])

    def note(config):
        found.append((config, len(passes), HydraConfig.get().job.name is not None))

    words = [
        "--config-name",
        "quickstart",
        "learner=happo",
        "+agents.eve.role='a, b'",
        "~trainer.logger",
        "seed=3",
        "trainer.default_local_dir=x",
    ]
    for further in ([], ["hydra.job.name=mine"]):
        passes.clear()
        assert run_composed(hydra_overrides([*words, *further]), note) == 0
    (once, first, *_), (twice, second, *_) = found
    assert once == twice and OmegaConf.is_struct(once) and "hydra" not in once
    assert (first, second) == (1, 2)


@pytest.mark.parametrize(
    "words",
    [
        ["--cfg", "job"],
        ["-m", "seed=1,2"],
        ["hydra.mode=MULTIRUN"],
        ["+hydra.job.env_set.A=b"],
        ["hydra.searchpath=[pkg://a]"],
    ],
)
def test_flags_and_settings_of_hydra_are_left_to_it(words):
    assert name_and_overrides(hydra_overrides(words)) is None
    assert name_and_overrides(["-cn", "game", "seed=1", "a=--b"]) == ("game", ["seed=1", "a=--b"])


@pytest.mark.slow
def test_every_run_of_a_sweep_has_a_folder_of_its_own_and_a_failed_one_stops_no_other(tmp_path):
    found = []

    def work(config):
        found.append(OmegaConf.to_container(config, resolve=True))
        if config.learner.name == "grpo":
            raise ConfigError("learner=grpo: expected another")

    words = ["-m", "--config-name", "quickstart", "learner=grpo,mappo", f"hydra.sweep.dir={tmp_path}/sweep"]
    assert run_composed(hydra_overrides(words), work) == 2
    assert [config["learner"]["name"] for config in found] == ["grpo", "mappo"]
    assert len({config["trainer"]["default_local_dir"] for config in found}) == 2


def test_a_run_knows_its_job_and_folder_as_from_hydra():
    found = []
    words = ["trainer.project_name='${hydra:job.name}'", "trainer.experiment_name='${hydra:runtime.output_dir}'"]
    for further in ([], ["hydra.job.chdir=false"]):  # composed once, and by hydra.main
        assert run_composed(hydra_overrides([*words, *further]), lambda config: found.append(config.trainer)) == 0
    once, whole = ((trainer.project_name, trainer.experiment_name) for trainer in found)
    assert once == whole == (Path(__file__).stem, os.getcwd())


def test_a_policy_without_changes_is_not_copied_and_changes_stay_its_own(compose_config):
    config = compose_config("+policies.alice.actor.optim.lr=0.5")
    assert own_settings(config, "carol") is config.actor_rollout_ref
    assert own_settings(config, "alice").actor.optim.lr == 0.5 != config.actor_rollout_ref.actor.optim.lr


def test_keys_are_known_as_omegaconf_reads_them():
    ours = OmegaConf.create(files("marl.configs").joinpath("marl.yaml").read_text())
    theirs = OmegaConf.create(files("verl.trainer.config").joinpath("_generated_ppo_trainer.yaml").read_text())
    merged = plain(OmegaConf.merge(theirs, ours, {"model_engine": None}))
    known = known_keys()
    assert dict(leaves(known)).keys() == dict(leaves(merged)).keys()
    assert known["actor_rollout_ref"]["actor"]["_target_"] == merged["actor_rollout_ref"]["actor"]["_target_"]
