"""The head of a real cluster, stopped: its port still accepts connections."""

import asyncio
import os
import signal
import time

import psutil
import pytest
import ray

from marl.cluster.head_watch import answers


def comes_to_answer(address):
    return any(asyncio.run(answers(address)) for _ in range(20))


@pytest.mark.slow
def test_a_head_that_is_stopped_does_not_answer(cluster):
    head, address = (
        ray._private.worker._global_node.all_processes["gcs_server"][0],
        ray.get_runtime_context().gcs_address,
    )
    assert comes_to_answer(address)
    os.kill(head.process.pid, signal.SIGSTOP)
    try:
        while psutil.Process(head.process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert not asyncio.run(answers(address))
    finally:
        os.kill(head.process.pid, signal.SIGCONT)
    assert comes_to_answer(address)
