"""Checks before Ray starts: every policy's settings, model and tokenizer can be used, and the prompts fit."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from marl.config.endpoints import endpoint_of
from marl.config.errors import ConfigError, plain, shown
from marl.config.keys import check_known, check_typed, known_keys
from marl.config.kinds import answers_only, frozen_policies
from marl.config.policies import changes_of, loops_of, own_settings, shares_base, thinking_of
from marl.config.targets import trusted_modules
from marl.controller.chat import ChatEncoder
from marl.controller.loop_registry import check_loops
from marl.modules import pretrained
from marl.modules.adapters import check_adapter, check_adapter_name, check_start
from marl.preflight import model_checks
from marl.preflight.memory import ModelSize
from marl.preflight.method_files import check_demonstrations, check_examples
from marl.preflight.prompts import check_prompts
from marl.preflight.verl_settings import (
    check_critic_settings,
    check_packages,
    check_settings,
    check_targets,
    fields_of,
)
from marl.rewards import answer_rules
from marl.rewards.builtin import must_be_installed
from marl.rewards.custom import custom_function
from marl.rewards.rules import kind_of, unscorable
from marl.rollout.endpoint import EndpointFailed, EndpointServer
from marl.rollout.hf_model import check_attention, check_positions, longest_of
from marl.run_setup import Setup
from marl.types import PolicyName, Task
from marl.utils.near import did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedSetup(Setup):
    """A run whose models have been loaded; its plan needs their sizes."""

    sizes: Mapping[PolicyName, ModelSize]


@dataclass(frozen=True)
class Loaded:
    """A policy's settings, with the model and the tokenizer that they name."""

    settings: Any
    thinking: Any
    model: Any
    """The model's configuration."""
    size: ModelSize
    encoder: ChatEncoder


def preflight(setup: Setup) -> CheckedSetup:
    """Raise ConfigError for what a worker, a server or the first episode would fail on."""
    config = setup.config
    check_targets(config)
    trains = not (answers_only(config) or config.trainer.val_only)
    check_settings(config.actor_rollout_ref, trains=trains)
    check_typed(config)
    check_known(plain(config), known_keys(), fields_of)
    check_critic_settings(config.critic)
    loaded: dict[PolicyName, Loaded] = {}
    for name in setup.policies:
        loaded[name] = load(config, name, trains, loaded.values())
        check_adapters(config, name, loaded[name])
        check_loops(loaded[name].settings.rollout, loops_of(config, name), trusted_modules(config))
    sizes = {name: own.size for name, own in loaded.items()}
    encoders = {name: own.encoder for name, own in loaded.items()}
    if setup.method.offline:
        check_examples(setup, encoders)
        return CheckedSetup(**vars(setup), sizes=sizes)
    check_scorer(setup, check_prompts(config, encoders))
    check_demonstrations(setup, encoders)
    if (
        "ensemble" not in config
    ):  # whose agents answer in single turns, whatever the runner, without servers and workers
        check_packages(config, setup.policies, bool(setup.pool_by_critic))
    return CheckedSetup(**vars(setup), sizes=sizes)


def check_scorer(setup: Setup, tasks: Sequence[Task]) -> None:
    """Raise ConfigError for rows that no built-in rule can score, and where rows are scored by math-verify, which is not installed: an
    answer that equals the truth needs none of it, so that only episodes with other answers would be lost."""
    config = setup.config
    if answers_only(config) or setup.runner.scores_turns or custom_function(config) is not None:
        return
    for task in tasks:
        must_be_one_answer(task)
    rules = answer_rules(config)
    for task in (task for task in tasks if not rules.chooses(task.data_source)):
        if why := unscorable(task.data_source, task.ground_truth):
            raise ConfigError(
                f"data_source={task.data_source}, {task.id}: no built-in rule can score this row: {why}; set "
                "reward.custom_reward_function.path to a file with compute_score(data_source, solution_str, ground_truth, extra_info), "
                f"or name how its answers are read if they are short: +judge.extractors={{{task.data_source}: prose}}"
            )
    judged = (task.data_source for task in tasks if kind_of(task.data_source) in ("math", "own"))
    source = next(judged, None)
    if source is None:
        return
    try:
        must_be_installed()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data_source={source}: {error}, or score these rows by reward.custom_reward_function.path"
        ) from None


def must_be_one_answer(task: Task) -> None:
    """Raise ConfigError for a truth that the built-in rules, which compare texts, would call wrong whatever is said."""
    truth = task.ground_truth
    if kind_of(task.data_source) != "verl" and (
        isinstance(truth, dict) or (isinstance(truth, list) and len(truth) != 1)
    ):
        raise ConfigError(
            f"data_source={task.data_source}, {task.id}: the ground_truth is {shown(truth)}; expected one text or number: write the answer "
            "alone, or score these rows by reward.custom_reward_function.path, which gets the value as it is"
        )


def load(config: DictConfig, name: PolicyName, trains: bool, others: Iterable[Loaded]) -> Loaded:
    """A policy's model and tokenizer, or those of another policy, where neither has settings of its own: a tokenizer with a large
    vocabulary takes a second to load. Raises ConfigError where they cannot be used."""
    own, thinking = own_settings(config, name), thinking_of(config, name)
    for other in others:
        if other.settings is own and other.thinking == thinking:
            return other
    key = key_of(config, name)
    if changes_of(config.policies, name):
        check_settings(own, f"policies.{name}", trains)
    model = pretrained.load_config(own.model, key)
    size = model_checks.size_of(model, f"{key}.path={own.model.path}")
    model_checks.check_weights(own.model, key)
    if own.rollout.name == "hf" and "ensemble" not in config:  # which names its models otherwise
        check_decodable(model, str(own.model.path), key, own.rollout)
    return Loaded(own, thinking, model, size, encoder_of(config, own, key, thinking))


def check_adapters(config: DictConfig, name: PolicyName, loaded: Loaded) -> None:
    """Raise ConfigError for an adapter that a policy's model cannot have, or that cannot be sent to its servers."""
    own, key = loaded.settings, key_of(config, name)
    if not own.model.lora_rank or name in frozen_policies(config):  # which are served without
        return
    check_adapter(loaded.model, own.model, key, linear_only=shares_base(config))
    if not shares_base(config):  # otherwise servers load the base themselves
        check_adapter_base(own, bool(loaded.model.get_text_config().tie_word_embeddings), key)
        return
    check_adapter_name(name)
    if own.model.lora_adapter_path is not None:
        check_start(loaded.model, own.model, key)


def check_decodable(model: Any, path: str, key: str, rollout: Any) -> None:
    """Raise ConfigError for a model whose attention the ``hf`` server does not compute, or whose rotary angles change within the
    longest conversation."""
    try:
        check_attention(model, path)
        check_positions(model, path, longest_of(rollout, model))
    except ValueError as error:
        raise ConfigError(f"{key}.path={path}: {error}") from None


def check_adapter_base(own: Any, tied: bool, key: str) -> None:
    """Raise ConfigError where vLLM would start from random weights that a sync of adapters cannot replace: the base is sent
    once, without the head that is tied to the embedding."""
    rollout = own.rollout
    adapters = own.model.lora_rank and not own.model.lora.merge
    if rollout.name == "vllm" and adapters and tied and rollout.load_format == "dummy":
        raise ConfigError(
            f"{key.removesuffix('.model')}.rollout.load_format=dummy: {own.model.path} ties its embeddings, and with "
            f"{key}.lora_rank={own.model.lora_rank} the first weight sync fails; set load_format=safetensors, or "
            "model.lora.merge=true"
        )


def key_of(config: DictConfig, name: str) -> str:
    """Key that sets a policy's model."""
    return f"policies.{name}.model" if "model" in changes_of(config.policies, name) else "actor_rollout_ref.model"


def encoder_of(config: DictConfig, own: DictConfig, key: str, thinking: Any) -> ChatEncoder:
    tokenizer = pretrained.load_tokenizer(own.model, key)
    path = own.model.tokenizer_path or own.model.path
    try:
        encoder = ChatEncoder(tokenizer, config.data.apply_chat_template_kwargs, thinking)
        encoder.encode([{"role": "user", "content": "hello"}])
    except Exception as error:  # a template is a program and may raise anything
        raise ConfigError(
            f"{key}.path={path}: its chat template cannot be used: {pretrained.line(error)}; expected an instruct model's, or "
            f"set {key}.custom_chat_template"
        ) from None
    return encoder


def check_endpoints(setup: Setup) -> None:
    """Raise ConfigError for an endpoint that is down or denies access; warn of one that lists other models. Must not run in an
    event loop. A method that plays nothing asks none."""
    asked = [] if setup.method.offline else setup.endpoints
    servers = {name: EndpointServer(name, endpoint_of(setup.config, name)) for name in asked}
    if servers:
        asyncio.run(check_all(servers))


async def check_all(servers: dict[str, EndpointServer]) -> None:
    try:
        found = await asyncio.gather(*(server.models() for server in servers.values()))
    except EndpointFailed as error:
        raise ConfigError(str(error)) from None
    for server, models in zip(servers.values(), found, strict=True):
        model = server.endpoint.model
        if models and model not in models:  # some servers answer by any name
            logger.warning(
                "%s.model=%s: the server lists %d other models.%s",
                server.key,
                model,
                len(models),
                did_you_mean(model, models),
            )
