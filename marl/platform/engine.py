"""verl's FSDP2 engines, registered for the CPU. Each override names the line of verl that needs an accelerator."""

from typing import Any

import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

import marl.platform.cpu  # noqa: F401 - registers the platform before verl resolves it


class _CPUEngine:
    def __init__(self, *, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if engine_config.strategy != "fsdp2":
            raise ValueError(
                f"strategy={engine_config.strategy} does not run on a CPU (FSDP1 wants parameters on an accelerator); "
                "set actor_rollout_ref.actor.strategy=fsdp2"
            )
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # a forward-only engine (the reference) is given CPUOffloadPolicy(pin_memory=True), which needs an accelerator
        forward_only, self.engine_config.forward_only = self.engine_config.forward_only, False
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config.forward_only = forward_only


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu"])
class CPUEngineWithLMHead(_CPUEngine, FSDPEngineWithLMHead):
    pass


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device=["cpu"])
class CPUEngineWithValueHead(_CPUEngine, FSDPEngineWithValueHead):
    def _build_module(self) -> torch.nn.Module:
        # verl's value head loader asks for flash attention whatever the config says; the language model's path builds
        # the same module and honours it
        config = self.model_config.hf_config
        config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, "0"
        config.architectures = [config.architectures[0].replace("ForCausalLM", "ForTokenClassification")]
        self.model_config.model_type = "language_model"
        try:
            return super()._build_module()
        finally:
            self.model_config.model_type = "value_model"
