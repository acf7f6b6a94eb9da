"""Rules about reference policies."""

from typing import Any

from omegaconf import OmegaConf

from marl.config.errors import ConfigError
from marl.config.policies import changes_of


def references_are_renewed_where_there_are_any(config: Any) -> None:
    freq = config.trainer.ref_update_freq
    compares = OmegaConf.select(config, "method.reference")
    if freq > 0 and not (config.algorithm.use_kl_in_reward or kl_in_any_loss(config) or compares):
        raise ConfigError(
            f"trainer.ref_update_freq={freq}: there is no reference to renew; set actor_rollout_ref.actor.use_kl_loss=true or "
            "algorithm.use_kl_in_reward=true, or use a method that compares with one (dpo, spin)"
        )
    if freq > 0 and config.actor_rollout_ref.model.lora_rank:
        raise ConfigError(
            f"trainer.ref_update_freq={freq}: with actor_rollout_ref.model.lora_rank={config.actor_rollout_ref.model.lora_rank} "
            "the reference is the policy without its adapters, which never changes; set it to 0"
        )


def kl_in_any_loss(config: Any) -> bool:
    losses = [(changes_of(config.policies, name).get("actor") or {}).get("use_kl_loss") for name in config.policies]
    return bool(config.actor_rollout_ref.actor.use_kl_loss or any(losses))


def a_reference_of_another_model_needs_weights_of_its_own(config: Any) -> None:
    model = config.actor_rollout_ref.model
    if model.lora_rank and config.actor_rollout_ref.ref.model.get("path"):
        raise ConfigError(
            f"actor_rollout_ref.ref.model.path={config.actor_rollout_ref.ref.model.path}: with actor_rollout_ref.model.lora_rank="
            f"{model.lora_rank} the reference is the policy without its adapters; unset it"
        )


RULES = (
    references_are_renewed_where_there_are_any,
    a_reference_of_another_model_needs_weights_of_its_own,
)
