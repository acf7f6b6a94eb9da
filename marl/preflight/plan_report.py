"""The plan of a step as text: batch arithmetic and memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import psutil
import torch
from omegaconf import DictConfig

from marl.batch.packing import packed_policies
from marl.config.endpoints import endpoint_of
from marl.config.kinds import frozen_policies
from marl.config.placement import size_of
from marl.config.policies import (
    holds_reference,
    longest_row,
    own_settings,
    trained_policies,
)
from marl.config.sharing import shares_base
from marl.modules import pretrained
from marl.platform.sliced_head import WHOLE_BYTES, may_slice
from marl.preflight import batch_plan, memory_plan, model_checks, shared_gpus
from marl.preflight.batch_plan import Batch, PolicyBatch
from marl.preflight.checks import CheckedSetup
from marl.preflight.memory_plan import Members, Memory, ModelSize, pool_memory
from marl.run_setup import Setup
from marl.utils.tables import aligned

MEMORY_SHARE = 0.8
"""The part of a machine's or a GPU's memory that a run may plan with: contexts, captured graphs, buffers of weight syncs and
fragmentation take some of the rest."""


def plan_text(setup: CheckedSetup) -> str:
    """The batch arithmetic and the memory of a checked configuration, and a warning where that is more than there is."""
    card = card_bytes(setup.config.trainer.device)
    members, asleep = pool_members(setup, card)
    peaks = peaks_of(members, asleep)
    lines = [*step_text(setup), memory_text(members, asleep)]
    return "\n".join([*lines, *warnings_of(setup.config, peaks, card)])


def summary_text(setup: CheckedSetup) -> str:
    """The policies and their data, the size of a step, and the plan's warnings: the rest is for ``marl plan``."""
    config = setup.config
    sizes = {name: f"{name} ({size.parameters / 1e6:.3g} M parameters)" for name, size in setup.sizes.items()}
    what = (
        f"method={config.method.name}"
        if setup.method.offline
        else f"learner={config.learner.name} credit={config.credit.name}"
    )
    files = ", ".join(Path(file).name for file in config.data.train_files)
    first = f"training {', '.join(sizes.values()) or 'nobody'}: {what} runner={config.runner.name}, on {files}"
    plan = plan_text(setup).splitlines()
    return "\n".join([first, *(line for line in plan if line.startswith(("a step: ", "method=", "warning: ")))])


def step_text(setup: CheckedSetup) -> list[str]:
    """A step's arithmetic, endpoints, packing and servers that share GPUs."""
    if setup.method.offline:
        method, rows = setup.config.method.name, setup.config.data.train_batch_size
        return [
            f"method={method}: nothing is played, and there are no servers; a step learns from data.train_batch_size={rows} examples"
        ]
    return [batch_text(batch_of(setup)), *endpoint_lines(setup), packing_text(setup), *shared_gpus.text_of(setup)]


def batch_of(setup: Setup) -> Batch:
    return batch_plan.batch_of(setup.config, setup.runner.most_turns(list(setup.config.agents)))


def pool_members(setup: CheckedSetup, card: float | None) -> tuple[Members, dict[str, bool]]:
    """The members of each pool, and whether its servers sleep while it trains. ``card``: an accelerator's bytes, where known."""
    config, pools, asleep = setup.config, Members(), dict[str, bool]()
    for policy in batch_of(setup).policies:
        own, pool = own_settings(config, policy.policy), setup.pool_by_policy[policy.policy]
        memory = member_memory(setup, own, policy, card)
        if shares_base(config) and pool in pools and policy.policy not in frozen_policies(config):
            memory = memory_plan.adapter_memory(memory, own, policy, setup.sizes[policy.policy])
        pools.setdefault(pool, []).append((policy.policy, memory))
        asleep[pool] = asleep.get(pool, True) and own.rollout.free_cache_engine
    for critic, pool in setup.pool_by_critic.items():
        memory = critic_memory(setup, critic_size(config), size_of(config, pool).ranks)
        pools.setdefault(pool, []).append((f"{critic} critic", memory))
        asleep.setdefault(pool, False)
    return pools, asleep


def member_memory(setup: CheckedSetup, own: DictConfig, batch: PolicyBatch, card: float | None) -> Memory:
    """The memory of one of a policy's ranks: of its server alone where nobody trains it."""
    size, has_reference = setup.sizes[batch.policy], has_reference_here(setup.config, batch.policy, own)
    adapter_bytes = memory_plan.ADAPTER_BYTES if shares_base(setup.config) else None
    memory = memory_plan.policy_memory(own, batch, size, card, has_reference, adapter_bytes)
    if setup.config.trainer.device == "cpu" and may_slice(size.vocabulary):
        kept_whole = min(1.0, WHOLE_BYTES / (4 * batch.tokens * size.vocabulary))
        memory = replace(memory, logits=memory.logits * kept_whole)
    if batch.policy in frozen_policies(setup.config):
        return Memory() if setup.method.offline else Memory(server=memory.server)
    return replace(memory, server=0) if setup.method.offline else memory


def peaks_of(members: Members, asleep: Mapping[str, bool]) -> dict[str, float]:
    """The peak of one rank of each pool."""
    return {pool: pool_memory([memory for _, memory in own], asleep[pool]) for pool, own in members.items()}


def endpoint_lines(setup: Setup) -> list[str]:
    """A line for every policy that a server elsewhere answers for, with its limits."""
    lines = []
    for name in setup.endpoints:
        endpoint = endpoint_of(setup.config, name)
        limits = {"requests a minute": endpoint.requests_per_minute, "tokens in all": endpoint.token_budget}
        most = [f"{limit:g} {unit}" for unit, limit in limits.items() if limit is not None]
        lines.append(
            f"{name}: model {endpoint.model} at {endpoint.base_url}, at most {', '.join([f'{endpoint.max_concurrent} requests at once', *most])}"
        )
    return lines


def packing_text(setup: Setup) -> str:
    """Lists policies whose rows may hold several turns; the row count above is then an upper bound."""
    packed = packed_policies(setup.config, setup.critics)
    names = [name for name in setup.policies if name in packed]
    if not names:
        return "every turn is a row (controller.pack_turns)"
    return f"turns of an agent whose prompts extend one another share a row (controller.pack_turns): {', '.join(names)}"


def critic_size(config: DictConfig) -> ModelSize:
    """The size of the critics' model, which is one."""
    return model_checks.size_of(pretrained.load_config(config.critic.model, "critic.model"), "critic.model.path")


def critic_memory(setup: Setup, model: ModelSize, ranks: int) -> Memory:
    """The memory of one of a critic's ranks."""
    has_target = setup.critics is not None and setup.critics.keeps_target
    return memory_plan.critic_memory(setup.config.critic, ranks, model, has_target)


def has_reference_here(config: DictConfig, name: str, own: DictConfig) -> bool:
    """True if a policy's reference is on the device: where there is an accelerator, verl keeps it in host memory."""
    trained = name in trained_policies(config.agents)
    return trained and holds_reference(config, own) and config.trainer.device == "cpu"


def card_bytes(device: str) -> float | None:
    """An accelerator's memory, where this machine has one of the kind."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(0).total_memory)  # mem_get_info would open a context in the driver


def warnings_of(config: DictConfig, peaks: Mapping[str, float], card: float | None) -> list[str]:
    """Warnings about limits that the estimate exceeds."""
    remedy = "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, use more ranks, or a smaller model"
    if config.trainer.device == "cpu":
        needed = sum(peak * size_of(config, pool).gpus for pool, peak in peaks.items())
        there = psutil.virtual_memory().available
        if needed > there:
            return [
                f"warning: all ranks need some {needed / 1e9:.1f} GB, this machine has {there / 1e9:.1f} GB; {remedy}"
            ]
        return []
    return [
        f"warning: pool {pool!r} needs some {peak / 1e9:.1f} GB a rank, the accelerator has {card / 1e9:.1f} GB; {remedy}"
        for pool, peak in peaks.items()
        if card is not None and peak > card
    ]


def fitting_tokens(setup: CheckedSetup) -> int:
    """The limit of a micro-batch, halved until the run fits into MEMORY_SHARE of the accelerator or, without one, of the machine,
    whatever else runs at the moment, so that a resumed run has the same one."""
    config, card = setup.config.copy(), card_bytes(setup.config.trainer.device)
    host = MEMORY_SHARE * psutil.virtual_memory().total if config.trainer.device == "cpu" else math.inf
    actor = config.actor_rollout_ref.actor
    least = 2 * max(
        (longest_row(own_settings(config, name).rollout) for name in setup.policies),
        default=actor.ppo_max_token_len_per_gpu,
    )
    while actor.ppo_max_token_len_per_gpu >= least:
        peaks = peaks_of(*pool_members(replace(setup, config=config), card))
        needed = sum(peak * size_of(config, pool).gpus for pool, peak in peaks.items())
        if needed <= host and max(peaks.values()) <= MEMORY_SHARE * (card or math.inf):
            break
        actor.ppo_max_token_len_per_gpu //= 2
    return int(actor.ppo_max_token_len_per_gpu)


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
    head = (
        f"a step: {batch.tasks} tasks x {batch.samples} samples = {batch.episodes} episodes, x ({speaking}) = {batch.turns} turns "
        "at most"
    )
    return "\n".join([head, *aligned(rows)])


def memory_text(pools: Mapping[str, Sequence[tuple[str, Memory]]], asleep: Mapping[str, bool]) -> str:
    """Every policy's memory by use, and every pool's peak, as text."""
    names = [field.name for field in fields(Memory)]
    rows = [("pool", "policy", *names, "peak")]
    for pool, members in pools.items():
        peak = gigabytes(pool_memory([memory for _, memory in members], asleep[pool]))
        for index, (policy, memory) in enumerate(members):
            rows.append(
                (pool, policy, *(gigabytes(getattr(memory, name)) for name in names), peak if index == 0 else "")
            )
    return "\n".join(["memory of one rank, estimated, GB:", *aligned(rows)])


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f}" if count >= 1e7 else f"{count / 1e9:.4f}" if count else "-"
