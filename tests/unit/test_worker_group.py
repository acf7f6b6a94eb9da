"""Calls to worker groups: in turn where processes and collectives are shared, together where they are not."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu

from marl.batch.build import pad_rows
from marl.cluster.local import Done
from marl.cluster.policy_group import PolicyGroup
from marl.cluster.worker_group import WorkerGroup, balanced_order, in_given_order, throughput
from marl.utils.ragged import consecutive, dense, jagged
from marl.utils.spans import Stopwatch, union_seconds
from marl.utils.weight_digest import TensorDigest
from tests.builders import same_for_all


def test_one_ranks_answer_is_not_read_again():
    async def rank():
        output = TensorDict({}, batch_size=[])
        tu.assign_non_tensor(output, metrics={"worker_seconds": [0.0], "worker_ended": [0.0], "loss": [0.5]})
        return output

    group = WorkerGroup("alice", None, SimpleNamespace(world_size=1), "pool", same_for_all(5.0))
    group.kind = "policy"
    future = SimpleNamespace()

    def method(rows):
        future.futures = [rank()]
        return future

    output = asyncio.run(group._call("update", method, TensorDict({}, batch_size=[])))
    assert tu.get(output, "metrics")["loss"] == [0.5]


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
        WorkerGroup(name, None, own, "pool", same_for_all(timeout), lock)
        for (name, own), lock in zip(workers.items(), locks, strict=True)
    ]
    for group in groups:
        group.kind = "policy"
    await asyncio.gather(*(group.save(Path("folder")) for group in groups))


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


def called(seconds, ended=lambda: 0.0):
    """The spans of a group after two calls whose ranks say that they took so long."""

    def answer(rows):
        time.sleep(0.1)
        output = TensorDict({}, batch_size=[])
        tu.assign_non_tensor(output, metrics={"worker_seconds": seconds, "worker_ended": [ended()] * len(seconds)})
        return Done(output)

    group = WorkerGroup("alice", None, SimpleNamespace(world_size=1), "pool", same_for_all(5.0))
    group.kind = "policy"
    for _ in range(2):
        asyncio.run(group._call("log_probs", answer, TensorDict({}, batch_size=[])))
    return group.busy


def test_repeated_calls_in_a_step_are_counted_twice_and_ranks_beside_one_another():
    """HAPPO asks for log-probs again after an update."""
    start = time.monotonic()
    busy = called([0.025, 0.05], time.time)
    assert len(busy) == 4
    assert union_seconds(busy, (start, time.monotonic())) == pytest.approx(0.1, abs=1e-5)


def test_a_weight_sync_is_computing_as_far_as_the_ranks_say_so():
    async def rank(seconds):
        await asyncio.sleep(0.1)
        return seconds, time.time()

    workers = SimpleNamespace(update_weights=lambda global_steps, mode: [rank(0.03), rank(0.06)])
    group = PolicyGroup("alice", None, workers, "pool", same_for_all(5.0))
    start = time.monotonic()
    asyncio.run(group.sync_weights(7))
    assert union_seconds(group.busy, (start, time.monotonic())) == pytest.approx(0.06, abs=1e-3)
    assert group.version == 7


def test_the_digest_of_weights_is_computing_too():
    async def rank(seconds, digest):
        await asyncio.sleep(0.1)
        return digest, seconds, time.time()

    half = {"w": TensorDigest((2,), 1, 3)}
    workers = SimpleNamespace(weight_digest=lambda seed: [rank(0.03, half), rank(0.06, half)])
    group = PolicyGroup("alice", None, workers, "pool", same_for_all(5.0))
    start = time.monotonic()
    assert asyncio.run(group.weight_digest(7)) == {"w": TensorDigest((2,), 2, 6)}
    assert union_seconds(group.busy, (start, time.monotonic())) == pytest.approx(0.06, abs=1e-3)


@pytest.mark.parametrize("skew", [-1e6, 1e6])
def test_the_clock_of_another_node_moves_no_span_out_of_its_call(skew):
    start = time.monotonic()
    busy = called([0.05], lambda: time.time() + skew)
    assert union_seconds(busy, (start, time.monotonic())) == pytest.approx(0.1, abs=1e-5)


def test_a_servers_spans_are_recorded_in_this_processs_clock():
    """A server's clock begins when its machine does."""
    ahead, now = 1e6, time.monotonic()

    async def take_spans():
        return [(now + ahead - 3.0, now + ahead - 2.0)], time.monotonic() + ahead

    group = PolicyGroup("alice", None, SimpleNamespace(world_size=1), "pool", same_for_all(5.0))
    group.servers = SimpleNamespace(server_handles=[SimpleNamespace(take_spans=SimpleNamespace(remote=take_spans))])
    group.busy = [(now - 1.0, now)]
    asyncio.run(group.record_server_spans())
    own, servers = group.busy
    assert own == (now - 1.0, now) and servers == pytest.approx((now - 3.0, now - 2.0), abs=0.5)


def test_overhead_is_the_time_in_which_no_group_computed():
    """Two policies and a critic compute from 1 to 4 and from 5 to 7 of 10 seconds: maxima summed by phase would say 6."""
    spans = {"alice": [(101.0, 103.0), (105.0, 106.0)], "carol": [(102.0, 104.0)], "critic": [(105.5, 107.0)]}
    groups = [SimpleNamespace(busy=own) for own in spans.values()]
    metrics = throughput(groups, 20.0, (100.0, 110.0))
    assert metrics["perf/busy_seconds"] == 5.0 and metrics["perf/overhead_share"] == 0.5
    assert metrics["timing_s/step"] == 10.0 and metrics["perf/turns_per_second"] == 2.0


def test_time_before_and_after_the_step_does_not_count():
    """A server also works for a validation, and a span may lie in another."""
    groups = [SimpleNamespace(busy=[(90.0, 102.0), (91.0, 92.0), (109.0, 130.0), (109.5, 109.6)])]
    assert throughput(groups, 1.0, (100.0, 110.0))["perf/overhead_share"] == pytest.approx(0.7)


def test_a_server_gives_each_of_its_spans_once():
    watch = Stopwatch()
    for span in ((1.0, 2.0), (2.0, 3.0), (4.0, 5.0)):
        watch.add(*span)
    assert watch.take() == [(1.0, 3.0), (4.0, 5.0)] and watch.take() == []


SETTINGS = SimpleNamespace(ppo_epochs=1, data_loader_seed=1, shuffle=False)


def group_of_two_ranks():
    config = SimpleNamespace(trainer=SimpleNamespace(balance_batch=True))
    group = WorkerGroup("alice", config, SimpleNamespace(world_size=2), "pool", same_for_all(1.0))
    group.kind = "policy"
    return group


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_rows_that_fill_up_weigh_nothing_in_a_mean_over_sequences(mode):
    """Losses of 1, 2 and 6 at one token each: a mean of 3; the fourth row repeats the third one, masked out."""
    columns = {key: jagged([[1]] * 3, torch.long) for key in ("input_ids", "response_mask")}
    rows = TensorDict({**columns, "loss": jagged([[1.0], [2.0], [6.0]], torch.float32)}, batch_size=[3])
    rows = group_of_two_ranks().mini_batches(rows, 1, SETTINGS)
    size, total = tu.get(rows, "global_batch_size"), 0.0
    for rank in (0, 1):
        part = consecutive(rows, 2 * rank, 2 * rank + 2)
        total += float(
            agg_loss(dense(part["loss"]), dense(part["response_mask"]), mode, dp_size=2, global_batch_size=size)
        )
    assert len(rows) == 4 and total / 2 == pytest.approx(3.0)


def test_fewer_updates_than_wanted_are_warned_of_once(caplog):
    group = group_of_two_ranks()
    for size in (8, 3, 3):
        rows = TensorDict({"input_ids": jagged([[1]] * size, torch.long)}, batch_size=[size])
        group.mini_batches(rows, 4, SETTINGS)
    said = [record.getMessage() for record in caplog.records if "mini-batches" in record.getMessage()]
    assert len(said) == 1 and "'alice': 3 rows over 2 ranks make 1 mini-batches, not 4" in said[0], said


def tokens(lengths, order, ranks):
    size = len(order) // ranks
    return [sum(lengths[row] for row in order[rank * size : (rank + 1) * size]) for rank in range(ranks)]


def test_two_ranks_by_hand():
    lengths = [9, 8, 2, 1]
    assert tokens(lengths, range(4), 2) == [17, 3]
    order = balanced_order(lengths, 2)
    assert sorted(map(sorted, (order[:2], order[2:]))) == [[0, 3], [1, 2]] and tokens(lengths, order, 2) == [10, 10]


def test_a_mini_batch_keeps_its_rows():
    """Rank 0 has rows 0 to 3, rank 1 rows 4 to 7; the first mini-batch is the first two of each."""
    lengths = [9, 8, 5, 5, 2, 1, 1, 1]
    order = balanced_order(lengths, 2, mini_batches=2)
    assert {*order[:2], *order[4:6]} == {0, 1, 4, 5} and {*order[2:4], *order[6:]} == {2, 3, 6, 7}
    first = [sum(lengths[row] for row in order[start : start + 2]) for start in (0, 4)]
    assert first == [10, 10]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_it_is_an_order_and_is_undone(seedling, ranks, mini_batches, random):
    lengths = [random.choice(seedling) for _ in range(len(seedling) * ranks * mini_batches)]
    order = balanced_order(lengths, ranks, mini_batches)
    assert sorted(order) == list(range(len(lengths)))
    balanced = jagged([[float(row)] * lengths[row] for row in order], torch.float32)
    back = in_given_order(balanced, order, len(lengths) - 1)
    assert [row[0].item() for row in back.unbind()] == list(range(len(lengths) - 1))
    assert back.offsets().diff().tolist() == lengths[:-1]


LENGTHS = (9, 8, 2, 1, 7)


class Ranks:
    world_size, workers = 2, []


def group_of(balance, per_row=1):
    group = WorkerGroup(
        "alice", SimpleNamespace(trainer=SimpleNamespace(balance_batch=balance)), Ranks(), "p", same_for_all(9)
    )
    group.kind, group.ranks_per_row = "policy", per_row
    return group


def rows_of_five():
    ids = jagged([[row] * length for row, length in enumerate(LENGTHS)], torch.long)
    return TensorDict({"input_ids": ids, "response_mask": jagged([[1]] * 5, torch.long)}, batch_size=[5])


def test_workers_get_balanced_rows_and_everybody_else_the_order_of_before():
    sent, order = group_of(True)._for_workers(rows_of_five())
    lengths = sent["input_ids"].offsets().diff()
    assert sorted(order) == list(range(6)) and abs(int(lengths[:3].sum() - lengths[3:].sum())) <= 6
    padded = pad_rows(rows_of_five(), 2)
    assert sent["response_mask"].offsets().diff().sum() == 6 and sent["response_mask"].values().sum() == 5, (
        "one is padding"
    )
    back = in_given_order(sent["input_ids"], order, 5)
    assert torch.equal(back.values(), padded["input_ids"].values()[: sum(LENGTHS)])


@pytest.mark.parametrize("balance,per_row", [(False, 1), (True, 2)])
def test_rows_stay_as_they_are_if_that_is_asked_for_or_ranks_split_every_row(balance, per_row):
    sent, order = group_of(balance, per_row)._for_workers(rows_of_five())
    assert order is None and torch.equal(
        sent["input_ids"].values()[: sum(LENGTHS)], rows_of_five()["input_ids"].values()
    )
    back = in_given_order(sent["input_ids"], order, 5)
    assert back.offsets().diff().tolist() == list(LENGTHS)
