"""Sweeps: folders that the same command finds again, finished runs skipped, failures that stop nobody, no secrets on disk."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from marl import main as marl_main
from marl.cluster import side_by_side
from marl.cluster.side_by_side import Task, error_of, run_in_process, too_large
from marl.config.errors import ConfigError, ModelMissing
from marl.config.identity import identity_of
from marl.config.overrides import VERL
from marl.config.sweeps import names_its_folder, run_name, run_words, sweep_name, sweep_words, swept_keys
from marl.quickstart import assets
from marl.utils.run_mark import MARK, own_name, owner_lives

Plugins.instance()  # loads Hydra's own plugins anew, so ours must follow
from marl.sweep import Job, RayLauncher

SECRET = "sk-abcdefghijklmnopqrstuvwx"


def test_the_same_sweep_has_the_same_folder_in_any_order_and_with_more_values():
    words = ["-m", "--config-name", "quickstart", "learner=grpo,mappo", "seed=0,1", "trainer.total_training_steps=4"]
    name = sweep_name(words)
    assert name.startswith("quickstart-learner-seed-")
    more = ["learner=grpo", "seed=0,1", "trainer.total_training_steps=4"]
    assert name == sweep_name(
        [*words[:3], "learner=grpo,mappo,ippo", *words[-1:], "seed=0,1,2", "hydra/launcher=marl_ray"]
    )
    assert name != sweep_name([*words[:3], *more]), "a key less is swept"
    assert name != sweep_name([*words[:-1], "trainer.total_training_steps=5"])
    assert name != sweep_name(["-m", "--config-name=game", *words[3:]])


def test_a_sweep_gets_our_plugins_and_a_single_run_none():
    given = sweep_words(["-m", "seed=0,1"], launcher="marl_local")
    assert given[:2] == ["-m", "seed=0,1"] and "hydra/launcher=marl_local" in given and "hydra/sweeper=marl" in given
    assert any(word.startswith("hydra.sweep.dir=outputs/sweeps/marl-seed-") for word in given)
    own = ["--multirun", "seed=0,1", "hydra/launcher=basic", "hydra.sweep.dir=mine", "hydra/sweeper=basic"]
    assert sweep_words(own, launcher="marl_local") == own
    assert sweep_words(["seed=0", "a=[1,2]"]) == ["seed=0", "a=[1,2]"]


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "seed=0,1", "--config-name", "quickstart"],
        ["seed=0,1", "--config-name=quickstart", "-m"],
        ["-m", "--config-name", "quickstart"],
        ["--config-name", "quickstart", "-m", "seed=0,1"],
    ],
)
def test_flags_may_stand_before_and_behind_a_sweeps_overrides(words):
    read = get_args_parser().parse_args(sweep_words(words, launcher="marl_local"))
    assert read.multirun and read.config_name == "quickstart"
    assert read.overrides[-3:-1] == ["hydra/sweeper=marl", "hydra/launcher=marl_local"]
    assert ("seed=0,1" in read.overrides) == ("seed=0,1" in words)


def test_runs_are_named_by_their_values_of_the_swept_keys():
    jobs = [["learner=grpo", f"seed={seed}", "+a.b=c", "data.train_files=x/y.csv"] for seed in (0, 1)]
    assert run_name(jobs[1], ["seed", "+a.b"]) == "seed=1,a.b=c"
    assert swept_keys(["learner=grpo", "seed=0,1", "a=[1,2]", "b={x: 1, y: 2}"], jobs) == ["seed"]
    assert swept_keys(["learner=grpo"], jobs) == ["seed"], "another sweeper chose the values"
    paths = [run_name([f"data.train_files={path}"], ["data.train_files"]) for path in ("a/b.csv", "a_b.csv")]
    assert len(set(paths)) == 2 and not any("/" in name for name in paths)
    assert len(run_name([f"x={'y' * 500}"], ["x"])) < 200


def test_a_run_of_its_own_gets_the_sweeps_flags_and_search_path():
    words = [
        "-m",
        "--config-name",
        "game",
        f"hydra.searchpath=[{VERL}]",
        "seed=0,1",
        "hydra/launcher=marl_ray",
        "--config-dir=x",
    ]
    assert run_words(words, ["seed=0"]) == ["--config-name", "game", "--config-dir=x", "seed=0"]
    path = f"hydra.searchpath=[{VERL},pkg://mine]"
    assert run_words(["-m", path, "hydra.sweep.dir=y"], ["seed=0"]) == [path, "seed=0"]


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """Runs ``marl train`` in an own folder, where training notes its step count and ends as the run's seed says."""
    monkeypatch.chdir(tmp_path)
    trained = []

    def run(config, _display):
        folder = config.trainer.default_local_dir
        trained.append(os.path.basename(folder))
        if config.seed == 1:
            raise ConfigError(f"seed=1: expected another; password={SECRET}")
        os.makedirs(folder)
        with open(f"{folder}/run.json", "w") as file:
            json.dump(identity_of(config) | ({"finished": "now"} if config.seed == 0 else {}), file, default=str)
        return SimpleNamespace(history={}, report_folder=folder)

    monkeypatch.setattr(marl_main, "run", run)
    monkeypatch.setattr(assets, "prepared", lambda config, _: SimpleNamespace(config=config))  # there is no model

    def train(*words):
        trained.clear()
        code = marl_main.main(["-m", "--config-name", "quickstart", *words])
        return code, list(trained), capfd.readouterr()

    return train


@pytest.mark.slow
def test_a_failure_stops_nobody_and_the_same_command_does_what_is_left(train, tmp_path):
    words = ("seed=0,1,2", f"+policies.alice.endpoint.api_key={SECRET}")
    code, trained, printed = train(*words)
    assert (code, trained) == (2, ["seed=0", "seed=1", "seed=2"])
    assert "2 of 3 runs have finished, 1 failed: seed=1. marl report outputs/sweeps/quickstart-seed-" in printed.out
    assert SECRET not in printed.out + printed.err
    code, trained, printed = train(*words)
    assert trained == ["seed=1", "seed=2"], "the last one did not come to its end"
    assert "1 of 3 runs of outputs/sweeps/quickstart-seed-" in printed.out
    (sweep,) = (tmp_path / "outputs" / "sweeps").iterdir()
    noted = (sweep / "multirun.yaml").read_text()
    assert SECRET not in noted and yaml.safe_load(noted)["hydra"]["overrides"]["task"][0] == "seed=0,1,2"
    assert train(words[0], words[1], "learner=grpo")[1] == ["seed=0", "seed=1", "seed=2"], "another sweep"


class Launcher(RayLauncher):
    """Composes nothing: a run's settings are its words, and those of ``settings``."""

    def __init__(self, folder, settings="", **resources):
        super().__init__(**resources)
        self.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}, "overrides": {"task": ["seed=0,1"]}}})
        self.settings, self.launched = settings, {}

    def composed(self, words):
        always = ["trainer.resume_changes=[]", "trainer.total_training_steps=4", "agents={}"]
        return OmegaConf.from_dotlist([*always, *filter(None, [self.settings]), *words])

    def setup_of(self, job):
        return SimpleNamespace(config=self.composed(job.words))

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
    config = OmegaConf.create({"assets": str(tmp_path / "toy"), "trainer": {"nnodes": 1, "device": "cpu"}})

    def prepare(config):
        if not made:
            raise ModelMissing("actor_rollout_ref.model.path", str(tmp_path / "toy" / "model"))
        return SimpleNamespace(config=config, ranks_by_pool={"a": 2})

    monkeypatch.setattr("marl.preflight.prepare.prepare", prepare)
    monkeypatch.setattr(assets, "ensure_for", made.append)
    for given, expected in (({}, (2, 0)), ({"num_cpus": 0}, (0, 0)), ({"num_cpus": 3, "num_gpus": 0.5}, (3, 0.5))):
        made.clear()
        launcher = RayLauncher(**given)
        monkeypatch.setattr(launcher, "composed", lambda _: config)
        assert launcher.resources_of(Job((), tmp_path)) == expected and made == [config]


@pytest.mark.slow
def test_a_run_in_a_process_ends_with_its_code_and_keeps_its_output(tmp_path):
    task = Task(tmp_path / "a", ["nokey=1"], 1.0, 0.0)
    assert run_in_process(["--config-name", "quickstart", *task.words], str(task.log), str(tmp_path)) == 2
    assert "configuration error" in task.log.read_text() and "nokey" in task.log.read_text()


def test_the_error_of_a_failed_run_is_the_last_line_of_its_log(tmp_path, monkeypatch):
    task = Task(tmp_path / "a", [], 1.0, 0.0)
    task.log.write_text("step 1\nconfiguration error: x=1: expected 2\n\n")
    for code, kind in ((2, ConfigError), (1, RuntimeError), (-9, RuntimeError)):
        monkeypatch.setattr("marl.cluster.side_by_side.ray.get", lambda _, code=code: code)
        error = error_of(None, task)
        assert type(error) is kind and "x=1: expected 2" in str(error) and str(task.log) in str(error)
    monkeypatch.setattr("marl.cluster.side_by_side.ray.get", lambda _: 0)
    assert error_of(None, task) is None


def test_a_run_that_no_machine_has_room_for_is_refused(tmp_path, monkeypatch):
    """Ray would let it wait for ever."""
    machines = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}},
        {"Alive": True, "Resources": {"CPU": 2.0, "GPU": 4.0}},
    ]
    dead = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}
    monkeypatch.setattr("marl.cluster.side_by_side.ray.nodes", lambda: [*machines, dead])
    assert too_large(Task(tmp_path / "a", [], 2.0, 4.0)) == ""
    assert "a needs 8 CPUs and 4 GPUs of one machine" in too_large(Task(tmp_path / "a", [], 8.0, 4.0))


def test_a_run_that_no_machine_has_room_for_any_more_does_not_wait_for_ever(tmp_path, monkeypatch):
    """As where the only large machine leaves the cluster."""
    monkeypatch.setattr(side_by_side, "cluster", nullcontext)
    fake = FakeRay()
    monkeypatch.setattr(side_by_side, "ray", fake)
    tasks = {0: Task(tmp_path / "small", [], 1.0, 0.0), 1: Task(tmp_path / "large", [], 8.0, 0.0)}
    results = dict(side_by_side.run_tasks(tasks, [], lambda _: None))
    assert results[0] is None and "large needs 8 CPUs" in str(results[1])
    assert fake.cancelled == ["large"] and fake.asked == [60.0, 60.0]


@pytest.mark.parametrize("address", ["local", "10.0.0.1:6379"])
def test_the_processes_of_a_sweeps_own_session_are_marked(monkeypatch, address):
    """The next run ends those of a sweep that was killed."""
    seen = []
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(side_by_side, "token_required", nullcontext)
    monkeypatch.setattr(side_by_side, "connect", lambda arguments: seen.append((arguments, os.environ.get(MARK))))
    with side_by_side.cluster():
        ((arguments, inherited),) = seen
        assert arguments["runtime_env"]["env_vars"][MARK] == inherited and owner_lives(inherited)
        assert inherited.startswith(own_name())
    assert os.environ.get(MARK) != inherited


class FakeRay:
    """A cluster whose large machine leaves before anything ends; the small one then ends its task."""

    def __init__(self):
        self.sizes, self.asked, self.cancelled = [2.0, 8.0], [], []

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": size}} for size in self.sizes]

    def remote(self, _):
        return SimpleNamespace(options=lambda name, **_: SimpleNamespace(remote=lambda *_: name))

    def wait(self, references, num_returns, timeout=None):
        assert timeout is not None, "would wait for ever"
        self.asked.append(timeout)
        self.sizes = [2.0]
        return (references, []) if references == ["small"] else ([], references)

    def cancel(self, reference, force):
        self.cancelled.append(reference)

    def get(self, _):
        return 0


@pytest.mark.slow
def test_a_run_ends_with_the_worker_that_waits_for_it(tmp_path):
    """As where its task is cancelled: it would train on without anybody who knows of it."""
    log, script = tmp_path / "log", tmp_path / "marl" / "main.py"
    script.parent.mkdir()
    (script.parent / "__init__.py").touch()
    script.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    waits = f"import marl.cluster.side_by_side as s; s.run_in_process([], {str(log)!r}, {str(tmp_path)!r})"
    worker = subprocess.Popen([sys.executable, "-c", waits])
    while not (log.is_file() and log.read_text().strip()):
        time.sleep(0.1)
    child = int(log.read_text())
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    for _ in range(50):
        if not os.path.exists(f"/proc/{child}"):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the run goes on")
