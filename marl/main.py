"""``python -m marl.main key=value …``: compose and check the configuration, start the cluster's parts, train.

The only file that decides what Ray resources a run takes.
"""

import asyncio
import errno
import inspect
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any

from marl.config.external import find_own_modules
from marl.config.short_help import show_help
from marl.utils.quiet import quiet, quiet_imports

if __name__ == "__main__":
    show_help(sys.argv[1:])
    quiet_imports(sys.argv)
    find_own_modules()  # before verl imports them

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

import marl.config.schema  # noqa: F401 - registers our groups
from marl.cluster.head_watch import head_watched
from marl.config.composing import composed_once
from marl.config.errors import ConfigError, explain
from marl.config.hydra_settings import check_hydra_settings
from marl.config.keys import check_keys
from marl.config.overrides import hydra_overrides
from marl.config.sweeps import MULTIRUN, sweep_words
from marl.config.words import check_words, in_order, train_flags
from marl.data.columns import split_text
from marl.preflight.prepare import prepare
from marl.preflight.run_folder import claimed
from marl.quickstart.assets import prepared
from marl.report import readme, summary
from marl.report.progress import Lines
from marl.run_setup import Setup
from marl.utils.deadlines import LoopAlarm
from marl.utils.endings import Terminated
from marl.utils.garbage import frozen_gc
from marl.utils.own_frames import own_traceback
from marl.utils.pipes import has_no_reader, reader_left
from marl.utils.process_time import begin_run
from marl.utils.secret_masking import masked_logs, masked_text

CONFIGS = "pkg://marl.configs"
SHOWS_CONFIG = re.compile(r"--(cfg?|in?f?o?|hel?p?)(=|$)|-[rmh]*(c(?![pnd])|i|h)")
"""Flags of Hydra's that print the configuration, in all forms that its parser takes: shortened, clustered, or with the value attached."""
SHOWS_HELP = re.compile(r"--h|-[rm]*h")
OTHER_FOLDER = (
    "name a folder that can be written, such as by trainer.default_local_dir or the environment variable MARL_CACHE"
)
DISK_FAULTS = {
    errno.ENAMETOOLONG: "name a shorter path",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"free some space, or {OTHER_FOLDER}"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR), OTHER_FOLDER),
}
"""Remedies for errors of the file system, which need no traceback."""
LEAST_S = 60.0
"""Shortest deadline of a blocked driver, which may be busy itself for some seconds between two turns."""


def shown_by(words: Sequence[str]) -> str | None:
    """The flag that has the configuration printed, in place of any work."""
    return next((word for word in words if SHOWS_CONFIG.match(word)), None)


def main(argv: list[str] | None = None) -> int:
    """Run, and return the exit code. ``--quiet`` prints no line for a step; all other words are Hydra's."""
    given = sys.argv[1:] if argv is None else argv
    words = sweep_words(in_order(train_flags([word for word in given if word != "--quiet"])), launcher="marl_local")

    def train(config: DictConfig) -> None:
        trainer = run(config, None if "--quiet" in given else Lines())
        if "--quiet" not in given:
            summary.show(trainer.history, len(trainer.validation), trainer.report_folder, trainer.folder)

    return run_composed(hydra_overrides(words), train)


def run_composed(words: list[str], work: Callable[[DictConfig], Any]) -> int:
    """Run some work on the configuration that Hydra composes from a command line, and return the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as they are; we print them
    words = sweep_words(words)
    sys.argv[1:] = words  # Hydra reads only these
    failed: list[Exception] = []

    @hydra.main(config_path=CONFIGS, config_name="marl", version_base="1.3")
    @wraps(work)  # the job is named after its module
    def compose_and_work(config: DictConfig) -> None:
        OmegaConf.clear_cache(config)  # the runs of a sweep would share one stamp, and so one folder
        try:
            check_keys(config)
            work(config)
        except Exception as error:
            if MULTIRUN.intersection(words):
                raise
            failed.append(error)  # Hydra would print a line of its own before it

    def check_and_run() -> None:
        check_words(words)
        if (shows := shown_by(words)) and (sweeps := {"-m", "--multirun"}.intersection(words)):
            flag = sweeps.pop()
            rest = "" if SHOWS_HELP.match(shows) else ", and give each swept key one value"
            raise ConfigError(f"{flag} {shows}: expected one run to show; leave out {flag}{rest}")
        config = composed_once(words, job_name=Path(inspect.getfile(work)).stem)
        if config is None:
            check_hydra_settings(words, work, CONFIGS)
            with masked_output(shown_by(words)):
                compose_and_work()
            for error in failed:
                raise error
        else:
            check_keys(config)
            work(config)

    return exit_code(check_and_run)


def composed_job(whole: DictConfig) -> DictConfig:
    """The configuration of a sweep's job, of what Hydra has composed for it."""
    HydraConfig.instance().set_config(whole)  # for ``${hydra:…}``
    OmegaConf.clear_cache(whole)
    config: DictConfig = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
    check_keys(config)
    return config


@contextmanager
def masked_output(wanted: Any) -> Iterator[None]:
    """Buffer the output and print it masked at the end; if not ``wanted``, print as usual."""
    if not wanted:
        yield
        return
    shown = sys.stdout
    with redirect_stdout(io.StringIO()) as printed:
        try:
            yield
        finally:
            print(masked_text(printed.getvalue()), end="", file=shown)


def exit_code(work: Callable[[], Any]) -> int:
    """Do some work, print what goes wrong: 0, 1 for a failure, 2 for a wrong configuration, 130 for Ctrl-C, 143
    for SIGTERM."""
    try:
        work()
        print(end="", flush=True)  # stdout may be closed
    except (ConfigError, HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        print(masked_text(f"configuration error: {explain(error)}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt as ended:
        print("interrupted; workers and servers have been stopped", file=sys.stderr)
        return 143 if isinstance(ended, Terminated) else 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and reader_left():
            return 1
        if isinstance(error, OSError) and error.filename and error.errno in DISK_FAULTS:
            print(
                masked_text(f"run failed: {error.filename}: {error.strerror}; {DISK_FAULTS[error.errno]}"),
                file=sys.stderr,
            )
            return 1
        failure = f"{own_traceback(error) or traceback.format_exc()}run failed: {type(error).__name__}: {error}"
        print(masked_text(failure), file=sys.stderr)
        return 1
    return 0


def run(config: DictConfig, progress: Any = None) -> Any:
    """Check, start, train, stop; after a fault start again. Returns the trainer, whose workers are gone by then."""
    with told_of_no_reader(), quiet(bool(config.verbose)), masked_logs():
        begin_run()
        setup = prepared(config, prepare)
        # heavy: imported once the configuration has been checked
        from marl.cluster.session import session
        from marl.preflight.checks import check_endpoints
        from marl.preflight.plan import summary_text
        from marl.recovery import Recovery

        if rows := split_text(setup.config):
            print(rows, flush=True)
        print(summary_text(setup), flush=True)
        check_endpoints(setup)
        with claimed(setup.config) as folder, disk_of(folder):
            begin_folder(folder, setup)
            recovery = Recovery(setup, folder, progress)
            while True:
                try:
                    with session(recovery.setup), blocked_alarm(recovery.setup.config), exits_are_errors():
                        return asyncio.run(_train(recovery.setup, recovery.note_step, recovery.again))
                except Exception as error:
                    recovery.after(error)


def begin_folder(folder: Path, setup: Setup) -> None:
    """Say where the results are, and write the folder's README; a validation leaves the run's own, which says how to continue it."""
    if not (setup.config.trainer.val_only and (folder / readme.NAME).is_file()):
        readme.write(folder, setup.method.learns)
    print(f"results: {folder}", flush=True)


@contextmanager
def told_of_no_reader() -> Iterator[None]:
    """Say why a run ends whose output nobody reads any more: a command that only prints, as into ``head``, ends silently."""
    try:
        yield
    except (BrokenPipeError, SystemExit) as error:
        if has_no_reader(sys.stdout) or isinstance(error.__context__, BrokenPipeError):  # rich's way to end
            print("run ended: nobody reads its output any more", file=sys.stderr)
        raise


@contextmanager
def disk_of(folder: Path) -> Iterator[None]:
    """Name a run's folder in the error of a full disk, which names no file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.filename = error.filename or str(folder)
        raise


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """A runner, world or tool that calls ``sys.exit()`` would end the run without a word."""
    try:
        yield
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # rich's way to end
            raise
        where = traceback.extract_tb(left.__traceback__)[-1]
        raise RuntimeError(
            f"{where.filename}, line {where.lineno}: sys.exit({left.code!r}) was called during the run; raise an exception "
            "instead, which ends its own episode alone"
        ) from left


def blocked_alarm(config: DictConfig) -> LoopAlarm:
    """Alarm for a user's code that waits without ``await``."""
    from marl.cluster.stacks import FOLDER, dump

    stacks = Path(config.trainer.default_local_dir) / FOLDER
    remedy = "resources.one_process=false " * config.resources.one_process + "controller.num_workers=1"
    what = (
        "a call that blocks the driver, as an environment, a runner or a tool does that waits without await "
        f"(stacks of all processes: {stacks}; {remedy} gives episodes a process),"
    )
    seconds = max(config.controller.episode_timeout_s, LEAST_S)
    return LoopAlarm(seconds, what, "controller.episode_timeout_s", lambda: dump(stacks))


@head_watched()
async def _train(setup: Setup, progress: Any, again: bool) -> Any:
    from marl.build import build
    from marl.cluster.stacks import stacks_of_a_hang
    from marl.evaluation.baselines import run_baselines
    from marl.recovery import TakeDown

    config = setup.config
    with TakeDown() as trackers:
        with TakeDown() as cleanup, stacks_of_a_hang(Path(config.trainer.default_local_dir)):
            trainer = await build(setup, cleanup, progress, again)
            trackers.callback(lambda: trainer.tracking.finish(int(sys.exception() is not None)))
            with frozen_gc():
                await trainer.fit()
        if config.baseline and not config.trainer.val_only:
            with frozen_gc():
                await run_baselines(config, trainer, build)
    return trainer


if __name__ == "__main__":
    sys.exit(main())
