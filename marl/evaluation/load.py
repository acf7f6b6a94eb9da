"""The models that answer: a configuration's own, or those of a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM

from marl.build import tokenizer_of
from marl.config.endpoints import has_endpoint
from marl.config.errors import ConfigError
from marl.config.kinds import frozen_policies
from marl.config.policies import own_settings, thinking_of
from marl.controller.chat import ChatEncoder
from marl.modules.pretrained import WEIGHTS, line
from marl.rollout.hf_model import check_positions, decodable_config, longest_of
from marl.utils import folders


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
    unsaved = not (Path(checkpoint).expanduser() / name).exists() and name in saved_state(checkpoint)["policies"]
    return path if unsaved and name in frozen_policies(config) else saved_weights(checkpoint, name)


def saved_step(folder: str | None) -> int:
    """Step of a checkpoint; 0 without one."""
    return 0 if folder is None else int(saved_state(folder)["step"])


def saved_state(folder: str) -> dict[str, Any]:
    """A checkpoint's state. Raises ConfigError for a folder that is not a checkpoint."""
    try:
        return folders.read_state(Path(folder).expanduser())
    except FileNotFoundError as error:
        raise ConfigError(f"ensemble.checkpoint={folder}: {error}; expected …/global_step_N") from None


def saved_weights(folder: str, policy: str, named: str | None = None) -> str:
    """Folder of a policy's model in Hugging Face format within a checkpoint. Raises ConfigError if it is missing; ``named``: the
    beginning of its message."""
    named = named or f"ensemble.checkpoint={folder}"
    root, state = Path(folder).expanduser(), saved_state(folder)
    if policy not in state["policies"]:
        raise ConfigError(
            f"{named}: it holds the policies {', '.join(state['policies'])}, and an agent acts with "
            f"{policy!r}; expected the agents that were trained, set agents.<name>.policy to one of these"
        )
    weights = root / policy / "actor" / "huggingface"
    if not any(file for pattern in WEIGHTS for file in weights.glob(pattern)):
        raise ConfigError(
            f"{named}: {weights} holds no weights; expected a checkpoint that was saved with hf_model in "
            "actor_rollout_ref.actor.checkpoint.save_contents; train with it, or convert by verl.model_merger"
        )
    return str(weights)


def device_of(config: DictConfig) -> str:
    return str(config.ensemble.device or config.trainer.device)
