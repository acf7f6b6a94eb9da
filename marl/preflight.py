"""What can be known before Ray starts: that every policy's settings, model and tokenizer can be used, that the prompts fit,
and what a step will take."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import psutil
import torch
from omegaconf import DictConfig

from marl.config import plan
from marl.config.data import file_list, rows_of
from marl.config.errors import ConfigError, plain
from marl.config.known_keys import check_known, check_typed
from marl.config.policies import all_policies, changes_of, loops_of, own_settings, policies_by_agent, thinking_of
from marl.controller.agent_loop import check_loops
from marl.controller.chat import ChatEncoder
from marl.controller.critics import reader
from marl.controller.prompt_growth import Growth, Seat, measure
from marl.learners import LEARNERS
from marl.modules import models
from marl.modules.critics.observation import CENTRAL
from marl.modules.workers.settings import check_settings, fields_of, known_keys
from marl.rewards.answers import only_answer
from marl.runners import RUNNERS, Overflow, TooManyTurns, followed_by
from marl.types import Task

PROMPTS_READ = 100
"""Of every file; encoding all of a large one takes minutes."""


def preflight(config: DictConfig) -> None:
    """Raise ConfigError for what a worker, a server or the first episode would fail on."""
    names = all_policies(config.agents)
    encoders = {}
    check_settings(config.actor_rollout_ref)
    check_typed(config)
    check_known(plain(config), known_keys(), fields_of)
    for name in names:
        own, key = own_settings(config, name), key_of(config, name)
        if changes_of(config.policies, name):
            check_settings(own, f"policies.{name}")
        models.size_of(models.load_config(own.model, key), f"{key}.path={own.model.path}")
        models.check_weights(own.model, key)
        encoders[name] = encoder_of(config, own, key, thinking_of(config, name))
        check_loops(own.rollout, loops_of(config, name))
    tasks = check_prompts(config, encoders)
    if "ensemble" not in config:  # whose agents answer in single turns, whatever the runner
        check_growth(config, encoders, tasks)


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


def check_prompts(config: DictConfig, encoders: Mapping[str, ChatEncoder]) -> list[list[Task]]:
    """Raise ConfigError where the agents are shown more than ``data.max_prompt_length`` before anybody has spoken. Returns the
    tasks of every file that were read, the longest first."""
    limit, policies, tasks = config.data.max_prompt_length, policies_by_agent(config.agents), []
    for key in ("train_files", "val_files"):
        for file in file_list(config.data[key]):
            rows = list(islice(rows_of(file, config.data.prompt_key), PROMPTS_READ))
            lengths = [
                max(len(encoders[policies[agent][0]].encode(shown_to(row, agent, config))) for agent in config.agents)
                for row in rows
            ]
            order = sorted(range(len(rows)), key=lambda i: -lengths[i])
            tasks.append([task_of(rows[i], f"{file}, row {i}", config.data.prompt_key) for i in order])
            long = [length for length in lengths if length > limit]
            if len(long) > config.controller.max_error_rate * len(lengths):
                raise ConfigError(
                    f"data.max_prompt_length={limit}: {len(long)} of the first {len(lengths)} prompts of {file} are longer, "
                    f"up to {max(long)} tokens before anybody has answered; set it to at least that"
                )
    return tasks


def task_of(row: Mapping[str, Any], id: str, prompt_key: str) -> Task:
    """A row as far as lengths go."""
    truth, extra = row["reward_model"]["ground_truth"], row.get("extra_info") or {}
    return Task(id, list(row[prompt_key]), truth, row["data_source"], only_answer, extra)


def growth_of(
    config: DictConfig, encoders: Mapping[str, ChatEncoder], tasks: Sequence[Task], shortest: bool = False
) -> Growth:
    """How long the conversations about some tasks get, with the longest answers or the shortest. Raises ConfigError."""
    policies = policies_by_agent(config.agents)
    allowed = {name: own_settings(config, name).rollout.response_length for name in encoders}

    def seat(agent: str, round: int) -> Seat:
        policy = policies[agent][min(round, len(policies[agent])) - 1]
        most = config.agents[agent].max_tokens or allowed[policy]
        return Seat(policy, encoders[policy], 1 if shortest else most, ends=shortest and most > 1)

    roles = {name: agent.role for name, agent in config.agents.items()}
    joint = {"joint": central_reader(config).longest} if has_central_critic(config) and not shortest else {}
    try:
        return measure(RUNNERS.build(config.runner), tasks, seat, roles, config.data.max_prompt_length, **joint)
    except TooManyTurns as error:
        raise ConfigError(str(error)) from None


def has_central_critic(config: DictConfig) -> bool:
    return LEARNERS.get(config.learner.name).critic == CENTRAL


def central_reader(config: DictConfig) -> Any:
    return reader(CENTRAL, config.critic.level, models.load_tokenizer(config.critic.model, "critic.model"), None)


def check_growth(config: DictConfig, encoders: Mapping[str, ChatEncoder], tasks: Sequence[Sequence[Task]]) -> None:
    """Raise ConfigError where conversations cannot be played to their end even with the shortest answers, or where the central
    critic could not read the longest."""
    limit, share = config.data.max_prompt_length, config.controller.max_error_rate
    for read in tasks:
        # the longest that has to fit: as many as may fail are longer
        task = read[min(int(share * len(read)), len(read) - 1)]
        least = growth_of(config, encoders, [task], shortest=True)
        if least.prompt > limit:
            raise ConfigError(
                f"data.max_prompt_length={limit}: {grows(config, least)} even if every answer is a single token ({task.id}); "
                f"{remedy(config, least)}"
            )
    if has_central_critic(config):
        check_joint(config, growth_of(config, encoders, [read[0] for read in tasks]))


def check_joint(config: DictConfig, growth: Growth) -> None:
    # where agents are refused longer prompts, no conversation is longer than all of these
    longest = config.data.max_prompt_length + config.data.max_response_length
    needed, limit = min(growth.joint, len(config.agents) * longest), config.critic.ppo_max_token_len_per_gpu
    if needed > limit:
        raise ConfigError(
            f"critic.ppo_max_token_len_per_gpu={limit}: the central critic of learner={config.learner.name} reads the whole "
            f"conversation, up to {needed} tokens with answers of data.max_response_length={config.data.max_response_length}; "
            f"set it to at least {needed}, or lower data.max_response_length or the number of rounds"
        )


def grows(config: DictConfig, growth: Growth) -> str:
    """The rounds' prompts, for a person."""
    lengths = [str(growth.by_round[round]) for round in sorted(growth.by_round) if round]
    shown = lengths if len(lengths) <= ROUNDS_SHOWN else [*lengths[: ROUNDS_SHOWN - 1], "…", lengths[-1]]
    return f"prompts grow to {growth.prompt} tokens (runner={config.runner.name}, by round: {', '.join(shown)})"


ROUNDS_SHOWN = 8


def remedy(config: DictConfig, growth: Growth) -> str:
    shorter = "" if config.runner.overflow != Overflow.refuse else ", set runner.overflow=drop_oldest or summarise"
    return f"set data.max_prompt_length to at least {growth.prompt}, lower the number of rounds{shorter}, or use shorter roles"


def growth_text(config: DictConfig) -> str:
    """How long prompts get, and a warning where that is longer than they may be."""
    names, limit = all_policies(config.agents), config.data.max_prompt_length
    encoders = {
        name: encoder_of(config, own_settings(config, name), key_of(config, name), thinking_of(config, name))
        for name in names
    }
    growth = growth_of(config, encoders, [read[0] for read in check_prompts(config, encoders)])
    if growth.unknown:
        return f"how long prompts get is not known: runner={config.runner.name} raised {growth.unknown}"
    lines = [f"{grows(config, growth)} with the longest answers; data.max_prompt_length={limit}"]
    if growth.prompt > limit:
        lines.append(
            f"warning: an episode is refused where a prompt exceeds data.max_prompt_length={limit}, and long answers lead to "
            f"{growth.prompt}; {remedy(config, growth)}, or lower data.max_response_length={config.data.max_response_length}"
        )
    return "\n".join(lines)


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
    lines = [plan.batch_text(batch), growth_text(config), plan.memory_text(pools, asleep)]
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
