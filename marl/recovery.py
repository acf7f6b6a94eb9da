"""Recovery from faults: rebuilds the run in the same process from its newest whole checkpoint."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from marl.cluster.access import Unreachable
from marl.cluster.failures import StartFailed, can_be_mended
from marl.config.errors import ConfigError
from marl.preflight.run_folder import note_restart
from marl.run_setup import Setup
from marl.types import Metrics
from marl.utils import folders

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, Metrics], None]


class TakeDown(ExitStack):
    """Ends all parts of an attempt; the error of one is logged, and hides neither the run's own nor the other parts."""

    def callback(self, end: Callable[..., Any], /, *arguments: Any, **settings: Any) -> Callable[..., Any]:
        def logged() -> None:
            try:
                end(*arguments, **settings)
            except Exception as error:
                logger.error("taking the run down: %s: %s", type(error).__name__, error)

        super().callback(logged)
        return end


class Recovery:
    """Attempts at one run. ``resources.max_restarts`` counts the faults since the run last got further than ever before, so
    that a run of many days outlives many of them, and one that always fails at the same place ends."""

    def __init__(self, setup: Setup, folder: Path, progress: Progress | None) -> None:
        self.setup, self.folder, self.shown = setup, folder, progress
        self.again = False
        """True once the run goes on after a fault of this process's."""
        self.most = setup.config.resources.max_restarts
        self.furthest = self.restarts = 0
        self.rebuilding = False
        """True between a fault and the end of the next step."""

    def note_step(self, step: int, total: int, metrics: Metrics) -> None:
        if step > self.furthest:
            self.furthest, self.restarts = step, 0
        self.rebuilding = False
        if self.shown is not None:
            self.shown(step, total, metrics)

    def after(self, error: Exception) -> None:
        """Prepare the next attempt. Raises the error of an unrecoverable fault, or of one too many; its notes say how to continue
        the run."""
        if isinstance(error, Unreachable) and self.rebuilding:
            error = ConnectionError(str(error))
        elif isinstance(error, ConfigError):
            raise error
        origin, mended = self.origin(), self.can_be_mended(error)
        if not mended or self.restarts >= self.most:
            if mended and self.most:
                error.add_note(f"resources.max_restarts={self.most}: that many restarts made no progress")
            error.add_note(f"the run can be continued from {origin} with trainer.resume_mode=auto")
            raise error
        self.restarts, self.rebuilding, self.again = self.restarts + 1, True, True
        told = "; ".join([str(error).partition("\n")[0], *getattr(error, "__notes__", [])])
        logger.warning(
            "%s: %s. Restart %d of %d (resources.max_restarts), from %s",
            *(type(error).__name__, told, self.restarts, self.most, origin),
        )
        self._note(error, origin)
        folders.clean(self.folder)
        self.setup = Setup.of(to_go_on(self.setup.config, self.folder))

    def _note(self, error: Exception, origin: str) -> None:
        """Note a restart in ``run.json``, where there is room for it: the fault itself counts."""
        try:
            note_restart(self.folder, f"{type(error).__name__}: {error}", origin)
        except OSError as full:
            logger.warning("this restart is not noted in %s: %s", self.folder, full)

    def can_be_mended(self, error: Exception) -> bool:
        """True for a fault, and for what may come of one while the run is rebuilt: a node has gone, Ray does not answer yet."""
        if isinstance(error, StartFailed) and not (self.furthest or self.rebuilding):
            return False
        return can_be_mended(error) or (self.rebuilding and isinstance(error, (TimeoutError, ConnectionError)))

    def origin(self) -> str:
        """Name of what the run is continued from, if it is whole: whoever loads it looks."""
        sealed = folders.complete(self.folder)
        return str(sealed[-1]) if sealed else f"the start of {self.folder}"


def to_go_on(config: DictConfig, folder: Path) -> DictConfig:
    """The configuration with which a run goes on in its own folder, whatever it began from."""
    again: DictConfig = config.copy()
    if config.trainer.resume_mode != "resume_path" or folders.named(folder):
        with open_dict(again):
            again.trainer.resume_mode, again.trainer.resume_from_path = "auto", None
    return again
