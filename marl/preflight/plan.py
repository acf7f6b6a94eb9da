"""The plan of a step as one page, and what follows from it: the size of micro-batches, and each server's share of a GPU."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from marl.batch.packing import packed_policies
from marl.config.errors import ConfigError
from marl.config.kinds import adapter_policies, frozen_policies
from marl.config.placement import size_of
from marl.config.policies import changes_of, holds_reference, longest_row, own_settings, shares_base, trained_policies
from marl.modules import pretrained
from marl.platform.sliced_head import WHOLE_BYTES, may_slice
from marl.preflight import memory, model_checks
from marl.preflight.checks import CheckedSetup
from marl.preflight.memory import Batch, Memory, PolicyBatch, pool_memory
from marl.run_setup import Setup
from marl.utils.tables import aligned

MEMORY_SHARE = 0.8
"""The part of a machine's or a GPU's memory that a run may plan with: contexts, captured graphs, buffers of weight syncs and
fragmentation take some of the rest."""
SERVERS_SHARE = 0.9
"""The most that servers may take of a GPU that they share, for the same reasons."""
UTILIZATION = "gpu_memory_utilization"

Members = dict[str, list[tuple[str, Memory]]]
"""The policies and critics of each pool, each with the memory of one of its ranks."""


def plan_text(setup: CheckedSetup) -> str:
    """The batch arithmetic and the memory of a checked configuration, and a warning where that is more than there is."""
    config, card = setup.config, card_bytes(setup.config.trainer.device)
    members, asleep = pool_members(setup, card)
    step = [batch_text(batch_of(setup)), packing_text(setup)]
    if setup.method.offline:
        step = [
            f"method={config.method.name}: nothing is played, and there are no servers; a step learns from "
            f"data.train_batch_size={config.data.train_batch_size} examples"
        ]
    return "\n".join([*step, memory_text(members, asleep), *warnings_of(config, peaks_of(members, asleep), card)])


def summary_text(setup: CheckedSetup) -> str:
    """The policies and their data, the size of a step, and the plan's warnings: the rest is for ``marl plan``."""
    config = setup.config
    sizes = [f"{name} ({size.parameters / 1e6:.3g} M parameters)" for name, size in setup.sizes.items()]
    learner = f"learner={config.learner.name} credit={config.credit.name}"
    what = f"method={config.method.name}" if setup.method.offline else learner
    files = ", ".join(Path(file).name for file in config.data.train_files)
    first = f"training {', '.join(sizes) or 'nobody'}: {what} runner={config.runner.name}, on {files}"
    shown = ("a step: ", "method=", "warning: ")
    return "\n".join([first, *(line for line in plan_text(setup).splitlines() if line.startswith(shown))])


def batch_of(setup: Setup) -> Batch:
    return memory.batch_of(setup.config, setup.runner.most_turns(list(setup.config.agents)))


def batch_text(batch: Batch) -> str:
    """The arithmetic of a step as text."""
    rows = [("policy", "agents", "rows", "mini-batches", "micro-batch", "updates", "ranks", "servers")]
    rows += [
        (
            policy.policy,
            ",".join(policy.agents),
            str(policy.rows),
            f"{policy.mini_batches} x {policy.rows_per_mini_batch} rows",
            f"{policy.tokens} tokens",
            str(policy.updates),
            str(policy.ranks),
            str(policy.servers),
        )
        for policy in batch.policies
    ]
    speaking = " + ".join(f"{turns} of {agent}" for agent, turns in batch.turns_by_agent.items())
    head = f"a step: {batch.tasks} tasks x {batch.samples} samples = {batch.episodes} episodes, x ({speaking}) = {batch.turns} turns at most"
    return "\n".join([head, *aligned(rows)])


def packing_text(setup: Setup) -> str:
    """The policies whose rows may hold several turns; the row count above is then an upper bound."""
    packed = packed_policies(setup.config, setup.critics)
    names = [name for name in setup.policies if name in packed]
    if not names:
        return "every turn is a row (controller.pack_turns)"
    return f"turns of an agent whose prompts extend one another share a row (controller.pack_turns): {', '.join(names)}"


def memory_text(pools: Members, asleep: Mapping[str, bool]) -> str:
    """Every policy's memory by use, and every pool's peak, as text."""
    names = [field.name for field in fields(Memory)]
    rows = [("pool", "policy", *names, "peak")]
    for pool, members in pools.items():
        peak = gigabytes(pool_memory([used for _, used in members], asleep[pool]))
        for index, (policy, used) in enumerate(members):
            rows.append((pool, policy, *(gigabytes(getattr(used, name)) for name in names), "" if index else peak))
    return "\n".join(["memory of one rank, estimated, GB:", *aligned(rows)])


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f}" if count >= 1e7 else f"{count / 1e9:.4f}" if count else "-"


def warnings_of(config: DictConfig, peaks: Mapping[str, float], card: float | None) -> list[str]:
    """Warnings about limits that the estimate exceeds."""
    remedy = "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, use more ranks, or a smaller model"
    if config.trainer.device == "cpu":
        needed, there = on_a_machine(config, peaks), psutil.virtual_memory().available
        warning = f"warning: all ranks need some {needed / 1e9:.1f} GB, this machine has {there / 1e9:.1f} GB; {remedy}"
        return [warning] if needed > there else []
    return [
        f"warning: pool {pool!r} needs some {peak / 1e9:.1f} GB a rank, the accelerator has {card / 1e9:.1f} GB; {remedy}"
        for pool, peak in peaks.items()
        if card is not None and peak > card
    ]


def pool_members(setup: CheckedSetup, card: float | None) -> tuple[Members, dict[str, bool]]:
    """The members of each pool, and whether its servers sleep while it trains. ``card``: an accelerator's bytes, where known."""
    config, pools, asleep = setup.config, Members(), dict[str, bool]()
    for batch in batch_of(setup).policies:
        own, name, pool = own_settings(config, batch.policy), batch.policy, setup.pool_by_policy[batch.policy]
        used = policy_memory(setup, own, batch, card)
        if shares_base(config) and pool in pools and name not in frozen_policies(config):
            used = memory.adapter_memory(used, own, batch, setup.sizes[name])
        pools.setdefault(pool, []).append((name, used))
        asleep[pool] = asleep.get(pool, True) and own.rollout.free_cache_engine
    for critic, pool in setup.pool_by_critic.items():
        size = model_checks.size_of(pretrained.load_config(config.critic.model, "critic.model"), "critic.model.path")
        has_target = setup.critics is not None and setup.critics.keeps_target
        used = memory.critic_memory(config.critic, size_of(config, pool).ranks, size, has_target)
        pools.setdefault(pool, []).append((f"{critic} critic", used))
        asleep.setdefault(pool, False)
    return pools, asleep


def policy_memory(setup: CheckedSetup, own: DictConfig, batch: PolicyBatch, card: float | None) -> Memory:
    """The memory of one of a policy's ranks: of its server alone where nobody trains it. Its reference is on the device only
    without an accelerator: verl keeps it in host memory otherwise."""
    config, size, on_cpu = setup.config, setup.sizes[batch.policy], setup.config.trainer.device == "cpu"
    has_reference = on_cpu and batch.policy in trained_policies(config.agents) and holds_reference(config, own)
    adapter_bytes = memory.ADAPTER_BYTES if shares_base(config) else None
    used = memory.policy_memory(own, batch, size, card, has_reference, adapter_bytes)
    if on_cpu and may_slice(size.vocabulary):
        kept_whole = min(1.0, WHOLE_BYTES / (4 * batch.tokens * size.vocabulary))
        used = replace(used, logits=used.logits * kept_whole)
    if setup.method.offline:
        used = replace(used, server=0)
    return Memory(server=used.server) if batch.policy in frozen_policies(config) else used


def peaks_of(members: Members, asleep: Mapping[str, bool]) -> dict[str, float]:
    """The peak of one rank of each pool, in bytes."""
    return {pool: pool_memory([used for _, used in own], asleep[pool]) for pool, own in members.items()}


def on_a_machine(config: DictConfig, peaks: Mapping[str, float]) -> float:
    """Bytes of all pools' ranks of one node."""
    return sum(peak * size_of(config, pool).gpus for pool, peak in peaks.items())


def card_bytes(device: str) -> float | None:
    """An accelerator's memory, where this machine has one of the kind."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(0).total_memory)  # mem_get_info would open a context in the driver


def fitting_tokens(setup: CheckedSetup) -> int:
    """The limit of a micro-batch, halved until the run fits into MEMORY_SHARE of the accelerator or, without one, of the machine,
    whatever else runs at the moment, so that a resumed run has the same one."""
    config, card = setup.config.copy(), card_bytes(setup.config.trainer.device)
    host = MEMORY_SHARE * psutil.virtual_memory().total if config.trainer.device == "cpu" else math.inf
    actor = config.actor_rollout_ref.actor
    rows = [longest_row(own_settings(config, name).rollout) for name in setup.policies]
    least = 2 * max(rows, default=actor.ppo_max_token_len_per_gpu)
    while actor.ppo_max_token_len_per_gpu >= least:
        peaks = peaks_of(*pool_members(replace(setup, config=config), card))
        if on_a_machine(config, peaks) <= host and max(peaks.values()) <= MEMORY_SHARE * (card or math.inf):
            break
        actor.ppo_max_token_len_per_gpu //= 2
    return int(actor.ppo_max_token_len_per_gpu)


def divide_gpus(setup: CheckedSetup) -> None:
    """Write each server's share of a GPU into the configuration where several servers share one: a policy's own, or of what those
    leave of ``rollout.gpu_memory_utilization`` a part by the size of its weights. Raises ConfigError where they are too much."""
    config = setup.config
    for pool in setup.pools:
        engines = engines_of(setup, pool)
        if len(engines) < 2:
            continue
        own_keys = {name: changes_of(config.policies, name).get("rollout") or {} for name in engines}
        given = {name: float(own[UTILIZATION]) for name, own in own_keys.items() if UTILIZATION in own}
        weights = {n: memory.engine_weights(own, setup.sizes[n]) for n, own in engines.items() if n not in given}
        together = float(config.actor_rollout_ref.rollout[UTILIZATION]) if weights else 0.0
        left = together - sum(given.values())
        if max(together, sum(given.values())) > SERVERS_SHARE or (weights and left <= 0):
            keys = [f"policies.{name}.rollout.{UTILIZATION}={share:g}" for name, share in given.items()]
            if weights:
                keys.append(f"actor_rollout_ref.rollout.{UTILIZATION}={together:g} for all servers of a GPU")
            raise ConfigError(
                f"pool {pool!r}: {', '.join(keys)}: expected at most {SERVERS_SHARE:g} of a GPU for its servers "
                f"({', '.join(engines)}) together, and something left for each; lower them, or give a policy its own pool"
            )
        for name, bytes_ in weights.items():
            share = int(1e4 * left * bytes_ / sum(weights.values())) / 1e4
            with open_dict(config):
                if config.policies.get(name) is None:
                    config.policies[name] = {}
                OmegaConf.update(config, f"policies.{name}.rollout.{UTILIZATION}", share, force_add=True)


def engines_of(setup: CheckedSetup, pool: str) -> dict[str, Any]:
    """Rollout settings of a pool's servers that take a share of their GPU when they start, as vLLM and SGLang do; adapters on one
    base have one server."""
    names = [name for name, own in setup.pool_by_policy.items() if own == pool]
    adapters = [name for name in names if name in adapter_policies(setup.config)]
    rollouts = {name: own_settings(setup.config, name).rollout for name in names if name not in adapters[1:]}
    return {name: rollout for name, rollout in rollouts.items() if rollout.name != "hf"}
