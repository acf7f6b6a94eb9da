"""Rules about the code that a configuration has executed: classes that it names, and what comes with a model."""

import re
from typing import Any

from omegaconf import OmegaConf

from marl.config.errors import ConfigError, plain
from marl.config.targets import check_target, targets_in, trusted_modules


def trusted_targets_are_modules(config: Any) -> None:
    given = config.trusted_targets
    listed = not isinstance(given, str) and hasattr(given, "__iter__")
    if not listed or not all(isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) for name in given):
        raise ConfigError(
            f"trusted_targets={given}: expected a list of packages or modules, as in trusted_targets=[my_package]"
        )


def targets_are_trusted(config: Any) -> None:
    trusted = trusted_modules(config)
    for key, target in targets_in(plain(config)):
        check_target(key, target, trusted)


def remote_code_is_trusted_or_not(config: Any) -> None:
    """transformers would ask on the terminal where it is null."""
    for key in ("actor_rollout_ref.model", "critic.model"):
        given = OmegaConf.select(config, f"{key}.trust_remote_code")
        if not isinstance(given, bool):
            raise ConfigError(
                f"{key}.trust_remote_code={given}: expected true or false; true executes code that comes with the model, leave it "
                "false unless you have read that code"
            )


RULES = (trusted_targets_are_modules, targets_are_trusted, remote_code_is_trusted_or_not)
OF_ALL_POLICIES = (trusted_targets_are_modules, targets_are_trusted)
