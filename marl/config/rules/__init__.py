"""Rules between keys, by subject. Each function is one rule: it takes the resolved configuration, raises ConfigError and names the remedy.

They run before anything starts and import neither torch nor ray.
"""

from collections.abc import Callable, Iterable
from typing import Any

from marl.config.bounds import check_values
from marl.config.copies import copied
from marl.config.errors import ConfigError
from marl.config.policies import own_settings
from marl.config.precision import precision_of
from marl.config.rules import (
    agents,
    batches,
    checkpoints,
    determinism,
    endpoints,
    engines,
    files,
    frozen,
    policies,
    precision,
    references,
    resources,
    run,
    sharing,
    targets,
)


def own_values_are_allowed(config: Any) -> None:
    """Each policy's own values, which rules between keys calculate with."""
    for name in config.policies:
        of_policy(config, name, (check_values,))


RULES: tuple[Callable[[Any], None], ...] = (
    check_values,
    policies.policies_change_groups,
    own_values_are_allowed,
    *targets.RULES,
    *sharing.RULES,
    *policies.RULES,
    *endpoints.RULES,
    *frozen.RULES,
    *agents.RULES,
    *batches.RULES,
    *resources.RULES,
    *engines.RULES,
    *determinism.RULES,
    *precision.RULES,
    *references.RULES,
    *files.RULES,
    *run.RULES,
    *checkpoints.RULES,
)
OF_ALL_POLICIES = (
    check_values,
    policies.policies_change_groups,
    own_values_are_allowed,
    *targets.OF_ALL_POLICIES,
    *sharing.OF_ALL_POLICIES,
    *policies.OF_ALL_POLICIES,
    *endpoints.RULES,
    *frozen.RULES,
    *resources.OF_ALL_POLICIES,
    *engines.OF_ALL_POLICIES,
    *determinism.OF_ALL_POLICIES,
    precision.critics_have_the_precision,
)
RULES_PER_POLICY = tuple(rule for rule in RULES if rule not in OF_ALL_POLICIES)
"""Rules that are checked again on every policy's own settings."""


def check(config: Any) -> None:
    """Raise ConfigError for the first rule that does not hold, for the whole or for one policy's changes to it."""
    for rule in RULES:
        rule(config)
    for name in config.policies:
        of_policy(config, name, RULES_PER_POLICY)


def of_policy(config: Any, name: str, rules: Iterable[Callable[[Any], None]]) -> None:
    """Check rules on a policy's own settings. Raises ConfigError that names it."""
    own = copied(config)
    own.actor_rollout_ref = own_settings(config, name)
    own.precision = precision_of(config, name)
    try:
        for rule in rules:
            rule(own)
    except ConfigError as error:
        raise ConfigError(f"policies.{name}: {error}") from None
