"""``marl doctor``: every check, on a machine where it fails."""

import resource
import shutil
import socket
import subprocess
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from marl import cli
from marl.health import machine, packages, services
from marl.health.finding import State, ok, problem
from marl.rewards.processes import RewardError


def one(finding, state, *words):
    assert finding.state is state and all(word in f"{finding.said} {finding.mend}" for word in words), finding
    assert bool(finding.mend) is (state is not State.ok)


def test_python_and_packages_out_of_their_ranges_are_problems(monkeypatch):
    one(packages.python_version(">=3.11,<3.13", "3.10.4"), State.problem, "3.10.4, expected", "PYTHON=")
    one(packages.python_version(">=3.11,<3.13", "3.12.9"), State.ok, "3.12.9")
    versions = {"torch": "2.7.0+cpu", "verl": "0.9.1", "ray": "2.60.0", "numpy": "2.0"}
    monkeypatch.setattr(packages, "installed", versions.get)
    wanted = [
        Requirement(text)
        for text in ("torch>=2.9", "verl>=0.9.1,<0.10", "ray[default]>=2.52,<3", "numpy", "pebble>=5.1,<6")
    ]
    found = {finding.name: finding for finding in packages.packages(wanted)}
    one(found["torch"], State.problem, "2.7.0+cpu, expected >=2.9", "pip install 'torch>=2.9'")
    one(found["pebble"], State.problem, "not installed", "pip install 'pebble")
    one(found["verl"], State.ok, "0.9.1")
    one(found["packages"], State.ok, "1 others")
    monkeypatch.setitem(versions, "torch", "2.13.0+cpu")
    assert next(packages.packages(wanted)).state is State.ok, "a build of its own is in the range"


def test_this_environment_is_what_pyproject_asks_for(monkeypatch, tmp_path):
    assert all(finding.state is State.ok for finding in packages.python_and_packages())
    assert {"torch", "click"} <= {requirement.name for requirement in packages.wanted()[1]}
    monkeypatch.setattr(packages, "PROJECT", tmp_path / "none")  # an installation without its source
    assert "verl" in {requirement.name for requirement in packages.wanted()[1]}


def test_a_machine_with_gpus_needs_a_server_for_them(monkeypatch):
    monkeypatch.setattr(packages, "installed", {}.get)
    assert [finding.state for finding in packages.engines(0)] == [State.note] * 3
    vllm, *_ = packages.engines(2)
    one(vllm, State.problem, "not installed", "make gpu")
    monkeypatch.setattr(packages, "installed", {"vllm": "0.31", "flash-attn": "2.8"}.get)
    assert [finding.state for finding in packages.engines(2)] == [State.ok, State.note, State.ok]


def test_gpus_that_torch_does_not_find_are_a_problem(monkeypatch):
    monkeypatch.setattr(machine, "driver_gpus", lambda: ["H100", "H100"])
    monkeypatch.setattr(machine, "torch_gpus", lambda: 0)
    (found,) = machine.gpus()
    one(found, State.problem, "the driver has 2 (H100), torch finds 0", "make clean gpu")
    monkeypatch.setattr(machine, "torch_gpus", lambda: 2)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    gpus, nccl = machine.gpus()
    one(gpus, State.ok, "2 x H100")
    one(nccl, State.problem, "without it")
    monkeypatch.setattr(machine, "driver_gpus", list)
    assert [finding.state for finding in machine.gpus()] == [State.ok]


@pytest.mark.parametrize(("code", "printed", "names"), [(0, "H100\nA100\n", ["H100", "A100"]), (9, "no driver", [])])
def test_the_driver_is_asked_for_its_gpus(monkeypatch, code, printed, names):
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: SimpleNamespace(returncode=code, stdout=printed))
    assert machine.driver_gpus() == names


def test_little_memory_or_disk_is_a_problem(monkeypatch, tmp_path):
    one(machine.shared_memory(str(tmp_path / "none")), State.note, "there is none")
    free = {"bytes": 64e6}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free["bytes"]))
    one(machine.shared_memory(str(tmp_path)), State.problem, "0.06 GB free", "--shm-size")
    one(machine.disk(str(tmp_path / "not" / "yet")), State.problem, "0.1 GB free", "max_actor_ckpt_to_keep")
    free["bytes"] = 64e9
    assert machine.shared_memory(str(tmp_path)).state is machine.disk(str(tmp_path)).state is State.ok


def test_low_limits_are_problems(monkeypatch, tmp_path):
    limits = {resource.RLIMIT_NOFILE: (256, 1024), resource.RLIMIT_NPROC: (100, 100)}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    (tmp_path / "pids.max").write_text("64\n")
    monkeypatch.setattr(machine, "PIDS", tmp_path / "pids.max")
    files, processes, container = machine.limits()
    one(files, State.problem, "at most 1024", "ulimit -n")
    one(processes, State.problem, "at most 100", "ulimit -u")
    one(container, State.problem, "64, expected", "--pids-limit")
    limits.update({resource.RLIMIT_NOFILE: (1024, 65536), resource.RLIMIT_NPROC: (-1, -1)})
    (tmp_path / "pids.max").write_text("max\n")
    assert [finding.state for finding in machine.limits()] == [State.ok] * 2


def test_a_cluster_that_does_not_answer_is_a_problem(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    one(services.ray_cluster(), State.ok, "its own")
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        for address in (place, f"http://{place}", f"ray://{place}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            one(services.ray_cluster(), State.ok, place)
    one(services.ray_cluster(), State.problem, "no answer", "ray start --head")
    monkeypatch.setenv("RAY_ADDRESS", "somewhere")
    one(services.ray_cluster(), State.problem, "host:port")


def test_a_token_that_is_missing_where_it_is_needed_is_a_problem(monkeypatch, tmp_path):
    for name in (services.MODE, services.TOKEN, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(services.PATH, str(tmp_path / "auth_token"))
    one(services.token(), State.ok, "own cluster")
    monkeypatch.setenv(services.MODE, "disabled")
    one(services.token(), State.note, "whoever reaches")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    one(services.token(), State.problem, "whoever reaches", "ray get-auth-token")
    monkeypatch.setenv(services.MODE, "token")
    one(services.token(), State.problem, "there is none", "copy ~/.ray/auth_token")
    (tmp_path / "auth_token").write_text("0" * 64)
    one(services.token(), State.ok, "there")


class Processes:
    """Reward processes of which some part does not work."""

    def __init__(self, four=4, hang=None):
        self.outcomes, self.stopped = {services.four: four, services.for_ever: hang}, False

    async def run(self, function, arguments):
        outcome = self.outcomes[function]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def stop(self):
        self.stopped = True


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (Processes(four=5), "answered 5"),
        (Processes(four=OSError("Resource temporarily unavailable")), "temporarily unavailable"),
        (Processes(four=RewardError("its process died", "deaths")), "died"),
        (Processes(hang=None), "not killed"),
        (Processes(hang=RewardError("its process died", "deaths")), "died"),
    ],
)
def test_reward_processes_that_do_not_work_are_a_problem(monkeypatch, broken, said):
    monkeypatch.setattr(services, "Processes", lambda *settings: broken)
    one(services.sandbox()[0], State.problem, said, "judge.processes=0")
    assert broken.stopped


def test_without_math_verify_mathematics_is_not_scored(monkeypatch):
    def missing():
        raise ModuleNotFoundError("math-verify is not installed")

    monkeypatch.setattr(services, "must_be_installed", missing)
    one(services.mathematics(), State.note, "not installed", "marl[math]")


def test_a_process_that_hangs_is_killed_here():
    found = services.sandbox()
    assert [finding.state for finding in found] == [State.ok] * 2 and "was killed after" in found[0].said


@pytest.mark.parametrize("problems", [0, 2])
def test_the_exit_code_is_1_where_there_is_a_problem(monkeypatch, capsys, problems):
    found = [ok("Python", "3.11"), *[problem("disk", "full", "empty it")] * problems]
    monkeypatch.setattr("marl.commands.doctor.findings", lambda outputs: found)
    assert cli.main(["doctor"]) == int(problems > 0)
    printed = capsys.readouterr().out
    assert f"{problems} problems" in printed and printed.count("→ empty it") == problems
