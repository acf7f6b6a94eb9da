"""Rules of ``determinism=strict``: whatever is drawn has a seed, and engines answer by it."""

from typing import Any

from omegaconf import OmegaConf

from marl.config.determinism import Determinism, is_strict
from marl.config.endpoints import endpoint_policies
from marl.config.engines import draws_by_seed
from marl.config.errors import ConfigError
from marl.config.schema import RequestSeeds
from marl.utils.registry import did_you_mean

ROLLOUT = "actor_rollout_ref.rollout"
STRICT = "determinism=strict"
SEEDS = {"data.seed": "data.shuffle", "actor_rollout_ref.actor.data_loader_seed": "actor_rollout_ref.actor.shuffle"}
"""Seeds that verl lets be null, each with the key that makes it needed."""
WARNING_ONLY = ("actor_rollout_ref.actor.fsdp_config.full_determinism", "critic.fsdp.full_determinism")


def determinism_is_known(config: Any) -> None:
    known = [mode.value for mode in Determinism]
    if config.determinism is not None and config.determinism not in known:
        raise ConfigError(
            f"determinism={config.determinism}: expected strict, or null.{did_you_mean(str(config.determinism), known)}"
        )


def strict_engines_answer_by_the_seed(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    if not is_strict(config):
        return
    if not draws_by_seed(rollout):
        raise ConfigError(
            f"{ROLLOUT}.name={rollout.name}: {STRICT} needs answers that depend on seed and prompt alone, and these depend on the "
            f"requests beside them; set {ROLLOUT}.full_determinism=true, for SGLang +{ROLLOUT}.engine_kwargs.sglang."
            "enable_deterministic_inference=true, use hf, or determinism=null"
        )
    if (rollout.get("custom") or {}).get("exact", True) is False:
        raise ConfigError(
            f"{ROLLOUT}.custom.exact=false: {STRICT} needs answers that do not depend on what was read before; leave it out"
        )


def strict_requests_carry_seeds(config: Any) -> None:
    if is_strict(config) and RequestSeeds.of(config) is RequestSeeds.never:
        raise ConfigError(f"controller.request_seeds=never: {STRICT} needs the seeds of requests; set auto or always")


def strict_runs_ask_no_endpoint(config: Any) -> None:
    names = endpoint_policies(config) if is_strict(config) else []
    if names:
        raise ConfigError(
            f"policies.{names[0]}.endpoint: {STRICT}, and nobody can promise that a server elsewhere answers the same again; serve "
            "its model here (model.path), or set determinism=null"
        )


def strict_draws_have_seeds(config: Any) -> None:
    for key, needed_by in SEEDS.items() if is_strict(config) else ():
        if OmegaConf.select(config, key) is None and OmegaConf.select(config, needed_by):
            raise ConfigError(f"{key}=null: {STRICT} and {needed_by}=true need a seed; set a number from 0 on")


def strict_is_no_warning(config: Any) -> None:
    """verl's key of the same purpose lets operations without a deterministic form pass with a warning."""
    for key in WARNING_ONLY if is_strict(config) else ():
        if OmegaConf.select(config, key):
            raise ConfigError(f"{key}=true: {STRICT} sets all that it sets, and fails where it warns; leave it out")


OF_ALL_POLICIES = (determinism_is_known, strict_runs_ask_no_endpoint)
"""Rules that no policy's own settings can break."""

RULES = (
    *OF_ALL_POLICIES,
    strict_engines_answer_by_the_seed,
    strict_requests_carry_seeds,
    strict_draws_have_seeds,
    strict_is_no_warning,
)
