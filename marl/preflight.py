"""What can be known before Ray starts: that every policy's settings, model and tokenizer can be used, that the prompts fit,
and what a step will take."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import psutil
import torch
from omegaconf import DictConfig

from marl.config import plan
from marl.config.data import file_list, rows_of
from marl.config.errors import ConfigError
from marl.config.policies import all_policies, changes_of, loops_of, own_settings, policies_by_agent, thinking_of
from marl.controller.agent_loop import check_loops
from marl.controller.chat import ChatEncoder
from marl.learners import LEARNERS
from marl.modules import models
from marl.modules.workers.settings import check_settings
from marl.runners import RUNNERS, followed_by

PROMPTS_READ = 100
"""Of every file; encoding all of a large one takes minutes."""


def preflight(config: DictConfig) -> None:
    """Raise ConfigError for what a worker, a server or the first episode would fail on."""
    names = all_policies(config.agents)
    encoders = {}
    check_settings(config.actor_rollout_ref)
    for name in names:
        own, key = own_settings(config, name), key_of(config, name)
        if changes_of(config.policies, name):
            check_settings(own, f"policies.{name}")
        models.size_of(models.load_config(own.model, key), f"{key}.path={own.model.path}")
        models.check_weights(own.model, key)
        encoders[name] = encoder_of(config, own, key, thinking_of(config, name))
        check_loops(own.rollout, loops_of(config, name))
    check_prompts(config, encoders)


def key_of(config: DictConfig, name: str) -> str:
    """Where a policy's model is set."""
    return f"policies.{name}.model" if "model" in changes_of(config.policies, name) else "actor_rollout_ref.model"


def encoder_of(config: DictConfig, own: DictConfig, key: str, thinking: Any) -> ChatEncoder:
    tokenizer = models.load_tokenizer(own.model, key)
    path = own.model.tokenizer_path or own.model.path
    try:
        encoder = ChatEncoder(tokenizer, config.data.apply_chat_template_kwargs, thinking)
        encoder.encode([{"role": "user", "content": "hello"}])
    except Exception as error:  # a template is a program of its own
        raise ConfigError(
            f"{key}.path={path}: its chat template cannot be used: {models.line(error)}; expected an instruct model's, or "
            f"set {key}.custom_chat_template"
        ) from None
    return encoder


def check_prompts(config: DictConfig, encoders: Mapping[str, ChatEncoder]) -> None:
    """Raise ConfigError where the agents are shown more than ``data.max_prompt_length`` before anybody has spoken."""
    limit, policies = config.data.max_prompt_length, policies_by_agent(config.agents)
    for key in ("train_files", "val_files"):
        for file in file_list(config.data[key]):
            lengths = [
                max(len(encoders[policies[agent][0]].encode(shown_to(row, agent, config))) for agent in config.agents)
                for row in islice(rows_of(file, config.data.prompt_key), PROMPTS_READ)
            ]
            long = [length for length in lengths if length > limit]
            if len(long) > config.controller.max_error_rate * len(lengths):
                raise ConfigError(
                    f"data.max_prompt_length={limit}: {len(long)} of the first {len(lengths)} prompts of {file} are longer, "
                    f"up to {max(long)} tokens before anybody has answered; set it to at least that"
                )


def shown_to(row: Mapping[str, Any], agent: str, config: DictConfig) -> list[dict[str, Any]]:
    """An agent's first observation of a row."""
    private = ((row.get("extra_info") or {}).get("agent_prompts") or {}).get(agent)
    return followed_by(list(private or row[config.data.prompt_key]), config.agents[agent].role)


def plan_text(
    config: DictConfig, pool_by_policy: Mapping[str, str], pool_by_critic: Mapping[str, str] | None = None
) -> str:
    """The batch arithmetic and the memory of a checked configuration, and a warning where that is more than there is."""
    turns = RUNNERS.build(config.runner).most_turns(list(config.agents))
    batch, card = plan.batch_of(config, turns), card_bytes(config.trainer.device)
    pools: dict[str, list[tuple[str, plan.Memory]]] = {}
    asleep: dict[str, bool] = {}
    for policy in batch.policies:
        own, pool = own_settings(config, policy.policy), pool_by_policy[policy.policy]
        key = key_of(config, policy.policy)
        size = models.size_of(models.load_config(own.model, key), f"{key}.path={own.model.path}")
        memory = plan.policy_memory(own, policy, size, card, has_reference_here(config, own))
        pools.setdefault(pool, []).append((policy.policy, memory))
        asleep[pool] = own.rollout.free_cache_engine
    for critic, pool in (pool_by_critic or {}).items():
        size = models.size_of(models.load_config(config.critic.model, "critic.model"), "critic.model.path")
        ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
        has_target = LEARNERS.get(config.learner.name).critic == "utility"
        memory = plan.critic_memory(config.critic, ranks, size, has_target)
        pools.setdefault(pool, []).append((f"{critic} critic", memory))
        asleep.setdefault(pool, False)
    peaks = {pool: plan.pool_memory([memory for _, memory in members], asleep[pool]) for pool, members in pools.items()}
    lines = [plan.batch_text(batch), plan.memory_text(pools, asleep)]
    return "\n".join([*lines, *warnings_of(config, peaks, card)])


def has_reference_here(config: DictConfig, own: DictConfig) -> bool:
    """verl keeps a reference in the host's memory where there is an accelerator; with adapters there is none."""
    wanted = own.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return bool(wanted and not own.model.lora_rank and config.trainer.device == "cpu")


def card_bytes(device: str) -> float | None:
    """An accelerator's memory, where this machine has one of the kind."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    return float(torch.cuda.mem_get_info()[1])


def warnings_of(config: DictConfig, peaks: Mapping[str, float], card: float | None) -> list[str]:
    """What the estimate exceeds."""
    remedy = "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, use more ranks, or a smaller model"
    if config.trainer.device == "cpu":
        needed = sum(peaks.values()) * config.trainer.n_gpus_per_node
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
