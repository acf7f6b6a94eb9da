"""Engines that share a GPU: each gets a part of the memory that ``rollout.gpu_memory_utilization`` allows a pool's servers."""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from marl.config.errors import ConfigError
from marl.config.kinds import adapter_policies
from marl.config.policies import changes_of, own_settings
from marl.preflight.checks import CheckedSetup
from marl.preflight.memory_plan import engine_weights

KEY = "gpu_memory_utilization"
MOST = 0.9
"""The most that servers may take of a GPU they share: contexts, CUDA graphs and the buckets of a sync need some of the rest."""


def reserves(rollout: Any) -> bool:
    """True if the server takes a share of its GPU when it starts, as vLLM and SGLang do."""
    return bool(rollout.name != "hf")


def keeps_own_share(config: DictConfig, policy: str) -> bool:
    """True if a policy's own settings give its server's share."""
    return KEY in (changes_of(config.policies, policy).get("rollout") or {})


def divide(setup: CheckedSetup) -> None:
    """Write the servers' shares into the configuration. Raises ConfigError where a GPU's servers ask for more than there is."""
    for pool in setup.pools:
        engines = {name: own_settings(setup.config, name).rollout for name in members_of(setup, pool)}
        engines = {name: rollout for name, rollout in engines.items() if reserves(rollout)}
        if len(engines) > 1:
            write(setup.config, shares_of(setup, pool, engines))


def members_of(setup: CheckedSetup, pool: str) -> list[str]:
    """A policy for every engine of a pool: adapters have one together."""
    members = [name for name, own in setup.pool_by_policy.items() if own == pool]
    adapted = [name for name in members if name in adapter_policies(setup.config)]
    return [name for name in members if name not in adapted[1:]]


def shares_of(setup: CheckedSetup, pool: str, engines: Mapping[str, Any]) -> dict[str, float]:
    """Each engine's part of a GPU: its own key's, or of what those leave a part by its weights."""
    config = setup.config
    fixed = {name: float(rollout[KEY]) for name, rollout in engines.items() if keeps_own_share(config, name)}
    needs = {name: engine_weights(rollout, setup.sizes[name]) for name, rollout in engines.items() if name not in fixed}
    together = float(config.actor_rollout_ref.rollout[KEY]) if needs else 0.0
    left = together - sum(fixed.values())
    if sum(fixed.values()) > MOST or together > MOST or (needs and left <= 0):
        raise too_much(pool, fixed, together, list(needs))
    whole = sum(needs.values())
    return fixed | {name: int(1e4 * left * own / whole) / 1e4 for name, own in needs.items()}


def too_much(pool: str, fixed: Mapping[str, float], together: float, others: Sequence[str]) -> ConfigError:
    given = [f"policies.{name}.rollout.{KEY}={share:g}" for name, share in fixed.items()]
    if others:
        given.append(
            f"actor_rollout_ref.rollout.{KEY}={together:g}, which is for all servers of a GPU ({', '.join(others)} too)"
        )
    return ConfigError(
        f"pool {pool!r}: {'; '.join(given)}: expected at most {MOST:g} of a GPU for its servers together, and something left for "
        "each; lower them, leave the policies' own out, or give a policy its own pool"
    )


def write(config: DictConfig, shares: Mapping[str, float]) -> None:
    with open_dict(config):
        for name, share in shares.items():
            if config.policies.get(name) is None:
                config.policies[name] = {}
            OmegaConf.update(config, f"policies.{name}.rollout.{KEY}", share, force_add=True)


def text_of(setup: CheckedSetup) -> list[str]:
    """A line for every pool whose servers share GPUs."""
    lines = []
    for pool in setup.pools:
        shares = {
            name: rollout[KEY]
            for name in members_of(setup, pool)
            for rollout in [own_settings(setup.config, name).rollout]
            if reserves(rollout)
        }
        if len(shares) > 1:
            parts = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
            lines.append(f"pool {pool}: GPU memory share of each server, started in turn: {parts}")
    return lines
