"""``marl ensemble key=value …``: a table of the accuracy of a run's agents, alone and together.

Each agent answers the validation tasks alone, as in a single turn; then their vote, and the ways to choose one common answer
token by token (:mod:`marl.rollout.joint_decoding`).
"""

import asyncio
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transformers.utils import logging as transformers_logging

from marl.config.errors import ConfigError, line
from marl.config.overrides import hydra_overrides
from marl.evaluation.ensemble_answers import MODES, Ensemble, weights_of
from marl.evaluation.load import device_of
from marl.main import run_composed
from marl.preflight.prepare import prepare
from marl.report import ensemble_table as report
from marl.rewards import build_reward
from marl.utils.numbers import Number
from marl.utils.quiet import quiet

WEIGHT = Number(0)


def main(argv: list[str] | None = None) -> int:
    """Measure, and return the exit code. The group ``ensemble`` is this command's alone."""
    transformers_logging.disable_progress_bar()
    words = hydra_overrides(sys.argv[1:] if argv is None else argv)
    place = next(i for i, word in enumerate(words) if word.startswith("hydra.searchpath="))
    return run_composed([*words[:place], "+ensemble=schema", *words[place:]], run)


def run(config: DictConfig) -> dict[str, Any]:
    """Check, load, run and score; print the table, and save it as JSON beside the checkpoint that answered."""
    with quiet(bool(config.verbose)):
        return measure(config)


def measure(config: DictConfig) -> dict[str, Any]:
    setup = prepare(config)
    config = setup.config
    check_settings(config)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as in servers: more have other last bits
    with ExitStack() as cleanup:
        ensemble = Ensemble(setup)
        reward = build_reward(config, cleanup)
        ways = asyncio.run(ensemble.measure(reward))
    agents = ways[: len(config.agents)]
    mean = report.mean_of_agents(agents)
    rows = [report.numbers(way, mean) for way in (*agents, mean, report.best_agent(agents), *ways[len(agents) :])]
    source = config.ensemble.checkpoint
    result = {"checkpoint": source, "seed": config.seed, "tasks": len(ensemble.tasks), "samples": ensemble.samples}
    folder = Path(source).expanduser().resolve().parent if source else Path(config.trainer.default_local_dir)
    path = folder / "ensembles" / f"{Path(source).name if source else 'first'}.json"
    report.write_json(result | {"rows": rows}, path)
    sys.stdout.write(f"{report.table(rows)}\nnumbers: {path}\n")
    return result | {"rows": rows}


def check_settings(config: DictConfig) -> None:
    """Raise ConfigError for the first key of ``ensemble`` that holds what it cannot."""
    settings, agents = config.ensemble, list(config.agents)
    if settings.modes is not None and not settings.modes:
        raise ConfigError(f"ensemble.modes=[]: expected some of {', '.join(MODES)}, or null for all that are possible")
    weights = weights_of(config)
    if len(weights) != len(agents) or not all(WEIGHT.takes(weight) for weight in weights) or not sum(weights):
        raise ConfigError(
            f"ensemble.weights={weights}: expected one number for each of {', '.join(agents)}, at least 0 and one above it; or null"
        )
    try:
        torch.empty(0, device=device_of(config))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"ensemble.device={device_of(config)}: {line(error)}; expected a device of this machine, such as cpu"
        ) from None
