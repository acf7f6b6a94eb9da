"""Runs of the product on hosts, as a user starts them: ``python -m marl.main`` with the quick start's configuration."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from .hosts import Hosts

ROOT = Path(__file__).parents[2]
STEPS = 6
OVER_HOSTS = (
    "resources.pools={wide: {gpus: 1, nodes: 2, policies: [alice]}, narrow: {policies: [carol], critics: [central]}}"
)
"""alice's ranks on two hosts, carol and the critic on one of them."""
ON_ONE_HOST = (
    "resources.pools={wide: {gpus: 2, nodes: 1, policies: [alice]}, narrow: {policies: [carol], critics: [central]}}"
)
SMALL = (
    "learner=mappo", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.logger=[file]",
    f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "resources.weight_check=digest", "resources.timeout_s=90",
    "resources.process_group_timeout_s=15", "resources.placement_timeout_s=20",
)  # fmt: skip


class Run:
    """A run under way: its output, its steps, its end."""

    def __init__(self, process: subprocess.Popen, log: Path, folder: Path) -> None:
        self.process, self.log, self.folder = process, log, folder
        self.homes: dict[str, list[str]] = {}
        """The hosts of its ranks and servers, once somebody has looked."""

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def steps(self) -> dict[int, dict]:
        """The metrics of every step so far."""
        path = self.folder / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return {line["step"]: line["data"] for line in map(json.loads, whole.splitlines())}

    def until_step(self, number: int, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while number not in self.steps():
            assert self.process.poll() is None and time.monotonic() < until, self.said[-4000:]
            time.sleep(0.05)

    def end(self, seconds: float) -> int:
        """The exit code, within a deadline of the test's."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s: {self.said[-4000:]}") from None

    def weights(self, step: int = STEPS) -> dict[str, dict[str, torch.Tensor]]:
        """Whole models of the policies in a checkpoint."""
        saved = self.folder / f"global_step_{step}"
        return {name: load_file(saved / name / "actor/huggingface/model.safetensors") for name in ("alice", "carol")}


class Product:
    """Starts runs, and ends those that are left."""

    def __init__(self, hosts: Hosts, assets: Path, folder: Path) -> None:
        self.hosts, self.assets, self.folder = hosts, assets, folder
        self.runs: list[Run] = []

    def words(self, folder: Path | str, *overrides: str) -> list[str]:
        own = [f"assets={self.assets}", f"trainer.default_local_dir={folder}", *SMALL, *overrides]
        return ["-m", "marl.main", "--config-name", "quickstart", *own]

    def start(self, *overrides: str, on: str = "head", folder: str = "", cwd: Path | str = "/", **env: str) -> Run:
        """A run whose driver is on a host that has a Ray node."""
        name, host = f"run{len(self.runs)}", self.hosts[on]
        path = Path(folder or self.folder / name)
        log = f"{self.folder.name}-{name}.log"
        given = {"RAY_ADDRESS": self.hosts.address, "PYTHONPATH": str(ROOT), **env}
        words = self.words(os.path.relpath(path, cwd) if cwd != "/" else path, *overrides)
        process = host.start(sys.executable, *words, log=log, cwd=cwd, env=given)
        self.runs.append(Run(process, host.folder / log, path))
        return self.runs[-1]

    def stop(self) -> None:
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()  # nsenter, whose child goes with the host at the latest
                run.process.wait(10)
        for host in self.hosts.hosts.values():
            host.kill("marl.main")


def same_bits(one: Run, other: Run, step: int = STEPS) -> bool:
    first, second = one.weights(step), other.weights(step)
    tensors = [(policy, name) for policy in first for name in first[policy]]
    return bool(tensors) and all(torch.equal(first[policy][name], second[policy][name]) for policy, name in tensors)


def homes(hosts: Hosts) -> dict[str, list[str]]:
    """The hosts of the ranks of each pool, and of the servers of each policy, of the newest job."""
    found: dict[str, list[str]] = {}
    for actor, host in hosts.hosts_of_actors():
        owner = re.search(r"alice|carol|narrow", actor)[0]
        found.setdefault(f"{owner} {'server' if 'HFServer' in actor else 'rank'}", []).append(host)
    return {key: sorted(value) for key, value in found.items()}


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"[{what}: {time.monotonic() - began:.1f} s, load {os.getloadavg()[0]:.1f}]")
