"""Parts of the checkpoint that a run goes on from, looked at before models are loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marl.config.errors import ConfigError
from marl.config.kinds import adapter_policies
from marl.config.placement import critic_pool, pool_of, size_of
from marl.config.policies import own_settings
from marl.config.rules.checkpoints import STATES
from marl.utils.manifest import MANIFEST, facts_of

FILES = dict(zip(STATES, ("model_world_size_*", "optim_world_size_*", "extra_state_world_size_*"), strict=True))
"""verl's files, by what they hold."""


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


def must_hold_all_states(config: Any, origin: Path) -> None:
    """Raise ConfigError for a checkpoint without weights, optimizer or schedule of a part, and where the run would not read
    them: it would go on with those it began with. A validation needs the weights alone."""
    needed = STATES[:1] if config.trainer.get("val_only") else STATES
    for name, kind in (part.rsplit("/", 1) for part in saved_ranks(origin)):
        if kind != "critic" and name in adapter_policies(config):  # whose checkpoints always hold all
            continue
        settings = config.critic if kind == "critic" else own_settings(config, name).actor
        group = "critic.checkpoint" if kind == "critic" else "actor_rollout_ref.actor.checkpoint"
        key, contents = f"{group}.load_contents", settings.checkpoint.load_contents
        unread = [state for state in needed if state not in contents]
        if unread:
            raise ConfigError(
                f"{key}={contents}: {name}/{kind} of {origin} would go on without its {' and '.join(unread)}; expected "
                f"{', '.join(needed)}; or begin a new run from its weights (model.path=…/huggingface)"
            )
        absent = [state for state in STATES if state in contents and not any((origin / name / kind).glob(FILES[state]))]
        if absent:
            raise ConfigError(
                f"{origin} holds no {' and no '.join(absent)} of {name}/{kind}: {group}.save_contents left it out, and a run "
                "cannot go on from the rest; begin a new run from its weights (model.path=…/huggingface), or validate with "
                f"{key}=[model] trainer.resume_changes=[{key}]"
            )


def check_ranks(origin: Path, part: str, saved: int | None, ranks: int) -> None:
    """Raise ConfigError where a part of a checkpoint was saved by another number of ranks; None is known of none."""
    if saved not in (None, ranks):
        raise ConfigError(
            f"{origin}: {part} was saved by {saved} ranks, and this run has {ranks}; resume with as many (trainer.nnodes, "
            "trainer.n_gpus_per_node, resources.pools), or begin a new run from its weights (model.path=…/huggingface)"
        )
