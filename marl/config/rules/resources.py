"""Rules about ranks, servers and processes."""

from typing import Any

from marl.config.engines import engine_settings
from marl.config.errors import ConfigError
from marl.config.policies import ranks_per_pool, ranks_per_server


def ranks_divide_among_servers(config: Any) -> None:
    ranks, rollout = ranks_per_pool(config.trainer), config.actor_rollout_ref.rollout
    if ranks < 1:
        raise ConfigError(
            f"trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} gives a "
            "policy no ranks; both must be at least 1"
        )
    servers = ranks_per_server(rollout)
    if ranks % servers:
        raise ConfigError(
            f"a policy's {ranks} ranks (trainer.nnodes x trainer.n_gpus_per_node) do not divide into servers of "
            f"{servers} (rollout.tensor_model_parallel_size x data_parallel_size x pipeline_model_parallel_size): "
            f"{ranks} % {servers} = {ranks % servers}. Use a multiple"
        )


def a_cpu_has_its_engines(config: Any) -> None:
    if config.trainer.device != "cpu":
        return
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.strategy != "fsdp2":
        raise ConfigError(
            f"actor_rollout_ref.actor.strategy={actor.strategy} does not run on a CPU; use fsdp2 (hardware=cpu sets it)"
        )
    if rollout.name not in ("hf", "vllm"):
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={rollout.name} needs an accelerator; use hf (hardware=cpu sets it)"
        )
    if rollout.name == "vllm" and not engine_settings(rollout).get("worker_extension_cls"):
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm needs an accelerator, or settings for a CPU, which hardware=cpu_vllm makes; "
            "use hf (hardware=cpu sets it)"
        )


def one_process_is_one_rank(config: Any) -> None:
    if not config.resources.one_process:
        return
    ranks = ranks_per_pool(config.trainer)
    if ranks != 1:
        raise ConfigError(
            f"resources.one_process=true has one rank, and trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node="
            f"{config.trainer.n_gpus_per_node} ask for {ranks}; set both to 1"
        )
    if config.actor_rollout_ref.rollout.name != "hf":
        raise ConfigError(
            f"resources.one_process=true serves with the hf rollout, not with actor_rollout_ref.rollout.name="
            f"{config.actor_rollout_ref.rollout.name}; use hf"
        )


def hf_serves_whole_models(config: Any) -> None:
    own = config.actor_rollout_ref
    if own.rollout.name == "hf" and own.model.lora_rank and not own.model.lora.merge:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank={own.model.lora_rank}: rollout.name=hf serves whole models, and is sent "
            "adapters alone; set actor_rollout_ref.model.lora.merge=true, or lora_rank=0"
        )


def one_process_has_no_workers(config: Any) -> None:
    if config.resources.one_process and config.controller.num_workers:
        raise ConfigError(
            f"controller.num_workers={config.controller.num_workers}: with resources.one_process=true the driver plays the "
            "episodes itself; set it to 0, or resources.one_process=false"
        )


def cpu_ranks_are_limited(config: Any) -> None:
    ranks = ranks_per_pool(config.trainer)
    if config.trainer.device == "cpu" and ranks > CPU_RANKS:
        raise ConfigError(
            f"trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: every "
            f"rank is a process, and on CPUs a policy takes at most {CPU_RANKS}; use fewer"
        )


CPU_RANKS = 64


def collectives_end_before_calls(config: Any) -> None:
    """The shorter deadline names the rank that is missing."""
    resources = config.resources
    gloo = config.trainer.device == "cpu" and ranks_per_pool(config.trainer) > 1
    if gloo and resources.process_group_timeout_s >= resources.timeout_s:
        raise ConfigError(
            f"resources.process_group_timeout_s={resources.process_group_timeout_s:g}: must be below resources.timeout_s="
            f"{resources.timeout_s:g}, which would end the call before a missing rank is noticed; lower the former, or raise the latter"
        )


RULES = (
    ranks_divide_among_servers,
    a_cpu_has_its_engines,
    one_process_is_one_rank,
    hf_serves_whole_models,
    one_process_has_no_workers,
    cpu_ranks_are_limited,
    collectives_end_before_calls,
)
