"""Faults while a run lives: a process is killed or stopped, the run is built anew, and ends as the unbroken one."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter

import psutil
import pytest
import ray
from ray._private import state
from ray._private.utils import get_system_memory, get_used_memory
from ray.util import placement_group_table

from marl.cluster.failures import GroupLost
from tests.chaos.hits import Hits, victims
from tests.chaos.outcome import differing, results

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
COUNT = int(os.environ.get("MARL_FAULTS", "12"))
"""Faults of the long test."""
STEPS = 6
RUN = (
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "trainer.test_freq=3", "trainer.val_before_train=false",
    "trainer.logger=[file]", "trainer.resume_mode=auto", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4",
)  # fmt: skip
IMPATIENT = (
    "resources.update_timeout_s=8", "resources.sync_timeout_s=8", "resources.request_timeout_s=8", "controller.episode_timeout_s=1",
    "resources.save_timeout_s=20",
)  # fmt: skip


@pytest.fixture(scope="session")
def runs(compose_config, cold_assets, tmp_path_factory):
    """Run a configuration in a folder of its own; ``progress`` is told of every step. Returns the folder."""
    from marl.main import run

    def start(name, *overrides, progress=None):
        folder = tmp_path_factory.mktemp(name)
        places = (
            f"trainer.default_local_dir={folder}",
            *(f"trainer.{kind}_data_dir={folder}/{at}" for kind, at in DUMPS.items()),
        )
        run(compose_config(*RUN, f"assets={cold_assets}", *places, *overrides), progress)
        return folder

    return start


DUMPS = {"rollout": "rollouts", "validation": "validation"}


@pytest.fixture(scope="session")
def whole(runs):
    """Results of unbroken runs, by their settings. With one rank they need no Ray."""
    known = {}

    def of(*overrides):
        if overrides not in known:
            where = () if overrides == TWO else ("resources.one_process=true",)
            known[overrides] = results(runs("whole", *where, *overrides))
        return known[overrides]

    return of


def faults_of(folder):
    return json.loads((folder / "run.json").read_text())["restarted"]


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PAIR, ONE, TWO = (), ("sharing=shared",), ("sharing=shared", "trainer.n_gpus_per_node=2")
WORKER = ("controller.num_workers=1",)


CASES = {
    "dead-server": ("HFServer", KILL, PAIR, (), "GroupLost"),
    "dead-episode-worker": ("EpisodeWorker", KILL, ONE, WORKER, "GroupLost: episode worker 0"),
    "dead-raylet": ("raylet/raylet", KILL, ONE, (), "GroupLost: Ray's own process of this machine (raylet"),
    "dead-rank": ("PolicyWorker", KILL, PAIR, (), "GroupLost"),
    "dead-rank-of-two": ("PolicyWorker", KILL, TWO, (), "GroupLost"),
    "stopped-rank": ("PolicyWorker", STOP, ONE, IMPATIENT, "; if it only needs longer, raise resources."),
    "stopped-rank-of-two": ("PolicyWorker", STOP, TWO, ("resources.process_group_timeout_s=6",), "GroupHung"),
    "stopped-server": ("HFServer", STOP, ONE, IMPATIENT, "8 s"),
    "stopped-episode-worker": ("EpisodeWorker", STOP, ONE, (*WORKER, *IMPATIENT), "no sign of life"),
}
IN_TEST_ALL = ("dead-server", "dead-episode-worker")


@pytest.mark.parametrize(
    "kind,number,settings,extra,said",
    [
        pytest.param(*case, id=name, marks=[] if name in IN_TEST_ALL else pytest.mark.chaos)
        for name, case in CASES.items()
    ],
)
def test_a_run_outlives_a_process(runs, whole, kind, number, settings, extra, said):
    hits = Hits(
        (3, 0.0 if settings is TWO else 0.2, kind, number)
    )  # the idle rank of two: the next collective lacks it
    folder = runs("hit", *settings, *extra, progress=hits)
    (fault,) = faults_of(folder)
    assert said in fault["error"] and "global_step_" in fault["from"]
    print(f"\n{kind} {number.name}: {hits.told()}; {fault['error'].splitlines()[0][:150]}")
    assert not differing(whole(*settings), results(folder))
    counted = [json.loads(line)["data"]["perf/restarts"] for line in (folder / "metrics.jsonl").open()]
    assert counted[0] == 0 and counted[-1] == 1 and json.loads((folder / "summary.json").read_text())["restarts"] == 1
    stacks = sorted(path.name for path in folder.glob("stacks/*/*"))
    if number is STOP:
        assert any("driver" in name for name in stacks) and len(stacks) > 2, stacks
        told = {path.name: path.read_text() for path in folder.glob("stacks/*/*")}
        assert any("stopped" in text for text in told.values()) and any(
            "most recent call first" in text for text in told.values()
        )
    else:
        assert not stacks


KINDS = (
    ("PolicyWorker", KILL),
    ("HFServer", KILL),
    ("EpisodeWorker", KILL),
    ("PolicyWorker", STOP),
    ("HFServer", STOP),
)


FILES_OF_RAY = 4
"""Open files that a session of Ray may leave in the driver: its log, and sockets."""


class ManyHits(Hits):
    """Faults of random kinds at random moments: the next one comes when the run trains again after the last."""

    def __init__(self, count, seed=0):
        super().__init__()
        self.left, self.rng, self.outcomes, self.sizes = count, random.Random(seed), Counter(), []
        self.coming = False

    def __call__(self, step, total, metrics):
        self.seen.append((step, time.monotonic()))
        if self.left and not self.coming:
            driver = psutil.Process()
            self.sizes.append((driver.memory_info().rss >> 20, driver.num_fds(), len(driver.children(recursive=True))))
            self.coming, kind = True, self.rng.choice(KINDS)
            threading.Timer(self.rng.uniform(0, 0.7), self.hit, kind).start()

    def hit(self, kind, number):
        super().hit(kind, number)
        self.left -= 1
        self.outcomes[f"{kind} {number.name}"] += 1

    def emit(self, record):
        super().emit(record)
        self.coming = False


@pytest.mark.chaos
def test_many_faults_one_after_another(runs, whole):
    """``sizes`` of the driver at each fault: resident MiB, open files, children."""
    settings = (
        *ONE,
        f"trainer.total_training_steps={4 * COUNT}",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
    )
    hits = ManyHits(COUNT)
    folder = runs("many", *settings, *WORKER, *IMPATIENT, progress=hits)
    faults, waits = faults_of(folder), sorted(hits.waits(), key=sum)
    kinds = Counter(fault["error"].partition(":")[0] for fault in faults)
    print(f"\n{len(hits.at)} faults {dict(hits.outcomes)}, {len(faults)} restarts {dict(kinds)}")
    for name, (notice, again) in {"fastest": waits[0], "median": waits[len(waits) // 2], "slowest": waits[-1]}.items():
        print(f"{name}: noticed after {notice:.1f} s, trained on after {again:.1f} s more")
    print(f"driver (MiB, files, children): {hits.sizes}")
    assert len(faults) >= len(hits.at) == COUNT
    files = [files for _, files, _ in hits.sizes]
    assert files[-1] - files[0] <= FILES_OF_RAY * len(faults)
    assert not differing(whole(*settings), results(folder))


@pytest.fixture
def nodes(monkeypatch):
    """A cluster of the driver's machine, which has no ranks, and two that have one each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


class RayletHit(Hits):
    def hit(self, kind, number):
        psutil.Process(victims(kind)[0].ppid()).send_signal(number)
        self.at.append(time.monotonic())


@pytest.mark.chaos
def test_a_run_outlives_a_node(nodes, runs, whole):
    hits = RayletHit((3, 0.2, "PolicyWorker", KILL))
    folder = runs("node", *ONE, progress=hits)
    (fault,) = faults_of(folder)
    assert "GroupLost" in fault["error"]
    print(f"\nraylet: {hits.told()}; {fault['error'].splitlines()[0][:150]}")
    assert not differing(whole(*ONE), results(folder))


@pytest.mark.chaos
@pytest.mark.parametrize("ending", ["success", "error"])
def test_a_cluster_that_outlives_a_run_holds_nothing_of_it(nodes, runs, ending):
    """No actor and no placement."""
    if ending == "success":
        runs("joined", *ONE)
    else:
        with pytest.raises(GroupLost):
            runs("failed", *ONE, "resources.max_restarts=0", progress=Hits((3, 0.2, "PolicyWorker", KILL)))
    with ray.init(nodes.address, logging_level="error"):
        actors = Counter(actor["State"] for actor in state.actors().values())
        placements = Counter(placement["state"] for placement in placement_group_table().values())
    print(f"\n{ending}: actors {dict(actors)}, placements {dict(placements)}")
    assert set(actors) == {"DEAD"} and set(placements) == {"REMOVED"}


GREED_GIB, ROOM_GIB = 8, 4
"""What is taken at most, and what the run may take before Ray's memory monitor kills one of its processes."""


class Pressure(Hits):
    """After a step, takes this machine's memory until Ray has killed a process of the run."""

    def __call__(self, step, total, metrics):
        self.seen.append((step, time.monotonic()))
        if step == 3 and not self.at:
            taken, processes = [], [*victims("PolicyWorker"), *victims("HFServer")]
            while all(process.is_running() for process in processes) and len(taken) < GREED_GIB:
                taken.append(os.urandom(1 << 20) * 1024)
                time.sleep(0.5)
            self.at.append(time.monotonic())


@pytest.mark.chaos
def test_a_run_outlives_rays_memory_monitor(runs, whole, monkeypatch):
    used, whole_machine = get_used_memory(), get_system_memory()
    monkeypatch.setenv("RAY_memory_usage_threshold", str((used + (ROOM_GIB << 30)) / whole_machine))
    hits = Pressure()
    folder = runs("pressed", *ONE, progress=hits)
    faults = faults_of(folder)
    print(f"\nmemory: {hits.told()}; {faults[0]['error'].splitlines()[0][:300]}")
    assert all("GroupLost" in fault["error"] for fault in faults) and "memory" in faults[0]["error"]
    assert not differing(whole(*ONE), results(folder))
