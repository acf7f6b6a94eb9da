"""Facts about rollout engines that the configuration, the clients and the preflight share. Pure."""

from collections.abc import Mapping
from typing import Any

from marl.config.endpoints import hosted_policies
from marl.config.policies import own_settings
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
