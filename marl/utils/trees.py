"""Nested states as one safetensors file: dicts, lists and tuples of tensors, arrays, numbers and strings. Reading one executes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

TREE, KIND = "tree", "__kind__"


def copied(tree: Any) -> Any:
    """The same with copies of the tensors, in the host's memory, that no later update changes."""
    return mapped(tree, lambda tensor: tensor.detach().to("cpu", copy=True))


def on_host(tree: Any) -> Any:
    """The same in the host's memory; tensors that lie there are not copied."""
    return mapped(tree, lambda tensor: tensor.detach().to("cpu"))


def mapped(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same with every tensor changed; the tree's own dicts, lists and tuples are copies."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    return type(tree)(mapped(value, change) for value in tree) if isinstance(tree, list | tuple) else tree


def save_tree(tree: Any, path: Path) -> None:
    """Raises TypeError for a state that holds anything but dicts, lists, tuples, tensors, numbers and strings."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encoded(tree, tensors))
    save_file(_apart(tensors), path, {TREE: text})


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with copies of those that share another's memory, which safetensors does not take."""
    found: dict[int, str] = {}
    first = {name: found.setdefault(tensor.untyped_storage().data_ptr(), name) for name, tensor in tensors.items()}
    return {name: tensor if first[name] == name else tensor.clone() for name, tensor in tensors.items()}


def load_tree(path: Path) -> Any:
    """Read into memory of its own: tensors mapped from the file would keep it open as long as they live."""
    with safe_open(path, framework="pt") as file:
        return _decoded(json.loads(file.metadata()[TREE]), lambda name: file.get_tensor(name).clone())


def _encoded(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach().cpu().contiguous()
        return {KIND: "tensor", "name": name}
    if isinstance(tree, dict):
        return {KIND: "dict", "items": [[_encoded(part, tensors) for part in item] for item in tree.items()]}
    if isinstance(tree, np.ndarray):
        return {KIND: "array", "type": str(tree.dtype), "items": tree.tolist()}
    if isinstance(tree, tuple):
        return {KIND: "tuple", "items": [_encoded(value, tensors) for value in tree]}
    return [_encoded(value, tensors) for value in tree] if isinstance(tree, list) else tree


def _decoded(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decoded(value, tensor) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if tree[KIND] == "tensor":
        return tensor(tree["name"])
    if tree[KIND] == "array":
        return np.array(tree["items"], dtype=tree["type"])
    if tree[KIND] == "tuple":
        return tuple(_decoded(value, tensor) for value in tree["items"])
    return {_decoded(key, tensor): _decoded(value, tensor) for key, value in tree["items"]}
