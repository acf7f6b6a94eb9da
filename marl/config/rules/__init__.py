"""Rules between keys: each takes the resolved configuration, raises ConfigError and names the remedy.

They run before anything starts and import neither torch nor ray. Rules that need classes, models or prompts are in :mod:`marl.preflight`.
"""

from collections.abc import Callable
from typing import Any

from marl.config.copies import copied
from marl.config.endpoints import endpoints_are_valid
from marl.config.errors import ConfigError
from marl.config.policies import own_settings
from marl.config.precision import precision_of
from marl.config.rules import agents, resources, training
from marl.config.targets import targets_are_trusted
from marl.config.values import check_values, must_be_a_group

Rules = tuple[Callable[[Any], None], ...]
RULES: Rules = (targets_are_trusted, *agents.RULES, endpoints_are_valid, *training.RULES, *resources.RULES)
POLICY_RULES: Rules = (
    *agents.POLICY_RULES,
    *training.POLICY_RULES,
    *resources.POLICY_RULES,
)
"""Rules that the common settings, and every policy's own in their place, have to keep."""


def check(config: Any) -> None:
    """Raise ConfigError for the first rule that does not hold, for the whole or for one policy's changes to it."""
    check_values(config)
    for name, changes in config.policies.items():
        if changes is not None:
            must_be_a_group(f"policies.{name}", changes)
    own = {name: with_settings_of(config, name) for name in config.policies}
    for name in own:
        keep(own[name], (check_values,), f"policies.{name}: ")
    keep(config, (*RULES, *POLICY_RULES), "")
    for name in own:
        keep(own[name], POLICY_RULES, f"policies.{name}: ")


def with_settings_of(config: Any, name: str) -> Any:
    """The configuration with a policy's own settings in the place of the common ones."""
    own = copied(config)
    own.actor_rollout_ref = own_settings(config, name)
    own.precision = precision_of(config, name)
    return own


def keep(config: Any, rules: Rules, where: str) -> None:
    try:
        for rule in rules:
            rule(config)
    except ConfigError as error:
        if not where:
            raise
        raise ConfigError(f"{where}{error}") from None
