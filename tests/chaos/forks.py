"""Processes of their own for work that is to be killed: forks, which need not import anything again."""

import gc
import os
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

from tqdm.std import tqdm

from marl.cluster.workers import shard_files


def forked(work):
    """Start a process that does this work and ends; its number."""
    child = os.fork()
    if child:
        return child
    try:
        gc.freeze()  # what the parent left in cycles may wait for threads as it is destroyed
        for bar in (tqdm, *tqdm.__subclasses__()):
            bar.set_lock(threading.RLock())  # theirs is one of all forks, and whoever is killed with it keeps it
        shard_files.THREAD = ThreadPoolExecutor(1)  # a fork has none of its parent's threads
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def in_a_fork(work):
    """The status of a process of its own that does this work."""
    return os.waitpid(forked(work), 0)[1]


def end(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
