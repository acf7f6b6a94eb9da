"""Signals to processes of a run that lives in this process, and when it notices them."""

import logging
import os
import threading
import time


def victims(kind):
    """Processes of the run whose name holds this word, or that Python started by a function of this name."""
    from marl.cluster.processes import processes_where
    from marl.utils.run_mark import MARK

    mark = os.environ[MARK]
    found = [process for process in processes_where(mark.__eq__) if kind in " ".join(process.cmdline())]
    assert found, [process.cmdline()[:1] for process in processes_where(mark.__eq__)]
    return sorted(found, key=lambda process: process.pid)


class Hits(logging.Handler):
    """Sends signals to processes of the run, each so many seconds after a step has ended; hears when a fault is noticed."""

    def __init__(self, *plan):
        """``plan``: (step, seconds, kind of process, signal), in order."""
        super().__init__()
        self.plan, self.at, self.seen, self.noticed = list(plan), [], [], []
        logging.getLogger("marl.recovery").addHandler(self)

    def emit(self, record):
        if "Restart" in record.getMessage():
            self.noticed.append(time.monotonic())

    def __call__(self, step, total, metrics):
        self.seen.append((step, time.monotonic()))
        if self.plan and self.plan[0][0] == step:
            _, seconds, kind, number = self.plan.pop(0)
            threading.Timer(seconds, self.hit, (kind, number)).start()

    def hit(self, kind, number):
        victims(kind)[-1].send_signal(number)
        self.at.append(time.monotonic())

    def waits(self):
        """Seconds until each fault was noticed, and from there to the end of the next step."""
        found = []
        for noticed in self.noticed:
            hit = max(at for at in self.at if at <= noticed)
            found.append((noticed - hit, min(at for _, at in self.seen if at > noticed) - noticed))
        return found

    def told(self):
        return "; ".join(
            f"noticed after {notice:.1f} s, trained on after {again:.1f} s more" for notice, again in self.waits()
        )
