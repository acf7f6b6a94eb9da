"""Copies in the memory of the hosts, from which a checkpoint is written beside the next step."""

from collections.abc import Mapping

import psutil

from marl.config.kinds import adapter_policies
from marl.config.placement import size_of
from marl.config.policies import own_settings, trained_policies
from marl.config.precision import dtype_name
from marl.preflight.checks import CheckedSetup
from marl.preflight.memory_plan import BYTES, Members, Memory


def copies_of(setup: CheckedSetup, members: Members) -> float:
    """Bytes on all hosts together: the weights and moments of every rank, and each whole model that a first rank gathers."""
    settings = setup.config.trainer
    if not settings.save_in_background or (settings.save_freq <= 0 and not settings.save_final):
        return 0.0
    ranks = {pool: size_of(setup.config, pool).ranks for pool in members}
    found = ((ranks[pool], name, memory) for pool, own in members.items() for name, memory in own)
    return sum(
        count * copied_of_rank(setup, name, memory) + gathered_of(setup, name, count) for count, name, memory in found
    )


def copied_of_rank(setup: CheckedSetup, name: str, memory: Memory) -> float:
    """Of adapters on a shared base, their own numbers alone; these have two moments each."""
    weights = memory.moments / 2 if name in adapter_policies(setup.config) else memory.weights
    return weights + memory.moments


def gathered_of(setup: CheckedSetup, name: str, ranks: int) -> float:
    """A rank that is alone on a CPU writes its whole model from the copies of its shard."""
    config = setup.config
    if name not in trained_policies(config.agents) or name in adapter_policies(config):
        return 0.0
    own = own_settings(config, name)
    alone = ranks == 1 and config.trainer.device == "cpu"
    if alone or "hf_model" not in own.actor.checkpoint.save_contents:
        return 0.0
    return setup.sizes[name].parameters * BYTES[dtype_name(own.actor.fsdp_config.model_dtype)]


def text_of(setup: CheckedSetup, members: Members) -> list[str]:
    """A line, where there are copies."""
    copies = copies_of(setup, members)
    said = "copies on the hosts while a checkpoint is written (trainer.save_in_background)"
    return [f"{said}: {copies / 1e9:.3g} GB in all"] if copies else []


def lines_of(setup: CheckedSetup, members: Members, peaks: Mapping[str, float]) -> list[str]:
    """The same with a warning, where this one machine is too small for them; ``peaks``: memory of a rank, by pool."""
    config, copies = setup.config, copies_of(setup, members)
    on_host = sum(peak * size_of(config, pool).ranks for pool, peak in peaks.items() if config.trainer.device == "cpu")
    lines, there = text_of(setup, members), psutil.virtual_memory().available
    if config.trainer.nnodes == 1 and on_host <= there < on_host + copies:
        lines.append(
            f"warning: beside a save the run needs some {(on_host + copies) / 1e9:.1f} GB, this machine has {there / 1e9:.1f} GB; set "
            "trainer.save_in_background=false, with which a step waits for the disk"
        )
    return lines
