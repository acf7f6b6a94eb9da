"""Launchers of sweeps: finished runs are skipped only with the same settings, each run has a folder, and toy models are made."""

import json
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from marl.config.errors import ConfigError, ModelMissing
from marl.config.identity import identity_of
from marl.config.sweeps import names_its_folder
from marl.quickstart import assets

Plugins.instance()  # loads Hydra's own plugins anew, so ours must follow
from marl.sweep import Job, RayLauncher


class Launcher(RayLauncher):
    """Composes nothing: a run's settings are its words, and those of ``settings``."""

    def __init__(self, folder, settings="", **resources):
        super().__init__(**resources)
        self.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}, "overrides": {"task": ["seed=0,1"]}}})
        self.settings, self.launched = settings, {}

    def composed(self, words):
        always = ["trainer.resume_changes=[]", "trainer.total_training_steps=4", "agents={}"]
        always += ["trainer.nnodes=1", "trainer.device=cpu"]
        return OmegaConf.from_dotlist([*always, *filter(None, [self.settings]), *words])

    def setup_of(self, job):
        return SimpleNamespace(config=self.composed(job.words), ranks_by_pool={"a": 1})

    def launch_all(self, jobs, first):
        self.launched = jobs
        for job in jobs.values():
            job.folder.mkdir(parents=True, exist_ok=True)
            record = identity_of(self.composed(job.words)) | {"finished": "now"}
            (job.folder / "run.json").write_text(json.dumps(record))
        return {index: job.ended() for index, job in jobs.items()}

    def train(self):
        """Folders of the runs that are trained, and every error."""
        results = self.launch([["seed=0"], ["seed=1"]], 0)
        return [job.folder.name for job in self.launched.values()], [result._return_value for result in results]


def test_a_finished_run_is_skipped_only_with_the_same_settings(tmp_path, capfd):
    assert Launcher(tmp_path).train() == (["seed=0", "seed=1"], [None, None])
    assert Launcher(tmp_path, "trainer.save_freq=1").train() == ([], [None, None])
    assert "2 of 2 runs" in capfd.readouterr().out
    for setting in ("lr=2", "trainer.total_training_steps=5"):
        trained, errors = Launcher(tmp_path, setting).train()
        assert trained == [] and all(isinstance(error, ConfigError) for error in errors)
        assert setting.partition("=")[0] in str(errors[0]) and "hydra.sweep.dir" in str(errors[0])
        assert "0 of 2 runs have finished, 2 failed" in capfd.readouterr().out


def test_no_run_starts_where_one_is_refused(tmp_path):
    class Strict(Launcher):
        def setup_of(self, job):
            if {"seed=a", "seed=b"} & {*job.words}:
                raise ConfigError("seed: expected a number")
            return super().setup_of(job)

    launcher = Strict(tmp_path)
    with pytest.raises(
        ConfigError, match="2 of the sweep's runs are refused, so none starts:\nseed=a; seed=b: seed: expected"
    ):
        launcher.launch([["seed=0"], ["seed=a"], ["seed=b"]], 0)
    assert launcher.launched == {}
    launcher.launch([["seed=0"], ["seed=1"]], 0)
    assert len(launcher.launched) == 2


def test_a_finished_run_may_have_been_of_other_packages(tmp_path, monkeypatch):
    Launcher(tmp_path).train()
    monkeypatch.setattr("marl.config.identity.versions", lambda: {"marl": "99"})
    assert Launcher(tmp_path).train() == ([], [None, None])


def test_a_damaged_record_is_no_finished_run(tmp_path):
    for name, text in (("seed=0", '{"finished": "no'), ("seed=1", "[1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    assert Launcher(tmp_path).train() == (["seed=0", "seed=1"], [None, None])


def test_a_folder_of_the_users_is_taken_as_composed(tmp_path):
    launcher = Launcher(tmp_path)
    for word in ("trainer.default_local_dir=mine/run-${seed}", "++trainer.default_local_dir=mine/run-${seed}"):
        job = launcher.job_of(tmp_path, ["seed=1", word.lstrip("+")], ["seed"])
        assert str(job.folder) == "mine/run-1" and job.words[-1] == 'trainer.default_local_dir="mine/run-1"'
        assert names_its_folder([word])
    with pytest.raises(ConfigError, match=r"mine: 2 runs .*hydra.sweep.dir"):
        launcher.launch([[f"seed={seed}", "trainer.default_local_dir=mine"] for seed in (0, 1)], 0)


def test_hydra_reads_a_runs_folder_as_it_is(tmp_path):
    job = Launcher(tmp_path).job_of(tmp_path / "été, a=b", ["seed=1"], ["seed"])
    assert OverridesParser.create().parse_override(job.words[-1]).value() == str(tmp_path / "été, a=b" / "seed=1")


def test_side_by_side_runs_get_the_toy_models_that_are_missing(tmp_path, monkeypatch):
    """On a fresh clone, as where they train one after another."""
    made = []
    trainer = {"nnodes": 1, "device": "cpu"}
    config = OmegaConf.create({"assets": f"{tmp_path}/toy", "task": "smudged_note", "seed": 5, "trainer": trainer})

    def prepare(config):
        if not made:
            raise ModelMissing("actor_rollout_ref.model.path", str(tmp_path / "toy" / "model"))
        return SimpleNamespace(config=config, ranks_by_pool={"a": 2})

    monkeypatch.setattr("marl.preflight.prepare.prepare", prepare)
    monkeypatch.setattr(assets, "ensure", lambda folder, recipe, seed, on_step: made.append((folder, seed)))
    for given, expected in (({}, (2, 0)), ({"num_cpus": 0}, (0, 0)), ({"num_cpus": 3, "num_gpus": 0.5}, (3, 0.5))):
        made.clear()
        launcher = RayLauncher(**given)
        monkeypatch.setattr(launcher, "composed", lambda _: config)
        assert launcher.resources_of(Job((), tmp_path)) == expected and made == [(tmp_path / "toy", 5)]
