"""Layout of a run: a worker group for every policy and critic, with its pool and its settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from marl.config.copies import copied, untyped
from marl.config.deadlines import Phase, deadline_of
from marl.config.kinds import adapter_policies, frozen_policies
from marl.config.placement import pool_of, size_of
from marl.config.policies import holds_reference, own_settings, trained_policies
from marl.run_setup import Setup
from marl.utils.seeding import derive_seed


def model_config(config: DictConfig, policy: str) -> Any:
    return own_settings(config, policy).model


def policy_configs(config: DictConfig, names: Sequence[str], run_id: str, total_steps: int) -> dict[str, DictConfig]:
    """The whole configuration, which must be resolved, with each policy's own ``actor_rollout_ref``: copies, since verl's workers
    change theirs."""
    whole = untyped(config)
    return {
        name: policy_config(config, copied(whole), name, index, run_id, total_steps) for index, name in enumerate(names)
    }


def policy_config(
    config: DictConfig, own: DictConfig, name: str, index: int, run_id: str, total_steps: int
) -> DictConfig:
    """``own``, a resolved copy of the configuration, with one policy's settings."""
    from marl.rollout.vllm_sglang import OFFSET

    size, sync = size_of(config, pool_of(config, name)), deadline_of(own.resources, Phase.sync)
    custom = {
        "policy": name,
        "run_id": run_id,
        "seed": derive_seed(config.seed, "generators of policy", name),
        "replica_offset": index * OFFSET,
        "timeout_s": sync.seconds,
        "timeout_key": sync.key,
    }
    with open_dict(own):
        if (settings := own_settings(own, name)) is not own.actor_rollout_ref:
            own.actor_rollout_ref = settings
        own.trainer.n_gpus_per_node = own.actor_rollout_ref.rollout.n_gpus_per_node = size.gpus
        own.trainer.nnodes = size.nodes
        own.actor_rollout_ref.rollout.custom = dict(own.actor_rollout_ref.rollout.get("custom") or {}) | custom
        own.actor_rollout_ref.actor.optim.total_training_steps = total_steps
        own.critic.optim.total_training_steps = total_steps
        if name in frozen_policies(own):
            serve_from_path(own.actor_rollout_ref)
        if name in adapter_policies(own):
            serve_adapters(own.actor_rollout_ref.rollout, config, name)
        if own.algorithm.rollout_correction.bypass_mode:  # as verl's apply_bypass_mode does
            own.actor_rollout_ref.actor.policy_loss.rollout_correction = own.algorithm.rollout_correction
            own.actor_rollout_ref.actor.policy_loss.loss_mode = "bypass_mode"
    return own


def serve_from_path(own: DictConfig) -> None:
    """Let a policy's servers load the weights at ``model.path`` themselves; verl's would wait for a trainer's. Adapters that
    are not trained are the model without them."""
    own.rollout.custom.frozen = True
    own.rollout.load_format = "auto"
    own.model.lora_rank = 0


def serve_adapters(rollout: DictConfig, config: DictConfig, policy: str) -> None:
    """Tell a policy's servers of all adapters of its pool. vLLM loads the base, which no update changes, from ``model.path``."""
    pool = pool_of(config, policy)
    members = [name for name in adapter_policies(config) if pool_of(config, name) == pool]
    rollout.custom.adapters = {name: own_settings(config, name).model.lora_rank for name in members}
    if rollout.name == "vllm":
        rollout.load_format = "auto"


def critic_config(config: DictConfig) -> DictConfig:
    """verl's ``critic``, without our keys beside it."""
    return OmegaConf.masked_copy(config.critic, [key for key in config.critic if key != "level"])


@dataclass(frozen=True)
class Part:
    """One worker group: a policy's workers or a critic's."""

    name: str
    pool: str
    worker: type
    arguments: dict[str, Any]
    is_critic: bool = False
    is_frozen: bool = False
    adapters: tuple[str, ...] = ()
    """The policies that are adapters on its model; empty for a policy's own."""

    @property
    def key(self) -> str:
        return f"{self.name}_critic" if self.is_critic else f"{self.name}_base" if self.adapters else self.name


def parts_of(setup: Setup, configs: dict[str, DictConfig]) -> list[Part]:
    adapted = adapter_policies(setup.config)
    alone = {name: own for name, own in configs.items() if name not in adapted}
    based = {name: own for name, own in configs.items() if name in adapted}
    return [*base_parts(setup, based), *policy_parts(setup, alone), *critic_parts(setup, configs)]


def policy_parts(setup: Setup, configs: dict[str, DictConfig]) -> list[Part]:
    """A model for every policy; those that nobody trains have it in their servers alone."""
    from marl.cluster.workers.policy_worker import PolicyWorker, SeatWorker

    config, parts = setup.config, []
    for name, own in configs.items():
        if name in frozen_policies(config):
            parts.append(Part(name, setup.pool_by_policy[name], SeatWorker, {}, is_frozen=True))
            continue
        held = name in trained_policies(config.agents) and holds_reference(own, own.actor_rollout_ref)
        role = "actor_rollout_ref" if held else "actor_rollout"
        arguments = {"config": own.actor_rollout_ref, "role": role}
        parts.append(Part(name, setup.pool_by_policy[name], PolicyWorker, arguments))
    return parts


def base_parts(setup: Setup, configs: dict[str, DictConfig]) -> list[Part]:
    """A base model for every pool, with the adapters of the pool's policies."""
    from marl.cluster.workers.adapter_worker import AdapterWorker

    members: dict[str, dict[str, DictConfig]] = {}
    for name, own in configs.items():
        members.setdefault(setup.pool_by_policy[name], {})[name] = own.actor_rollout_ref
    parts = []
    for pool, policies in members.items():
        seeds = {name: derive_seed(setup.config.seed, "adapter", name) for name in policies}
        first = OmegaConf.create(next(iter(policies.values())))
        arguments = {"config": first, "role": "actor_rollout", "policies": policies, "seeds": seeds}
        parts.append(Part(pool, pool, AdapterWorker, arguments, adapters=tuple(policies)))
    return parts


def critic_parts(setup: Setup, configs: dict[str, DictConfig]) -> list[Part]:
    from marl.cluster.workers.critic_worker import CriticWorker

    config, parts = setup.config, []
    for name, pool in setup.pool_by_critic.items():
        arguments = {
            "config": critic_config(next(iter(configs.values()))),
            "seed": derive_seed(config.seed, "critic", name),
        }
        parts.append(Part(name, pool, CriticWorker, arguments, is_critic=True))
    return parts
