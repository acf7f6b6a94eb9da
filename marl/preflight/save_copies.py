"""Copies in the memory of the hosts, from which a checkpoint is written beside the next step."""

from collections.abc import Mapping, Sequence

import psutil

from marl.config.kinds import adapter_policies
from marl.config.placement import size_of
from marl.config.policies import holds_reference, own_settings
from marl.preflight.checks import CheckedSetup
from marl.preflight.memory_plan import Members, Memory


def copies_of(setup: CheckedSetup, members: Members) -> float:
    """Bytes on all hosts together; 0 where nothing is saved in the background."""
    settings = setup.config.trainer
    saves = (settings.save_freq > 0 or settings.save_final) and not settings.val_only
    if not saves or not settings.save_in_background:
        return 0.0
    return sum(copies_of_pool(setup, own, size_of(setup.config, pool).ranks) for pool, own in members.items())


def copies_of_pool(setup: CheckedSetup, members: Sequence[tuple[str, Memory]], ranks: int) -> float:
    """Adapters on one base share a copy of it on the first rank, and are merged with it one after another."""
    adapters = {name: memory for name, memory in members if name in adapter_policies(setup.config)}
    own = sum(
        memory.moments * 3 / 2 for memory in adapters.values()
    )  # an adapter's parameters, and two moments of each
    own += sum(of_rank(setup, name, memory, ranks) for name, memory in members if name not in adapters)
    merged = max((memory.weights for name, memory in adapters.items() if writes_whole(setup, name)), default=0.0)
    return ranks * (own + 2 * merged)


def of_rank(setup: CheckedSetup, name: str, memory: Memory, ranks: int) -> float:
    """The parts that ``save_contents`` names, a critic's target, and a reference that is renewed. A rank that is alone writes
    its whole model from the copies of its shard, if it writes the shard too."""
    config = setup.config
    if name in setup.pool_by_policy:
        own = own_settings(config, name)
        trainer, model, kept = own.actor, own.model, memory.weights if renews_reference(setup, name) else 0.0
    else:
        trainer, model, kept = config.critic, config.critic.model, memory.reference
    if trainer.strategy != "fsdp2":  # FSDP1 writes at once
        return 0.0
    contents = trainer.checkpoint.save_contents
    shared = ranks == 1 and not model.lora_rank and "model" in contents
    sizes = {"model": memory.weights, "optimizer": memory.moments, "hf_model": 0.0 if shared else memory.weights}
    return kept + sum(sizes.get(kind, 0.0) for kind in contents)


def renews_reference(setup: CheckedSetup, name: str) -> bool:
    return setup.config.trainer.ref_update_freq > 0 and holds_reference(setup.config, own_settings(setup.config, name))


def writes_whole(setup: CheckedSetup, name: str) -> bool:
    return "hf_model" in own_settings(setup.config, name).actor.checkpoint.save_contents


def text_of(copies: float) -> list[str]:
    """One line, or none if nothing is copied."""
    said = "copies on the hosts while a checkpoint is written (trainer.save_in_background)"
    return [f"{said}: {copies / 1e9:.3g} GB in all"] if copies else []


def lines_of(setup: CheckedSetup, members: Members, peaks: Mapping[str, float]) -> list[str]:
    """The same, with a warning if this machine is too small for all ranks of a run on its CPUs and the copies. ``peaks``: memory
    of a rank, by pool."""
    config, copies = setup.config, copies_of(setup, members)
    lines, sizes = text_of(copies), {pool: size_of(config, pool) for pool in peaks}
    if config.trainer.device != "cpu" or any(size.nodes > 1 for size in sizes.values()):
        return lines
    ranks, there = sum(peak * sizes[pool].ranks for pool, peak in peaks.items()), psutil.virtual_memory().available
    if ranks <= there < ranks + copies:
        lines.append(
            f"warning: while a checkpoint is written, the run needs some {(ranks + copies) / 1e9:.1f} GB, and this machine has "
            f"{there / 1e9:.1f} GB; set trainer.save_in_background=false, and steps wait for the disk instead"
        )
    return lines
