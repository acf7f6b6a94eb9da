"""FSDP2 engine of one base model and several adapters, each with its own optimizer, schedule and gradient clip.

verl's engine works on whatever is active: :meth:`AdapterEngine.use` exchanges the adapter and all that belongs to its update.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id, get_torch_device
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from marl.platform.engine import CPUEngineWithLMHead, GPUEngineWithLMHead
from marl.platform.optimizers import optimizer_of
from marl.platform.shards import reshard
from marl.utils import dtensors

ADAPTED = "adapted_language_model"
"""verl's ``model_type`` of these engines."""


@dataclass(frozen=True)
class AdapterSpec:
    """One policy's part of an engine, before it exists."""

    lora: Mapping[str, Any]
    """Arguments of PEFT's ``LoraConfig``."""
    optimizer: Any
    """verl's optimizer dataclass."""
    seed: int
    """Seeds the first weights, so that they do not depend on the adapters beside it."""
    start: Path | None = None
    """PEFT's file of the first weights, in place of drawn ones."""

    @property
    def scaling(self) -> float:
        return float(self.lora["lora_alpha"] / self.lora["r"])


@dataclass(frozen=True)
class Update:
    """The part of an engine that an adapter brings along when it is used."""

    settings: Any
    optimizer: torch.optim.Optimizer
    schedule: Any


class AdapterEngine(FSDPEngineWithLMHead):
    adapters: Mapping[str, AdapterSpec]
    """Set before ``initialize``: FSDP shards what is there when it wraps the model; added later, ranks would diverge."""
    active: str
    optimizer_config: Any

    def initialize(self) -> None:
        super().initialize()
        self.use(next(iter(self.adapters)))

    def _build_module(self) -> torch.nn.Module:
        self.model_config.model_type = "language_model"
        try:
            module = super()._build_module()
        finally:
            self.model_config.model_type = ADAPTED
        renew_frequencies(module)
        return module

    def _build_lora_module(self, module: Any) -> torch.nn.Module:
        """As verl's, with all the adapters, which are in full precision whatever the base is in: most updates are smaller than
        the last bit of a bf16 weight."""
        module.enable_input_require_grads()
        model: Any = None
        for name, spec in self.adapters.items():
            config = LoraConfig(task_type=TaskType.CAUSAL_LM, bias="none", **spec.lora)
            with torch.random.fork_rng():
                torch.manual_seed(spec.seed)
                if model is None:
                    model = get_peft_model(module, config, adapter_name=name, autocast_adapter_dtype=False)
                else:
                    model.add_adapter(name, config, autocast_adapter_dtype=False)
        for _, parameter in of_adapters(model):
            parameter.data = parameter.data.float()
        for name, spec in self.adapters.items():
            if spec.start is not None:
                load_first_weights(model, name, spec.start)
        return model

    def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        """An optimizer of its own for each adapter; returns the first."""
        self.updates = {name: self._update(module, name) for name in self.adapters}
        return next(iter(self.updates.values())).optimizer

    def _update(self, module: torch.nn.Module, name: str) -> Update:
        settings = self.adapters[name].optimizer
        optimizer = optimizer_of([p for _, p in of_adapters(module, name)], settings)
        usual, self.optimizer_config = self.optimizer_config, settings
        schedule = super()._build_lr_scheduler(optimizer)
        self.optimizer_config = usual
        return Update(settings, optimizer, schedule)

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return next(update.schedule for update in self.updates.values() if update.optimizer is optimizer)

    def use(self, name: str) -> None:
        """Forward passes, updates and their clip are this adapter's until another is used. Raises KeyError for an unknown one."""
        if name not in self.adapters:
            raise KeyError(f"adapter {name!r}: this engine has {', '.join(self.adapters)}")
        # on gathered parameters, PEFT's switch of requires_grad would be undone by the next reshard: no error, no training
        reshard(self.module)
        self.module.zero_grad(set_to_none=True)  # another adapter's gradients would count in this one's clip
        self.module.set_adapter(name)
        self.active, update = name, self.updates[name]
        self.optimizer_config, self.optimizer, self.lr_scheduler = update.settings, update.optimizer, update.schedule
        self.checkpoint_manager.optimizer, self.checkpoint_manager.lr_scheduler = update.optimizer, update.schedule

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base alone: every adapter's reference."""
        reshard(self.module)
        with self.module.disable_adapter():
            yield
            reshard(self.module)

    def adapter_shards(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """An adapter's weights as this rank holds them, by their names in a model without PEFT."""
        reshard(self.module)
        for key, parameter in of_adapters(self.module, name):
            yield unnamed(key.removeprefix("base_model.model."), name), parameter

    def base_shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The base's weights as this rank holds them, by their names in a model without PEFT."""
        reshard(self.module)
        for key, weight in self.module.state_dict().items():
            if ".lora_" not in key:
                yield key.removeprefix("base_model.model.").replace(".base_layer.", "."), weight

    def adapter_weights(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole copies of an adapter's weights; a collective."""
        return ((key, whole(weight)) for key, weight in self.adapter_shards(name))

    def base_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole copies of the base's weights; a collective."""
        return ((key, whole(weight)) for key, weight in self.base_shards())

    def adapter_state(self, name: str) -> dict[str, Any]:
        """This rank's shards of an adapter, and the state of its update."""
        reshard(self.module)
        get_torch_device().synchronize()  # verl moves weights and moments to the host without waiting for the copies
        update = self.updates[name]
        return {
            "weights": {key: shard(parameter).clone() for key, parameter in of_adapters(self.module, name)},
            "optimizer": local(update.optimizer.state_dict()),
            "schedule": update.schedule.state_dict(),
        }

    def load_adapter_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`adapter_state`; the learning rate and the like stay the configuration's. Raises ValueError
        where the saved adapter has other weights."""
        reshard(self.module)
        own = dict(of_adapters(self.module, name))
        different = sorted(
            key for key in {*own, *state["weights"]}
            if key not in own or key not in state["weights"] or shard(own[key]).shape != state["weights"][key].shape
        )  # fmt: skip
        if different:
            raise ValueError(
                f"adapter {name!r}: the checkpoint has no {different[0]}, or one of another shape; resume with the saved "
                "lora_rank, target_modules and number of ranks"
            )
        with torch.no_grad():
            for key, parameter in own.items():
                shard(parameter).copy_(state["weights"][key])
        self._load_update(self.updates[name], state)

    def _load_update(self, update: Update, state: Mapping[str, Any]) -> None:
        settings = [{key: group[key] for key in group if key != "params"} for group in update.optimizer.param_groups]
        base_lrs = list(update.schedule.base_lrs)
        parameters = [p for group in update.optimizer.param_groups for p in group["params"]]
        update.optimizer.load_state_dict(sharded(state["optimizer"], parameters))
        update.schedule.load_state_dict(state["schedule"])
        update.schedule.base_lrs = base_lrs
        for group, own, base, factor in zip(
            update.optimizer.param_groups, settings, base_lrs, update.schedule.lr_lambdas, strict=True
        ):
            group.update(own, lr=base * factor(update.schedule.last_epoch))


def renew_frequencies(module: torch.nn.Module) -> None:
    """Compute rotary frequencies anew: verl casts buffers with the weights, and positions would be off by bf16's rounding."""
    for part in module.modules():
        old = [buffer for key, buffer in part.named_buffers(recurse=False) if key.endswith("inv_freq")]
        if any(buffer.dtype != torch.float32 for buffer in old):
            with torch.device(old[0].device):
                fresh = type(part)(config=cast(Any, part).config)
            for key, buffer in fresh.named_buffers(recurse=False):
                setattr(part, key, buffer)


def load_first_weights(model: torch.nn.Module, name: str, file: Path) -> None:
    """Start an adapter from PEFT's file. Raises ValueError where that has other weights."""
    saved, own = load_file(file), {unnamed(key, name): parameter for key, parameter in of_adapters(model, name)}
    if {key: tuple(weight.shape) for key, weight in saved.items()} != {key: tuple(p.shape) for key, p in own.items()}:
        raise ValueError(f"adapter {name!r}: {file} holds an adapter of other layers or ranks than this run's")
    for key, parameter in own.items():
        parameter.data.copy_(saved[key])


def merged(
    base: Iterable[tuple[str, torch.Tensor]], added: Mapping[str, torch.Tensor], scaling: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's weights with an adapter's added, by their names in a model without PEFT."""
    for key, weight in base:
        down, up = (added.get(f"{key.removesuffix('.weight')}.lora_{half}.weight") for half in "AB")
        yield key, weight if down is None or up is None else (weight + (up @ down) * scaling).to(weight.dtype)


def of_adapters(module: torch.nn.Module, name: str | None = None) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of one adapter, or of all."""
    for key, parameter in module.named_parameters():
        if ".lora_" in key and (name is None or owner(key) == name):
            yield key, parameter


def owner(key: str) -> str:
    """The adapter in PEFT's name of a parameter, ``….q_proj.lora_A.<adapter>.weight``."""
    return key.split(".lora_", 1)[1].split(".")[1]


def unnamed(key: str, adapter: str) -> str:
    """The name of a parameter in a model or a file that holds this adapter alone."""
    return key.removesuffix(f".{adapter}.weight") + ".weight"


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; writing to it changes the model."""
    return dtensors.local(tensor.detach())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: on one rank a gathered tensor is the live one."""
    kept = tensor.detach()
    return (cast(Any, kept.to(get_device_id())).full_tensor() if isinstance(kept, DTensor) else kept).clone()


def local(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with this rank's shards in place of distributed tensors."""
    return changed(state, lambda value, _: shard(value).clone())


def sharded(state: dict[str, Any], parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    """The reverse of :func:`local`."""

    def like_its_parameter(value: torch.Tensor, index: int) -> torch.Tensor:
        parameter = parameters[index]
        if not isinstance(parameter, DTensor) or value.shape != parameter.to_local().shape or not value.dim():
            return value
        return DTensor.from_local(
            value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )

    return changed(state, like_its_parameter)


def changed(state: dict[str, Any], change: Callable[[torch.Tensor, int], torch.Tensor]) -> dict[str, Any]:
    moments = {
        index: {key: change(value, index) if torch.is_tensor(value) else value for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    return state | {"state": moments}


@EngineRegistry.register(model_type=ADAPTED, backend=["fsdp2"], device=["cpu"])
class CPUAdapterEngine(AdapterEngine, CPUEngineWithLMHead):
    pass


@EngineRegistry.register(model_type=ADAPTED, backend=["fsdp2"], device=["cuda"], vendor=["nvidia"])
class GPUAdapterEngine(AdapterEngine, GPUEngineWithLMHead):
    pass
