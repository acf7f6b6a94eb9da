"""Facts about rollout engines that the configuration, the clients and the preflight share. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from marl.config.policies import hosted_policies, loops_of, own_settings, policies_by_agent
from marl.config.precision import compute_dtype
from marl.config.schema import RequestSeeds, WeightCheck

ENGINES = ("hf", "vllm", "sglang")
"""Engines whose servers are told apart by policy."""

MAX_TEMPERATURE = {"vllm": 2.0}
"""The highest temperature that an engine takes in a request."""


def engine_settings(rollout: Any) -> Mapping[str, Any]:
    """Arguments of an engine itself: ``rollout.engine_kwargs.<name>``."""
    return (rollout.get("engine_kwargs") or {}).get(rollout.name) or {}


def draws_by_seed(rollout: Any) -> bool:
    """True if an engine draws by a request's own seed at no cost; SGLang ignores the seed otherwise."""
    if rollout.name == "sglang":
        return bool(engine_settings(rollout).get("enable_deterministic_inference"))
    return rollout.name == "hf" or bool(rollout.full_determinism)


def seeds_requests(config: Any, rollout: Any) -> bool:
    """True if a policy's requests carry seeds of their own. On an accelerator, vLLM then draws row by row."""
    choice = RequestSeeds.of(config)
    if choice is RequestSeeds.auto:
        return draws_by_seed(rollout) or (rollout.name == "vllm" and config.trainer.device == "cpu")
    return choice is RequestSeeds.always


def serves_vllm_on_cpu(config: Any) -> bool:
    """True if a run on CPUs has a vLLM server; verl schedules those on Ray's GPUs, which are then a mere count."""
    names = hosted_policies(config)
    return config.trainer.device == "cpu" and any(own_settings(config, name).rollout.name == "vllm" for name in names)


PROBE = [{"role": "user", "content": "hello"}]
"""The prompt by which servers prove their weights. Each chat template has been tried on it before the run started."""
PROBE_TOKENS = 16
"""Tokens of the answer."""


def check_of(wanted: WeightCheck, engine: str) -> WeightCheck:
    """The check of an engine's servers: others than ours store weights fused, sharded or quantised, and give log-probs alone."""
    if wanted is WeightCheck.auto:
        return WeightCheck.digest if engine == "hf" else WeightCheck.probe
    return wanted


def is_strict(config: Any) -> bool:
    """True if every draw has a seed, and an operation without a deterministic form ends the run, by its name."""
    return bool(config.determinism == "strict")


Sampling = Callable[[str, str, bool], Mapping[str, Any]]
"""Sampling parameters of an agent with a policy; True for those of validation."""


def servers_are_comparable(config: Any, policy: str, own: Any, sampling: Sampling) -> bool:
    """True if a policy's servers compute log-probs as its trainer does: of the same distribution, in the same precision.

    Rollout correction weighs the difference of the two, and an agent loop may sample by parameters of its own.
    """
    correction = config.algorithm.rollout_correction
    return (
        own.rollout.name == "hf"
        and own.rollout.dtype == compute_dtype(own.actor.fsdp_config)
        and not (correction.rollout_is or correction.rollout_rs)
        and not loops_of(config, policy)
        and all(samples_all_tokens(sampling(agent, policy, False)) for agent in trained_agents(config.agents, policy))
    )


def samples_all_tokens(sampling: Mapping[str, Any]) -> bool:
    """True if every token may be drawn. A server's log-probs are of the distribution that it draws from, a trainer's of the
    whole one at the agent's temperature."""
    return sampling["temperature"] > 0 and sampling["top_p"] >= 1 and sampling["top_k"] <= 0


def trained_agents(agents: Mapping[str, Any], policy: str) -> list[str]:
    """The trained agents that act with a policy."""
    return [name for name, own in policies_by_agent(agents).items() if policy in own and agents[name].trainable]
