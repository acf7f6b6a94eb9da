"""Weights travel through verl's sender and receiver over a real socket; the receiver may fail at any moment."""

import asyncio
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import RayTaskError

import marl.platform.cpu  # noqa: F401 - shared memory, as on any platform without CUDA's
from tests.engines import engines_importable


@pytest.fixture(scope="module")
def watched():
    with engines_importable():
        from marl.rollout import watched_sender

        yield watched_sender


class Call:
    """A server's call in a thread, and the part of Ray that asks for its answer."""

    def __init__(self, work):
        self.future = Future()
        self.thread = threading.Thread(target=self.run, args=(work,), daemon=True)
        self.thread.start()

    def run(self, work):
        try:
            self.future.set_result(work())
        except Exception as error:
            self.future.set_exception(RayTaskError("generate", "its traceback", error))

    def wait(self, refs, timeout):
        assert refs == [self] and timeout == 0
        return ([self], []) if self.future.done() else ([], [self])

    def get(self, ref):
        return ref.future.result()


def send(watched, monkeypatch, path, weights, receive, seconds=20.0):
    handle = f"ipc://{path}/sync.sock"
    call = Call(lambda: receive(handle))
    monkeypatch.setattr(watched, "ray", SimpleNamespace(wait=call.wait, get=call.get))
    sender = watched.WatchedSender(
        receiving=call, whose="the vLLM server of policy 'p'", seconds=seconds, key="resources.sync_timeout_s",
        zmq_handle=handle, bucket_size_mb=1, use_shm=True,
    )  # fmt: skip
    asyncio.run(sender.async_send_weights(iter(weights.items())))
    call.thread.join(10)


def receiver(handle):
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    return BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)


@pytest.fixture
def weights():
    """Three buckets of one megabyte."""
    return {f"w{i}": torch.randn(150_000, generator=torch.Generator().manual_seed(i)) for i in range(4)}


def test_weights_arrive_bucket_by_bucket(watched, monkeypatch, tmp_path, weights):
    arrived = {}

    def receive(handle):
        receiver(handle).receive_weights(lambda part, last: arrived.update({k: v.clone() for k, v in part}))

    send(watched, monkeypatch, tmp_path, weights, receive)
    assert arrived.keys() == weights.keys() and all(torch.equal(arrived[key], weights[key]) for key in weights)


@pytest.mark.parametrize("buckets", [0, 2])
def test_a_receiver_that_fails_is_heard_at_once_with_its_cause(watched, monkeypatch, tmp_path, weights, buckets):
    def receive(handle):
        taken = []

        def take(part, last):
            if len(taken) >= buckets:
                raise KeyError("model.embed")
            taken.append(len(part))
            part.clear()

        if not buckets:
            raise KeyError("model.embed")
        receiver(handle).receive_weights(take)

    began = time.monotonic()
    with pytest.raises(watched.WeightsRefused, match="server of policy 'p' failed to take the weights"):
        send(watched, monkeypatch, tmp_path, weights, receive)
    assert time.monotonic() - began < 5


def test_a_receiver_that_ends_too_early_is_no_success(watched, monkeypatch, tmp_path, weights):
    with pytest.raises(watched.WeightsRefused, match="ended its weight sync before all weights had been sent"):
        send(watched, monkeypatch, tmp_path, weights, lambda handle: None)


def test_a_receiver_that_hangs_ends_the_sync_at_the_deadline_and_names_the_key(watched, monkeypatch, tmp_path, weights):
    over = threading.Event()
    with pytest.raises(
        TimeoutError, match=r"took no weights for 0.5 s, half of resources.sync_timeout_s.*raise the key"
    ):
        send(watched, monkeypatch, tmp_path, weights, lambda handle: over.wait(20), seconds=0.5)
    over.set()


def test_nothing_is_left_in_shared_memory(watched, monkeypatch, tmp_path, weights):
    import glob

    before, noted = set(glob.glob("/dev/shm/verl_weights_*")), []
    monkeypatch.setattr(watched.segments, "note", lambda name: noted.append(glob.glob(f"/dev/shm/{name}")))
    with pytest.raises(watched.WeightsRefused):
        send(watched, monkeypatch, tmp_path, weights, lambda handle: None)
    assert set(glob.glob("/dev/shm/verl_weights_*")) <= before
    assert [len(found) for found in noted] == [1], "a kill meanwhile would have left it: the next run knows its name"
