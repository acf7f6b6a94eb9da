"""The best checkpoints by a metric of their steps."""

import logging
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

from marl.utils.folders import numbered
from marl.utils.manifest import Damaged, facts_of, write

logger = logging.getLogger(__name__)
NAMES = 8
"""Metrics that a warning lists."""
LESS_IS_BETTER = re.compile(r"(.*/)?(\w*loss|perplexity)(/.*)?")
OTHER_DATA = re.compile(r"validation_[0-9a-f]+/")
"""Prefix of the metrics of a validation on other data, or with other settings, than the run's first."""
warned: set[Path] = set()


def less_is_better(metric: str) -> bool:
    """True for losses and perplexities."""
    return LESS_IS_BETTER.fullmatch(metric) is not None


def best_steps(root: Path, metric: str, count: int, last: int) -> list[int]:
    """Steps of the checkpoints with the best values: the largest, or the smallest of a loss; among equals the later. Steps without
    the metric, or with NaN, are left out; where nothing but the ``last`` ones would stay, a warning says so once."""
    if not count:
        return []
    measured = metrics_of(root)
    sign = -1 if less_is_better(metric) else 1
    values = {step: metrics[metric] for step, metrics in measured.items() if metric in metrics}
    known = sorted((sign * value, step) for step, value in values.items() if not math.isnan(value))
    newest = measured[max(measured)] if measured else {}
    if root not in warned and ((not known and len(measured) > last) or (known and is_on_other_data(metric, newest))):
        warned.add(root)
        names = sorted(set(chain.from_iterable(measured.values())))
        logger.warning(
            "trainer.keep_best=%d compares trainer.keep_best_metric=%s, which %s has: of the others only the last %d stay (said once). "
            "Expected one of their %d metrics, the nearest are: %s; validations are measured at steps that trainer.test_freq divides: "
            "set it so that it divides trainer.save_freq",
            count, metric, "the newest checkpoint no longer" if known else "no step that was saved", last, len(names),
            ", ".join(get_close_matches(metric, names, NAMES, cutoff=0.0)) or "none",
        )  # fmt: skip
    return [step for _, step in known[::-1][:count]]


def is_on_other_data(metric: str, metrics: Mapping[str, float]) -> bool:
    """True if a validation of a checkpoint has this number under another name: that of its own data or settings."""
    number = metric.removeprefix("val")
    others = any(OTHER_DATA.match(name) and name.endswith(number) for name in metrics)
    return metric.startswith("val/") and metric not in metrics and others


def metrics_of(root: Path) -> dict[int, Mapping[str, float]]:
    """Metrics of each checkpoint's step, without the damaged ones."""
    found = {}
    for step, folder in numbered(root):
        with suppress(Damaged):
            found[step] = facts_of(folder)["metrics"]
    return found


def add_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add a validation that was repeated to the metrics of the step whose checkpoint this is, if there is one."""
    with suppress(Damaged):
        facts = facts_of(folder)
        write(folder, facts | {"metrics": facts["metrics"] | {key: float(value) for key, value in metrics.items()}})
