"""``marl plan key=value …``: a run's batch arithmetic and memory, without starting it."""

import sys

from omegaconf import DictConfig

from marl.config.overrides import hydra_overrides
from marl.config.words import in_order, train_flags
from marl.main import run_composed
from marl.preflight.plan import plan_text
from marl.preflight.prepare import prepare
from marl.quickstart.assets import planned


def main(argv: list[str] | None = None) -> int:
    """Print the plan. Returns 0, 1 for a failure, 2 for a wrong configuration."""
    words = in_order(train_flags(sys.argv[1:] if argv is None else argv))

    def run(config: DictConfig) -> None:
        with planned(config, prepare) as setup:
            sys.stdout.write(f"{plan_text(setup)}\n")

    return run_composed(hydra_overrides(words), run)
