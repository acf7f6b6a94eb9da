"""Cost of saving, and of the ledger, beside training: steps with and without it by turns, within one run. ``-s`` shows the figures."""

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from marl import checkpoint
from marl.rollout import hf_server
from marl.utils import folders, manifest

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1200)]
PAIRS, WALL, CPU = int(os.environ.get("MARL_PAIRS", "10")), 0, 1
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}  # fmt: skip
RUN = (
    "sharing=shared",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "trainer.test_freq=-1",
    "controller.ledger=true",
    "trainer.max_actor_ckpt_to_keep=2",
)
WRITER = """
import hashlib, os, sys
content = memoryview(os.urandom(1 << 20) * int(sys.argv[1]))
print(flush=True)
for number, _ in enumerate(sys.stdin):
    with open(f"{sys.argv[2]}/{number}", "w+b", buffering=0) as file:
        left = content
        while left:
            left = left[file.write(left[: 16 << 20]) :]
        os.fsync(file.fileno())
        file.seek(0)
        hashlib.file_digest(file, "sha256")
    if number > 1:
        os.unlink(f"{sys.argv[2]}/{number - 2}")
    print(flush=True)
"""
"""For each line that it reads, writes, syncs and hashes a file of so many MiB, keeps the last two files, and answers with a line."""


@pytest.fixture
def live(alone, cold_assets, tmp_path, monkeypatch):
    """A run whose checkpoints take about as long as its steps, which are all of the same work: no answer ends before its limit."""
    monkeypatch.setattr(hf_server, "end_ids", lambda *_: frozenset())
    source = next(cold_assets.rglob("config.json")).parent
    folder = tmp_path / "wide"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, **WIDE)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return alone(*RUN, f"actor_rollout_ref.model.path={folder}", "trainer.total_training_steps=1000")


class Clock:
    """Wall and CPU seconds of pieces of work, by name; the CPU's are those of the whole process, its threads too."""

    def __init__(self):
        self.seen = defaultdict(list)

    def time(self, name, work):
        wall, cpu = time.perf_counter(), time.process_time()
        done = work()
        self.seen[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        return done

    def timed(self, name, work):
        return lambda *arguments, **settings: self.time(name, lambda: work(*arguments, **settings))

    def median(self, name, which=WALL):
        return statistics.median(one[which] for one in self.seen[name])

    def more(self, name, than, which=WALL):
        """Median of the pairs' differences, as a share of the median without."""
        pairs = zip(self.seen[name], self.seen[than], strict=True)
        return statistics.median(one[which] - other[which] for one, other in pairs) / self.median(than, which)


def by_turns(clock, pairs, **works):
    """The works one after another, forwards and backwards by turns: what slows the machine slows all of them."""
    for number in range(pairs):
        for name in list(works) if number % 2 else reversed(works):
            works[name]()


@pytest.fixture
def write_elsewhere(tmp_path):
    """Start a process that writes files of so many MiB. Returns two functions: one begins a file, one waits until it is written."""
    started = []

    def start(mib):
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        command = [sys.executable, "-c", WRITER, str(mib), str(folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        started.append(process)
        process.stdout.readline()
        return lambda: process.stdin.write("\n"), process.stdout.readline

    yield start
    for process in started:
        process.stdin.close()
        process.wait(60)


def test_a_step_beside_a_save_is_hardly_longer(live, write_elsewhere, monkeypatch):
    """Steps alone, beside a save, and beside a process that writes as much, which is the machine's own share."""
    clock = Clock()
    live.trainer.controller.ledger.root = None
    monkeypatch.setattr(folders, "seal", clock.timed("seal", folders.seal))
    monkeypatch.setattr(checkpoint, "finish", clock.timed("write", checkpoint.finish))

    def save_and_step():
        clock.time("call", lambda: live.wait(live.trainer.save(wait=False)))
        live.step()

    def with_save():
        clock.time("step and save", save_and_step)
        clock.time("rest", lambda: live.wait(live.trainer.saving.flush()))

    def with_writer():
        begin()
        clock.time("step and writer", live.step)
        end()

    live.step()
    with_save()
    (saved,) = live.trainer.folder.glob("global_step_*")
    begin, end = write_elsewhere(sum(path.stat().st_size for path in manifest.files_in(saved)) >> 20)
    clock.seen.clear()
    by_turns(clock, PAIRS, alone=lambda: clock.time("step", live.step), with_save=with_save, with_writer=with_writer)
    monkeypatch.setattr(checkpoint, "to_resume", clock.timed("verify", checkpoint.to_resume))
    live.trainer.config.trainer.resume_mode = "auto"
    for _ in range(5):
        manifest._digest.cache_clear()
        clock.time("load", lambda: live.wait(live.trainer.resume()))
    wall, writers = clock.more("step and save", "step"), clock.more("step and writer", "step")
    print(  # noqa: T201 - the figures
        f"\nstep {clock.median('step'):.2f} s, writing {clock.median('write'):.2f} s (sealing {clock.median('seal'):.2f} s), of which after "
        f"the step {clock.median('rest'):.2f} s; a step with a save: {wall:+.1%} wall, {clock.more('step and save', 'step', CPU):+.1%} CPU, of "
        f"which its call {clock.median('call') / clock.median('step'):.1%}; beside a process that writes as much {writers:+.1%} wall; "
        f"loading {clock.median('load'):.2f} s, of which {clock.median('verify'):.2f} s to verify; load of the machine {os.getloadavg()[0]:.1f}"
    )
    assert wall * clock.median("step") < 0.7 * clock.median("write"), "the step waited for the write"


def test_a_ledger_costs_little(live):
    clock, ledger = Clock(), live.trainer.controller.ledger
    root = ledger.root
    assert root is not None

    def step(name, where):
        ledger.close()
        ledger.root = where
        clock.time(name, live.step)

    live.step()
    by_turns(clock, PAIRS, bare=lambda: step("bare", None), noted=lambda: step("noted", root))
    wall, cpu = clock.more("noted", "bare"), clock.more("noted", "bare", CPU)
    print(  # noqa: T201 - the figures
        f"\nstep {clock.median('bare'):.2f} s, with a ledger {wall:+.1%} wall, {cpu:+.1%} CPU; load {os.getloadavg()[0]:.1f}"
    )
    assert cpu < 0.1
