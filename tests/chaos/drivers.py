"""Drivers of runs: started as a shell starts the command, with all the processes that their runs have."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from marl.cluster.processes import processes_where

ROOT = Path(__file__).parents[2]


def start(command, folder, log):
    """Start ``python -m marl.main`` with these words; its folder and its log are named on the process."""
    words = [sys.executable, "-m", "marl.main", "--config-name", "quickstart", *command]
    with open(log, "a") as file:
        driver = subprocess.Popen(
            [*words, f"trainer.default_local_dir={folder}"], stdout=file, stderr=file, cwd=ROOT,
            start_new_session=True, preexec_fn=hear_ctrl_c,
        )  # fmt: skip
    driver.folder, driver.log = folder, log
    return driver


def hear_ctrl_c():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def of(driver):
    """Processes of a driver's run, whoever their parent is by now."""
    return processes_where(lambda mark: f"/{driver.pid}/" in mark)


def title(process):
    """Name by which a process calls itself; empty if it is gone."""
    with suppress(psutil.Error):
        return "".join(process.cmdline()[:1])
    return ""


def end(driver):
    """End a driver, and all that is left of its run."""
    driver.poll() is None and driver.kill()
    driver.wait()
    for process in of(driver):
        process.kill()
