"""Tasks are read ahead, and a checkpoint knows only of those that a step has asked for."""

import asyncio
import copy
import threading

import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from marl.controller.tasks import TaskStream, loader_of


class Numbers(Dataset):
    """Counts its readers' threads, and may fail."""

    def __init__(self, bad=None):
        self.bad, self.threads = bad, []

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.threads.append(threading.current_thread())
        if index == self.bad:
            raise ValueError(f"row {index} is broken")
        return index


def stream(ahead=True, shuffle=True, **options):
    rows = Numbers(**options)
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(3)) if shuffle else None
    loader = StatefulDataLoader(rows, batch_size=2, sampler=sampler, drop_last=True, collate_fn=list)
    return TaskStream(loader, ahead)


async def steps(tasks, count, states=None):
    """The batches of so many steps; ``states`` get what a checkpoint after each would hold."""
    batches = []
    for _ in range(count):
        batches.append(await tasks.next())
        await tasks.read_ahead()
        if states is not None:
            states.append(copy.deepcopy(tasks.state_dict()))
    return batches


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_resumed_after_any_step_reads_what_the_whole_run_reads(shuffle):
    """Three batches an epoch: the steps end within epochs, at their ends, and where the next is drawn already."""
    states, plain = [], []
    whole = asyncio.run(steps(stream(shuffle=shuffle), 8, states))
    assert whole == asyncio.run(steps(stream(ahead=False, shuffle=shuffle), 8, plain))
    assert (whole[:3] != whole[3:6]) is shuffle, "an order for every epoch"
    for done, (state, without) in enumerate(zip(states, plain, strict=True), start=1):
        for saved in (state, without):
            resumed = stream(shuffle=shuffle)
            resumed.load_state_dict(saved)
            assert asyncio.run(steps(resumed, 8 - done)) == whole[done:], done


def test_an_iterator_of_the_loader_draws_nothing_from_the_global_generator(compose_config):
    """It would draw at other moments in a resumed run: ahead of a checkpoint here, and after it there."""
    loader = loader_of(compose_config("data.train_batch_size=2"), Numbers())
    before = torch.get_rng_state()
    assert len(list(loader)) == len(list(loader)) == 3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_that_fill_no_batch_are_named(compose_config, caplog, shuffle):
    words = ["data.train_batch_size=4", f"data.shuffle={shuffle}"]
    loader_of(compose_config(*words), Numbers())
    assert "an epoch trains 4 of 7 rows and leaves out 3" in caplog.text
    assert ("others each time" if shuffle else "always the last ones") in caplog.text
    caplog.clear()
    for no_rest in ("data.train_batch_size=7", "trainer.total_training_steps=1", "trainer.val_only=true"):
        loader_of(compose_config(*words, no_rest), Numbers())
    assert not caplog.text


def test_loading_forgets_what_was_read_ahead():
    tasks = stream(shuffle=False)
    asyncio.run(steps(tasks, 1))
    state = tasks.state_dict()
    asyncio.run(steps(tasks, 1))
    tasks.load_state_dict(state)
    assert asyncio.run(steps(tasks, 1)) == [[2, 3]]


def test_it_reads_in_a_thread_and_nothing_before_the_first_step():
    tasks = stream(shuffle=False)
    rows = tasks.loader.dataset
    asyncio.run(tasks.read_ahead())
    assert not rows.threads
    asyncio.run(steps(tasks, 1))
    assert [thread is threading.main_thread() for thread in rows.threads] == [True, True, False, False]


def test_an_error_ahead_spoils_the_step_that_asks_for_it():
    tasks = stream(shuffle=False, bad=2)
    assert asyncio.run(steps(tasks, 1)) == [[0, 1]]
    with pytest.raises(ValueError, match="row 2 is broken"):
        asyncio.run(tasks.next())


def test_a_loader_with_processes_of_its_own_is_not_read_in_a_thread():
    """A process forked from a thread may end in error, in the middle of an update."""
    rows = Numbers()
    assert TaskStream(StatefulDataLoader(rows, batch_size=2)).reads_ahead
    assert not TaskStream(StatefulDataLoader(rows, batch_size=2, num_workers=1)).reads_ahead
