"""The command line as a person uses it: exit codes, what is printed, what is left running."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from marl.main import main

START_SECONDS, END_SECONDS = 180, 30
ALONE, WORKER = ("resources.one_process=true",), ("controller.num_workers=1",)


def command(*overrides):
    return [sys.executable, "-m", "marl.main", "--config-name", "quickstart", *overrides]


@pytest.fixture
def finish(monkeypatch, capsys):
    """Run the command in this process: its exit code, and what it printed."""

    def finish(*overrides):
        monkeypatch.setattr(sys, "argv", ["marl"])
        return main(["--config-name", "quickstart", *overrides]), capsys.readouterr()

    return finish


def test_cfg_job_prints_the_whole_configuration(finish):
    code, said = finish("--cfg", "job")
    assert code == 0
    for key in (
        "actor_rollout_ref:",
        "agents:",
        "runner:",
        "learner:",
        "credit:",
        "resources:",
        "ppo_mini_batch_size:",
    ):
        assert key in said.out


def test_a_misspelt_key_ends_with_code_2_and_one_line(finish):
    code, said = finish("learner.gama=1")
    assert code == 2
    assert said.err.strip().splitlines()[-1].startswith("configuration error: unknown key 'learner.gama'")


def test_the_launch_script_passes_overrides_on(cold_assets):
    environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "marl/marl.sh", "--config-name", "quickstart", "data.train_files=/nowhere.parquet", f"assets={cold_assets}"],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    assert done.returncode == 2 and "data.train_files=/nowhere.parquet: no such file" in done.stderr


def test_more_than_the_cluster_can_ever_give_is_an_error_at_once(finish, cluster, cold_assets, tmp_path):
    code, said = finish(f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "trainer.n_gpus_per_node=5")
    assert code == 2
    assert re.search(r"the pools ask for 10 CPU \(alice: 1 x 5, carol: 1 x 5; .*\), the whole cluster has 8", said.err)


def alive(pids):
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def hear_ctrl_c():
    """A shell starts what runs behind with SIGINT ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def running(request, cold_assets, tmp_path):
    """A run that would go on for long, once it has trained for a step; ended by its process group if need be."""
    overrides = (
        f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "trainer.total_training_steps=100000",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "data.train_batch_size=4", "trainer.logger=[console]",
        "resources.max_restarts=0",
        *getattr(request, "param", ()),
    )  # fmt: skip
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command(*overrides), stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=hear_ctrl_c
        )

    def output():
        return (tmp_path / "log").read_text()

    deadline = time.monotonic() + START_SECONDS
    while "step:2 " not in output():
        assert process.poll() is None and time.monotonic() < deadline, output()[-3000:]
        time.sleep(0.5)
    family = psutil.Process(process.pid).children(recursive=True)
    yield process, family, output
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    for child in family:
        if child.is_running():
            child.kill()


def of_class(family, name):
    found = [child for child in family if child.is_running() and any(name in part for part in child.cmdline())]
    assert found, [child.cmdline() for child in family if child.is_running()]
    return found[0]


@pytest.mark.parametrize(
    "running,victim",
    [
        pytest.param((), "PolicyWorker", marks=pytest.mark.slow),
        pytest.param((), "HFServer", marks=pytest.mark.slow),
        pytest.param(WORKER, "EpisodeWorker", marks=pytest.mark.slow),
    ],
    indirect=["running"],
)
def test_a_process_that_dies_is_named_and_ends_the_run_within_seconds(running, victim):
    process, family, output = running
    of_class(family, victim).kill()
    killed = time.monotonic()
    assert process.wait(timeout=END_SECONDS) == 1
    assert time.monotonic() - killed < END_SECONDS
    said = output()
    whose = r"episode worker 0 \(pid \d+\)" if victim == "EpisodeWorker" else "policy '(alice|carol)'"
    assert re.search(rf"run failed: GroupLost: {whose} while .* died", said), said[-2000:]
    assert "its last lines:" in said
    wait_until_gone(family)


@pytest.mark.slow
@pytest.mark.parametrize("running", [ALONE, (), WORKER], indirect=True)
def test_ctrl_c_is_a_clean_end(running):
    process, family, output = running
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=END_SECONDS) == 130
    assert "interrupted; workers and servers have been stopped" in output()
    wait_until_gone(family)


def wait_until_gone(family):
    deadline = time.monotonic() + END_SECONDS
    while left := alive([child.pid for child in family]):
        assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in left]
        time.sleep(0.2)
