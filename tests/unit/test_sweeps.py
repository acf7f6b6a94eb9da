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

from marl import main as marl_main
from marl.cluster import side_by_side
from marl.cluster.side_by_side import Task, error_of, run_in_process, too_large
from marl.config.errors import ConfigError
from marl.config.identity import identity_of
from marl.config.overrides import VERL
from marl.config.sweeps import run_name, run_words, sweep_name, sweep_words, swept_keys
from marl.quickstart import assets
from marl.utils.run_mark import MARK, own_name, owner_lives

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
        return SimpleNamespace(history={}, report_folder=folder, folder=folder)

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
