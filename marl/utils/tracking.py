"""A run's trackers: verl's, and ``metrics.jsonl`` in the run's own folder."""

import json
import logging
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from verl.utils.tracking import Tracking

from marl.utils.folders import METRICS
from marl.utils.manifest import replace_text, sync_folder
from marl.utils.plain_files import opener
from marl.utils.secret_masking import masked_text

logger = logging.getLogger(__name__)
MLFLOW = "mlflow.db"


class MetricsFile:
    """Appends ``{"step": …, "data": {…}}``, a line a call.

    verl's own ``file`` tracker takes its path from the process's environment, where another run may have left one, and
    empties the file that it finds.
    """

    def __init__(self, path: Path, step: float) -> None:
        """``step`` is the step that the run goes on from: later lines are of work that is done again, and are dropped."""
        self.path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if (path.parent / f"global_step_{step}").is_dir():  # not a new run, nor one that goes on from another folder
            warn_of_lost_steps(path, {step_of(line) for line in lines}, int(step))
        if path.exists():
            kept = [line for line in lines if step > 0 and step_of(line) <= step]  # none that was cut short
            replace_text(path, b"".join(kept).decode())
            sync_folder(path.parent)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        shown = {key: masked_text(value) if isinstance(value, str) else value for key, value in data.items()}
        line = orjson.dumps({"step": step, "data": shown}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        with open(self.path, "ab", opener=opener) as file:
            file.write(line)

    def finish(self) -> None:
        """Asked for by verl; no file stays open."""


def warn_of_lost_steps(path: Path, found: Collection[float], step: int) -> None:
    """Warn where the numbers of steps before a checkpoint are gone."""
    lost = [earlier for earlier in range(1, step + 1) if earlier not in found]
    if lost:
        logger.warning(
            "%s %s: the numbers of %d of the %d steps before are lost, the first of step %d; curves, marl report and marl compare "
            "will lack them. Restore the file from a copy, and start again, to have them",
            path, "is damaged" if path.exists() else "is missing", len(lost), step, lost[0],
        )  # fmt: skip


def step_of(line: bytes) -> float:
    """The step of a line; NaN, which compares as neither earlier nor later, for an incomplete line."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.nan
    except (ValueError, KeyError, TypeError):
        return math.nan


def tracking_of(trainer: Any, settings: dict[str, Any], step: int = 0) -> Tracking:
    """The trackers that ``trainer.logger`` names, for a run that continues from ``step``; they show ``settings``.

    Under ``trainer.val_only`` no step is repeated, and the lines of all steps stay.
    """
    folder = Path(trainer.default_local_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with tracker_folders(folder):
        if "mlflow" in trainer.logger:
            keep_mlflow_files(trainer.project_name, folder)
        tracking = Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            default_backend=[name for name in trainer.logger if name != "file"],
            config=settings,
        )
    if "file" in trainer.logger:
        tracking.logger["file"] = MetricsFile(folder / METRICS, math.inf if trainer.val_only else step)
    return tracking


def keep_mlflow_files(experiment: str, folder: Path) -> None:
    """Let MLflow keep a run's files in its folder, beside its database there: by itself it takes the working folder."""
    import mlflow

    uri = os.environ["MLFLOW_TRACKING_URI"]
    mlflow.set_tracking_uri(uri)
    if uri.endswith(str(folder / MLFLOW)) and mlflow.get_experiment_by_name(experiment) is None:
        mlflow.create_experiment(experiment, (folder / "mlflow").resolve().as_uri())


@contextmanager
def tracker_folders(folder: Path) -> Iterator[None]:
    """Let verl's trackers, which read the environment as they start, write into ``folder`` unless the user says otherwise;
    without a key, wandb writes offline."""
    wanted = {
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "WANDB_DIR": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / MLFLOW}",
    }
    if "WANDB_API_KEY" not in os.environ:
        wanted["WANDB_MODE"] = "offline"
    known = sys.modules.get("wandb")
    if known is not None and known.run is None:
        known.teardown()  # it reads its folder once in a process, which may make the runs of a sweep
    added = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]
