"""Calls to worker groups: in turn where processes and collectives are shared, together where they are not."""

import asyncio
from types import SimpleNamespace

import pytest
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from marl.cluster.local import Done
from marl.cluster.worker_group import WorkerGroup


class Slow:
    """Ranks that note when they begin and end a call."""

    def __init__(self, name, ranks, seen):
        self.name, self.world_size, self.workers, self.seen = name, ranks, [], seen

    def save_checkpoint(self, *_):
        async def rank():
            self.seen.append(f"{self.name} begins")
            await asyncio.sleep(0.01)
            self.seen.append(f"{self.name} ends")

        return [rank()]


async def save_both(workers, timeout, locks):
    groups = [
        WorkerGroup(name, None, own, "pool", timeout, lock)
        for (name, own), lock in zip(workers.items(), locks, strict=True)
    ]
    for group in groups:
        group.kind = "policy"
    await asyncio.gather(*(group.save(SimpleNamespace()) for group in groups))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_groups_of_one_pool_work_in_turn_and_pools_beside_one_another(ranks, shared):
    """Ray does not promise that two ranks take two groups' calls in the same order; a collective of one would meet the
    other's."""
    seen, lock = [], asyncio.Lock()
    workers = {name: Slow(name, ranks, seen) for name in ("alice", "carol")}
    asyncio.run(save_both(workers, 5.0, [lock, lock if shared else asyncio.Lock()]))
    assert (seen[1] == "alice ends") is shared and len(seen) == 4


class OneProcess:
    """One rank, whose process does a call after another, as Ray's actors do."""

    world_size, workers = 1, []

    def __init__(self, seconds, process):
        self.seconds, self.process = seconds, process

    def save_checkpoint(self, *_):
        async def rank():
            async with self.process:
                await asyncio.sleep(self.seconds)

        return [rank()]


def test_a_call_has_all_its_time_where_another_group_has_the_process():
    process, lock = asyncio.Lock(), asyncio.Lock()
    workers = {name: OneProcess(0.6, process) for name in ("alice", "carol")}
    asyncio.run(save_both(workers, 1.0, [lock, lock]))


def test_repeated_calls_in_a_step_are_counted_twice():
    """HAPPO asks for log-probs again after an update."""

    def answer(rows):
        output = TensorDict({}, batch_size=[])
        tu.assign_non_tensor(output, metrics={"worker_seconds": [0.25, 0.5]})
        return Done(output)

    group = WorkerGroup("alice", None, SimpleNamespace(world_size=1), "pool", 5.0)
    group.kind = "policy"
    for _ in range(2):
        asyncio.run(group._call("log_probs", answer, TensorDict({}, batch_size=[])))
    assert group.busy_seconds == {"log_probs": 1.0}
