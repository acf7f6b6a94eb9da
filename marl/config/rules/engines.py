"""Rules about rollout engines: what each of them serves, and what it can be asked."""

from typing import Any

from marl.config.endpoints import has_endpoint, hosted_policies
from marl.config.engines import ENGINES, MAX_TEMPERATURE, draws_by_seed
from marl.config.errors import ConfigError
from marl.config.policies import own_settings, policies_by_agent, within
from marl.config.schema import RequestSeeds

ROLLOUT = "actor_rollout_ref.rollout"


def engines_are_told_apart(config: Any) -> None:
    name = config.actor_rollout_ref.rollout.name
    if name == "trtllm":  # verl's other engine; unknown names are refused with verl's list of engines
        raise ConfigError(
            f"{ROLLOUT}.name={name}: its servers have no place for more than one policy; use {', '.join(ENGINES)}"
        )


def weights_are_sent_to_servers_beside_the_trainer(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.checkpoint_engine.backend != "naive":
        raise ConfigError(
            f"{ROLLOUT}.checkpoint_engine.backend={rollout.checkpoint_engine.backend}: servers stand beside their trainers, "
            "which send them weights directly; set naive"
        )
    if rollout.disaggregation.enabled:
        raise ConfigError(
            f"{ROLLOUT}.disaggregation.enabled=true: a server's ranks are tensor_model_parallel_size x data_parallel_size x "
            "pipeline_model_parallel_size, without servers that only prefill; set it to false"
        )


def engines_take_the_temperature(config: Any) -> None:
    for name in hosted_policies(config):
        rollout, where = own_settings(config, name).rollout, f"{within(config, name)}{ROLLOUT}"
        for key, value in {
            "temperature": rollout.temperature,
            "val_kwargs.temperature": rollout.val_kwargs.temperature,
        }.items():
            must_be_taken(f"{where}.{key}", value, rollout.name, f"{ROLLOUT}.name")


def engines_take_the_agents_temperatures(config: Any) -> None:
    for agent, policies in policies_by_agent(config.agents).items():
        for policy in [name for name in policies if not has_endpoint(config, name)]:
            value, engine = config.agents[agent].temperature, own_settings(config, policy).rollout.name
            must_be_taken(f"agents.{agent}.temperature", value, engine, f"the engine of policy {policy!r}")


def must_be_taken(key: str, value: float | None, engine: str, whose: str) -> None:
    highest = MAX_TEMPERATURE.get(engine)
    if value is not None and highest is not None and value > highest:
        raise ConfigError(f"{key}={value:g}: expected at most {highest:g} with {whose}={engine}; lower it, or use hf")


def seeds_are_heard(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    if RequestSeeds.of(config) is RequestSeeds.always and rollout.name == "sglang" and not draws_by_seed(rollout):
        raise ConfigError(
            f"controller.request_seeds=always: SGLang ignores the seeds of requests; set +{ROLLOUT}.engine_kwargs.sglang."
            "enable_deterministic_inference=true, or request_seeds=auto"
        )


OF_ALL_POLICIES = (engines_take_the_temperature, engines_take_the_agents_temperatures)
"""Rules that iterate over the policies themselves."""

RULES = (
    engines_are_told_apart,
    weights_are_sent_to_servers_beside_the_trainer,
    engines_take_the_temperature,
    engines_take_the_agents_temperatures,
    seeds_are_heard,
)
