"""The models that answer: a configuration's own, or those of a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM

from marl.build import tokenizer_of
from marl.config.errors import ConfigError
from marl.config.kinds import frozen_policies
from marl.config.policies import has_endpoint, own_settings, thinking_of
from marl.controller.chat import ChatEncoder
from marl.evaluation.source import saved_state, saved_weights
from marl.modules.pretrained import line
from marl.rollout.hf_model import check_positions, decodable_config, longest_of


@dataclass(frozen=True)
class Policy:
    """A loaded model that answers for the agents of one policy."""

    model: Any
    tokenizer: Any
    encoder: ChatEncoder
    longest: int
    """Tokens of a prompt and its answer."""


def load_policy(config: DictConfig, name: str) -> Policy:
    """Raises ConfigError where there are no weights, or not all of them."""
    if has_endpoint(config, name):
        raise ConfigError(
            f"policies.{name}.endpoint: an ensemble averages distributions, and a server elsewhere answers with text; remove "
            "its agents, or use baseline=[vote]"
        )
    own = own_settings(config, name)
    path = weights_of(config, name)
    try:
        hf_config = decodable_config(own.model, path)
        check_positions(hf_config, path, longest := longest_of(own.rollout, hf_config))
    except ValueError as error:
        raise ConfigError(f"policy {name!r} cannot answer in an ensemble: {line(error)}") from None
    model, loaded = AutoModelForCausalLM.from_pretrained(
        path,
        config=hf_config,
        dtype=getattr(torch, own.rollout.dtype),
        trust_remote_code=own.model.trust_remote_code,
        output_loading_info=True,
    )
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise ConfigError(
            f"the weights of policy {name!r} at {path} lack {len(missing)} parameters, such as {missing[0]}; expected a whole "
            "model: merge adapters into it first (verl.model_merger)"
        )
    tokenizer = tokenizer_of(own.model)
    return Policy(
        model.to(device_of(config)).eval(),
        tokenizer,
        ChatEncoder(tokenizer, config.data.apply_chat_template_kwargs, thinking_of(config, name)),
        longest,
    )


def weights_of(config: DictConfig, name: str) -> str:
    """Folder of a policy's weights: the checkpoint's, or ``model.path`` without one, and where it holds none of a policy that nobody
    trains. Raises ConfigError."""
    path, checkpoint = str(own_settings(config, name).model.path), config.ensemble.checkpoint
    if checkpoint is None:
        return path
    unsaved = (
        not (Path(checkpoint).expanduser() / name).exists()
        and name in saved_state(Path(checkpoint).expanduser())["policies"]
    )
    return (
        path if unsaved and name in frozen_policies(config) else str(saved_weights(Path(checkpoint).expanduser(), name))
    )


def saved_step(folder: str | None) -> int:
    """Step of a checkpoint; 0 without one."""
    return 0 if folder is None else int(saved_state(Path(folder).expanduser())["step"])


def device_of(config: DictConfig) -> str:
    return str(config.ensemble.device or config.trainer.device)
