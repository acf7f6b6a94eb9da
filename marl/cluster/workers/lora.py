"""A policy's adapters: merged into the weights that servers get, and exported so that other programs load them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import (
    load_fsdp_model_to_gpu,
    merged_lora_context,
    normalize_peft_param_name,
    offload_fsdp_model_to_cpu,
)
from verl.utils.model import convert_weight_keys

from marl.cluster.workers.whole_model import writer

Named = Iterable[tuple[str, torch.Tensor]]


def has_adapters(engine: Any) -> bool:
    return hasattr(unwrapped(engine), "peft_config")


def unwrapped(engine: Any) -> Any:
    """The engine's model without FSDP1's wrapper; FSDP2 has none."""
    return getattr(engine.module, "_fsdp_wrapped_module", engine.module)


def merged_parameters(engine: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of the whole weights with the adapters merged in, by the names of a model without adapters.

    As verl's ``FSDPEngine._merged_lora_per_tensor_param``, which rounds every weight to bfloat16: here they are of ``dtype``,
    the server's, or of the trainer's where that is None. Gathering is a collective: every rank iterates.
    """
    engine.checkpoint_manager.release()
    with on_device(engine), merged_lora_context(engine.module, backup_adapters=True):
        weights = normalize_peft_param_name(engine.module.state_dict())
        for name, weight in convert_weight_keys(weights, unwrapped(engine)).items():
            yield name, whole(weight, dtype)


@contextmanager
def on_device(engine: Any) -> Iterator[None]:
    """Merging computes on the weights: bring them to the accelerator where they are kept in the host's memory."""
    if not engine._uses_fsdp2_cpu_offload_policy:
        load_fsdp_model_to_gpu(engine.module)
    try:
        yield
    finally:
        if engine._is_offload_param:
            offload_fsdp_model_to_cpu(engine.module)


def whole(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy: on one rank a gathered tensor is the live weight itself, which changes back when the merge ends."""
    gathered: torch.Tensor = (
        cast(Any, weight.to(get_device_id())).full_tensor() if isinstance(weight, DTensor) else weight
    )
    wanted = dtype if dtype is not None and gathered.is_floating_point() else gathered.dtype
    return gathered.detach().to(wanted, copy=True)


@contextmanager
def without_whole_model(engine: Any) -> Iterator[bool]:
    """Keep verl from writing ``hf_model``: with adapters it would write PEFT's names, which nothing loads. Yields whether it
    was asked for."""
    manager = engine.checkpoint_manager
    contents = manager.checkpoint_save_contents
    manager.checkpoint_save_contents = [kind for kind in contents if kind != "hf_model"]
    try:
        yield "hf_model" in contents
    finally:
        manager.checkpoint_save_contents = contents


def exports(engine: Any, folder: Path, rank: int, with_model: bool) -> list[Callable[[], Any]]:
    """Writers of ``lora_adapter`` in PEFT's form, and of the merged model in ``huggingface`` if it is wanted, from copies of the
    present weights; called by every rank."""
    model, parts = unwrapped(engine), collected(adapter_parameters(engine), rank)
    jobs: list[Callable[[], Any]] = [
        partial(save_adapter, model.peft_config["default"], parts, folder / "lora_adapter")
    ]
    if with_model:
        jobs += whole_model_writers(engine, merged_parameters(engine), folder / "huggingface", rank)
    return jobs if rank == 0 else []


def whole_model_writers(engine: Any, merged: Named, folder: Path, rank: int) -> list[Callable[[], Any]]:
    """The writer of a model with these weights, on the first rank; called by every rank."""
    weights, trusted = collected(merged, rank), engine.model_config.trust_remote_code
    return [writer(unwrapped(engine).config, weights, folder, trusted)] if rank == 0 else []


def save_adapter(config: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    config.save_pretrained(folder)
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})


def adapter_parameters(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in engine.module.state_dict().items():
        if ".lora_" in name:
            yield name.replace(".default.", "."), whole(weight)


def collected(parameters: Named, rank: int) -> dict[str, torch.Tensor]:
    """All of them in the first rank's memory, none in another's."""
    kept = {}
    for name, weight in parameters:
        if rank == 0:
            kept[name] = weight.cpu().contiguous()
    return kept
