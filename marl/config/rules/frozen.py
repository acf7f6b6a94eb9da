"""Rules about policies that this run serves and never trains."""

from typing import Any

from marl.config.errors import ConfigError
from marl.config.kinds import frozen_policies
from marl.config.policies import own_settings


def frozen_models_are_whole(config: Any) -> None:
    """Their servers load the model's weights, and no adapter beside them."""
    for name in frozen_policies(config):
        adapter = own_settings(config, name).model.get("lora_adapter_path")
        if adapter is not None:
            raise ConfigError(
                f"policies.{name}.model.lora_adapter_path={adapter}: no agent of this policy is trained, and its servers load whole "
                "models; merge the adapter (PEFT's merge_and_unload) and set model.path to the result, or train one of its agents"
            )


RULES = (frozen_models_are_whole,)
