"""The order in which an adapter's sync wakes a server that shares its GPUs with the trainer."""

import asyncio
from types import SimpleNamespace

import pytest

from marl.cluster.workers import adapter_worker
from marl.cluster.workers.adapter_worker import AdapterWorker


class Server:
    def __init__(self, done):
        self.done = done

    async def resume(self, tags):
        self.done.append(*tags)

    async def update_adapter(self, *arguments):
        self.done.append("adapter")


@pytest.fixture
def synced(monkeypatch):
    def synced(sleeps):
        done = []
        device = SimpleNamespace(empty_cache=lambda: done.append("emptied"))
        monkeypatch.setattr(adapter_worker, "get_torch_device", lambda: device)
        monkeypatch.setattr("torch.distributed.barrier", lambda: done.append("all are here"))
        worker = object.__new__(AdapterWorker)
        worker.config = SimpleNamespace(rollout=SimpleNamespace(free_cache_engine=sleeps))
        worker.rollout, worker.base_is_served = Server(done), True
        worker.specs = {"alice": SimpleNamespace(scaling=2.0)}
        asyncio.run(worker.sync_adapter("alice", 1, False))
        return done

    return synced


def test_the_trainer_frees_its_memory_before_servers_take_theirs(synced):
    """As verl's own sync of whole models: a server of several ranks wakes all of them at once."""
    assert synced(sleeps=True) == ["emptied", "weights", "adapter", "emptied", "all are here", "kv_cache"]


def test_servers_that_stay_awake_wait_for_nobody(synced):
    assert synced(sleeps=False) == ["adapter"]
