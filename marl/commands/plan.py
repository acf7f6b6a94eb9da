"""``marl plan --cluster 2x8x80GB key=value …``: a run's arithmetic, memory and placement, without the cluster."""

import sys
from functools import partial

from omegaconf import DictConfig

from marl.config.overrides import hydra_overrides
from marl.config.words import in_order, train_flags
from marl.main import run_composed
from marl.preflight.cluster_plan import Cluster, cluster_plan
from marl.preflight.plan_report import plan_text
from marl.preflight.prepare import prepare
from marl.quickstart.assets import planned

OPTION = "--cluster"


def main(argv: list[str] | None = None) -> int:
    """Print the plan. Returns 0 where it fits, 1 where it does not, 2 for a wrong configuration."""
    words, described = split(sys.argv[1:] if argv is None else argv)
    words = in_order(train_flags(words))
    problems: list[str] = []

    def run(config: DictConfig) -> None:
        cluster = None if described is None else Cluster.of(described)
        with planned(config, partial(prepare, cluster=cluster)) as setup:
            text, found = (plan_text(setup), []) if cluster is None else cluster_plan(setup, cluster)
        problems.extend(found)
        sys.stdout.write(f"{text}\n")

    return run_composed(hydra_overrides(words), run) or int(bool(problems))


def split(words: list[str]) -> tuple[list[str], str | None]:
    """The words for Hydra, and the described cluster; None for this machine."""
    for index, word in enumerate(words):
        if word.startswith(f"{OPTION}="):
            return [*words[:index], *words[index + 1 :]], word.partition("=")[2]
        if word == OPTION:
            return [*words[:index], *words[index + 2 :]], "".join(words[index + 1 : index + 2])
    return list(words), None
