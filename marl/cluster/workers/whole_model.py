"""A whole model in Hugging Face's form: its shell is built in the caller's thread, and any thread writes it."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig
from verl.utils.transformers_compat import drop_tied_target_keys

from marl.utils.dtensors import local

Weights = dict[str, torch.Tensor]
Place = tuple[str, int]
Copies = dict[tuple[Any, ...], DTensor]


def writer(config: Any, weights: Weights, folder: Path, trust_remote_code: bool) -> Callable[[], Any]:
    """Writing of these weights, whose dict is the writer's from now on. For the other arguments see :func:`shell_of`."""
    shell = shell_of(config, folder, trust_remote_code)
    drop_tied(shell, weights)
    return partial(write_into, shell, folder, weights)


def drop_tied(shell: Any, weights: dict[str, Any]) -> None:
    """Remove the names under which a weight would be there a second time. For the caller's thread: it ties the shell's weights, which
    another thread's :func:`shell_of` would part.
    """
    drop_tied_target_keys(weights, shell, shell.config)


def shell_of(config: Any, folder: Path, trust_remote_code: bool, dtype: torch.dtype | None = None) -> Any:
    """A model without weights; ``dtype`` is the one that its configuration names, by default the model's own.

    Building a model sets torch's default dtype and replaces a method of ``torch.nn.Module`` for the whole process: beside a
    step it would change what that computes. The configuration is copied, because writing a model changes its own.
    """
    config = deepcopy(config)
    kind = AutoModelForTokenClassification if heads_tokens(config) else AutoModelForCausalLM
    with init_empty_weights():
        shell = kind.from_config(config, dtype=dtype or config.dtype, trust_remote_code=trust_remote_code)
    if shell.can_generate() and (folder / "generation_config.json").is_file():
        shell.generation_config = GenerationConfig.from_pretrained(folder)
    return shell


def write_into(shell: Any, folder: Path, weights: Weights) -> None:
    shell.save_pretrained(folder, state_dict=weights)


def place(tensor: torch.Tensor) -> Place:
    """The memory that a tensor shows, or this rank's part of it."""
    own = local(tensor)
    return own.device.type, own.untyped_storage().data_ptr()


def copy_of(tensor: torch.Tensor, copies: Copies) -> torch.Tensor:
    """A copy in the host's memory that no later update changes. The copy of a DTensor is kept in ``copies``, and given for others
    of the same memory: tied weights, and the gathered weight of a rank that is alone, a plain tensor."""
    own = local(tensor)
    shown = own.device.type, own.data_ptr(), tensor.shape, own.shape, own.stride(), own.dtype
    if shown in copies:
        return copies[shown].to_local() if own is tensor else copies[shown]
    copy = tensor.detach().to("cpu", copy=True)
    if isinstance(copy, DTensor):
        copies[shown] = copy
    return copy


def heads_tokens(config: Any) -> bool:
    """True for a critic's model, which has a value at every token."""
    return "ForTokenClassification" in (config.architectures or [""])[0]
