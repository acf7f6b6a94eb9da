"""verl's FSDP2 engines, registered for the CPU. Each override names the line of verl that needs an accelerator.

Some are registered for GPUs as well: verl's value head asks for flash attention whatever the configuration says, and its
language model's log-probs are taken token by token where flash attention's cross-entropy is missing.
"""

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch.optim.lr_scheduler import LambdaLR
from verl.utils import tensordict_utils as tu, torch_functional
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

import marl.platform.cpu  # noqa: F401 - registers the platform before verl resolves it
from marl.platform.determinism import NO_FLASH_CROSS_ENTROPY
from marl.platform.head import SelectiveHead, reading_of
from marl.platform.micro_batches import SortedMicroBatches
from marl.platform.optimizers import optimizer_of
from marl.platform.shapes import MIN_WIDTH


class TrainedEngine(FSDPEngine):
    """Engine whose updates differ from verl's on every device: a warm-up trains from its first step on, ``lr`` is the rate that the
    update used, and a token that pads is trained where it is read."""

    def _build_module(self) -> torch.nn.Module:
        # where the end token pads, as in many chat models, it would never be trained as an input; padding itself has no gradient
        module = super()._build_module()
        module.get_input_embeddings().padding_idx = None
        return module

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """verl's, with a warm-up of n steps that begins at 1/n: at verl's 0, a step of rollouts would change nothing."""
        settings, schedule = self.optimizer_config, super()._build_lr_scheduler(optimizer)
        steps = settings.lr_warmup_steps
        steps = steps if steps > 0 else int(settings.lr_warmup_steps_ratio * settings.total_training_steps)
        if settings.lr_scheduler_type == "cosine" and not settings.zero_indexed_step:
            return schedule  # it counts from 1
        return LambdaLR(optimizer, [begun(factor, steps) for factor in schedule.lr_lambdas])

    def lr_scheduler_step(self) -> float:
        used = self.optimizer.param_groups[0]["lr"]
        super().lr_scheduler_step()
        return used


def begun(factor: Callable[[int], float], warm_up: int) -> Callable[[int], float]:
    """The schedule with its warm-up, and nothing else, one step earlier."""
    return lambda step: factor(step + 1 if step < warm_up else step)


class _CPUEngine(SortedMicroBatches, FSDPEngine):
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
            built = super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = forward_only
        # verl then does not move the weights to the device before it reads them: they are there
        self._uses_fsdp2_cpu_offload_policy = True
        return built

    def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        return optimizer_of(module.parameters(), self.optimizer_config)


class SelectiveEngine(TrainedEngine, FSDPEngineWithLMHead):
    """A language model whose head and softmax are computed where a mask reads them alone."""

    reads_selectively = True
    min_width = 0
    """Padded rows are at least so wide."""

    @cached_property
    def head(self) -> SelectiveHead:
        return SelectiveHead(self.module)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        missing = self.min_width - inputs["input_ids"].shape[-1]
        if missing > 0 and not tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            for key in ("input_ids", "attention_mask", "position_ids"):
                inputs[key] = torch.nn.functional.pad(inputs[key], (0, missing))
        if self.reads_selectively and not self.use_ulysses_sp:
            reading = output_args["reading"] = reading_of(micro_batch, output_args, inputs["input_ids"].shape[-1])
            if reading is not None or "head" in vars(self):  # fused kernels give no logits to measure
                self.head.expect(reading)
        return inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """As verl's; what is not read is zero."""
        reading = output_args.pop("reading", None)
        if reading is None:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        return reading.outputs(output.logits)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu"])
class CPUEngineWithLMHead(_CPUEngine, SelectiveEngine):
    min_width = MIN_WIDTH
    """As the hf server's rows are."""


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cuda"], vendor=["nvidia"])
class GPUEngineWithLMHead(SelectiveEngine):
    @property
    def reads_selectively(self) -> bool:  # type: ignore[override]
        """True without flash attention's kernel: verl then takes the log-softmax of packed rows token by token.

        verl's offloading of activations counts the forward and backward passes of a head, which does not see all of them here.
        """
        return not has_fast_cross_entropy() and not self.model_config.enable_activation_offload


@EngineRegistry.register(model_type="language_model", backend=["fsdp"], device=["cuda"], vendor=["nvidia"])
class FSDP1EngineWithLMHead(TrainedEngine, FSDPEngineWithLMHead):
    """Reads every position, as verl's does."""


def has_fast_cross_entropy() -> bool:
    """True where verl takes log-probs by flash attention's kernel, which is not deterministic (``determinism=strict``)."""
    return (
        torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE and os.environ.get(NO_FLASH_CROSS_ENTROPY, "0") != "1"
    )


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device=["cuda"], vendor=["nvidia"])
class EngineWithValueHead(TrainedEngine, FSDPEngineWithValueHead):
    """verl's, with the attention that ``critic.model.override_config.attn_implementation`` names, on any device."""

    def _build_module(self) -> torch.nn.Module:
        # verl's loader of value heads asks for flash attention; the same class comes by way of the language model's
        config = self.model_config.hf_config
        config.num_labels, config.classifier_dropout = 1, 0.0
        config.architectures = [config.architectures[0].replace("ForCausalLM", "ForTokenClassification")]
        self.model_config.model_type = "language_model"
        try:
            return super()._build_module()
        finally:
            self.model_config.model_type = "value_model"


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device=["cpu"])
class CPUEngineWithValueHead(_CPUEngine, EngineWithValueHead):
    pass
