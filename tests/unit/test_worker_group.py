"""Calls to worker groups: in turn where processes and collectives are shared, together where they are not."""

import asyncio
from types import SimpleNamespace

import pytest
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from marl.cluster.local import Done
from marl.cluster.worker_group import WorkerGroup


class Slow:
    """Two ranks that note when they begin and end a call."""

    def __init__(self, name, ranks, seen):
        self.name, self.world_size, self.workers, self.seen = name, ranks, [], seen

    def save_checkpoint(self, *_):
        async def rank():
            self.seen.append(f"{self.name} begins")
            await asyncio.sleep(0.01)
            self.seen.append(f"{self.name} ends")

        return [rank()]


@pytest.mark.parametrize("ranks,overlap", [(2, False), (1, True)])
def test_groups_of_one_pool_work_in_turn_where_they_share_collectives(ranks, overlap):
    """Ray does not promise that two ranks take two groups' calls in the same order; a collective of one would meet the
    other's."""

    async def both():
        seen, lock = [], asyncio.Lock()
        groups = [WorkerGroup(name, None, Slow(name, ranks, seen), "pool", 5.0, lock) for name in ("alice", "carol")]
        for group in groups:
            group.kind = "policy"
        await asyncio.gather(*(group.save(SimpleNamespace()) for group in groups))
        return seen

    seen = asyncio.run(both())
    assert (seen[1] == "carol begins") is overlap and len(seen) == 4


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
