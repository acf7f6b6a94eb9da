"""Parts of the checkpoint that a run goes on from, looked at before models are loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marl.config.errors import ConfigError
from marl.config.placement import critic_pool, pool_of, size_of
from marl.utils.manifest import MANIFEST, facts_of


def saved_ranks(origin: Path) -> Mapping[str, int]:
    """The number of ranks that saved each part, as ``alice/actor``; none of a folder that is no checkpoint."""
    ranks: Mapping[str, int] = facts_of(origin).get("world_size", {}) if (origin / MANIFEST).is_file() else {}
    return ranks


def must_have_as_many_ranks(config: Any, origin: Path) -> None:
    """Raise ConfigError for a checkpoint whose shards are of another number of ranks than the run's; before models are loaded."""
    for part, ranks in saved_ranks(origin).items():
        name, kind = part.rsplit("/", 1)
        pool = critic_pool(config, name) if kind == "critic" else pool_of(config, name)
        check_ranks(origin, part, ranks, size_of(config, pool).ranks)


def check_ranks(origin: Path, part: str, saved: int | None, ranks: int) -> None:
    """Raise ConfigError where a part of a checkpoint was saved by another number of ranks; None is known of none."""
    if saved not in (None, ranks):
        raise ConfigError(
            f"{origin}: {part} was saved by {saved} ranks, and this run has {ranks}; resume with as many (trainer.nnodes, "
            "trainer.n_gpus_per_node, resources.pools), or begin a new run from its weights (model.path=…/huggingface)"
        )
