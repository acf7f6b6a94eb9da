"""Kills of a run on Ray at random moments: of its driver, its ranks, servers and episode workers, and of the node they live on."""

import os
import random
import time
from collections import Counter
from itertools import cycle, islice

import psutil
import pytest

from tests.chaos import drivers
from tests.chaos.outcome import unequal

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(2400)]
KILLS = int(os.environ.get("MARL_RAY_KILLS", "20"))
STEPS, PATIENCE_S, POLL_S = 40 * KILLS, 240, 0.05
RUN = (
    "sharing=shared", "trainer.resume_mode=auto", "trainer.logger=[file]", "trainer.save_freq=2", "trainer.test_freq=3",
    "trainer.val_before_train=false", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "resources.max_restarts=9",
    f"trainer.total_training_steps={STEPS}",
)  # fmt: skip
KINDS = {
    "driver": "", "rank": "PolicyWorker", "server": "HFServer", "episode worker": "EpisodeWorker", "raylet": "/raylet/raylet",
}  # fmt: skip
MENDED = ("rank", "server", "episode worker", "raylet")
"""The same driver goes on without one of these."""


class Battered:
    """A run that is killed again and again, and started again where that ended its driver."""

    def __init__(self, command, folder):
        self.command, self.folder = command, folder
        self.log, self.counts, self.driver, self.noticed = folder.with_suffix(".log"), Counter(), None, 0

    def start(self):
        self.driver = drivers.start(self.command, self.folder, self.log)

    def times(self):
        """Seconds until the first step, and of a step."""
        began = time.monotonic()
        self.start()
        self.until_it_trains()
        first = time.monotonic()
        for _ in range(3):
            self.until_it_trains()
        return first - began, (time.monotonic() - first) / 3

    def hit(self, kind, seconds, at_once):
        """Kill a process of this kind so many seconds after the run has begun to recover, or after its next step."""
        if self.driver is None:
            self.start()
        if not at_once:
            self.until_it_trains()
        time.sleep(seconds)
        assert self.driver.poll() is None, f"the run ended before, after {self.counts}: {self.end_of_log()}"
        self.noticed, (kind, process) = self.restarts(), self.victim(kind)
        process.kill()
        if kind != "driver":  # whose exit code is its parent's to read
            psutil.wait_procs([process], timeout=10)
        self.counts[f"{kind}{', before a step' if at_once else ''}"] += 1
        self.follow(kind)

    def victim(self, kind):
        """The process of this kind, or the driver where there is none at this moment."""
        found = self.there(kind) if kind != "driver" else []
        return (kind, found[-1]) if found else ("driver", psutil.Process(self.driver.pid))

    def there(self, kind):
        return [process for process in drivers.of(self.driver) if KINDS[kind] in drivers.title(process)]

    def follow(self, kind):
        """Wait until the run has noticed, or has ended."""
        if kind in MENDED:
            self.until(lambda: self.restarts() > self.noticed or self.driver.poll() is not None)
        else:
            self.driver.wait(timeout=PATIENCE_S)
        if self.driver.poll() is not None:
            assert self.driver.returncode != 0, f"the run ended before, after {self.counts}: {self.end_of_log()}"
            self.driver = None

    def until_it_trains(self):
        """Until a step has ended."""
        before = self.dumped()
        self.until(lambda: self.dumped() > before)

    def until(self, happened):
        ends = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < ends, self.end_of_log()
            time.sleep(POLL_S)

    def dumped(self):
        return max((path.stat().st_mtime_ns for path in self.folder.glob("rollouts/*.jsonl")), default=0)

    def restarts(self):
        return self.log.read_text().count(" (resources.max_restarts), from ")

    def end_of_log(self):
        return self.log.read_text()[-3000:]


def test_kills_through_ray(compose_config, cold_assets, tmp_path):
    from marl.main import run

    def places(name):
        folder = tmp_path / name
        return f"assets={cold_assets}", f"trainer.rollout_data_dir={folder}/rollouts"

    whole = f"trainer.default_local_dir={tmp_path / 'whole'}"
    run(compose_config(*RUN, *places("whole"), whole, "resources.one_process=true"))
    rng, began = random.Random(0), time.monotonic()
    beaten = Battered((*RUN, *places("broken"), "controller.num_workers=1"), tmp_path / "broken")
    try:
        start, step = beaten.times()
        for kind in rng.sample([*islice(cycle(KINDS), KILLS)], KILLS):
            at_once = rng.random() < 0.25
            beaten.hit(kind, rng.uniform(0, start if at_once else 2 * step), at_once)
        beaten.driver or beaten.start()
        assert beaten.driver.wait(timeout=4 * PATIENCE_S) == 0, beaten.end_of_log()
    finally:
        beaten.driver and drivers.end(beaten.driver)
    print(f"\n{KILLS} kills: {dict(beaten.counts)}; {beaten.restarts()} rebuilt; {time.monotonic() - began:.0f} s")
    assert unequal(tmp_path / "broken", tmp_path / "whole") == []
