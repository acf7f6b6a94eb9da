"""Plain Hugging Face folders from a checkpoint: whole models, or adapters in PEFT's format."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from marl.config.errors import ConfigError
from marl.evaluation.source import find, has_weights
from marl.report.runs import RUN
from marl.utils.pickles import FORCED

MODEL, ADAPTER, ORIGIN = "huggingface", "lora_adapter", "export.json"
WEIGHTS = ("*.safetensors", "*.bin")
PATIENCE_S = 3600
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The widest that a file holds counts."""


def checkpoint_of(run: Path, step: int | None) -> Path:
    """A run's checkpoint of a step, or its newest; whole. Raises ConfigError where there is none."""
    source = find(str(run if step is None else run / f"global_step_{step}"))
    if source.step is None:
        raise ConfigError(f"{run}: a model's folder already; expected a run's, with global_step_N in it")
    return source.path


def export(checkpoint: Path, target: Path, merged: bool) -> Iterator[tuple[str, Path]]:
    """Write each policy into ``target/<policy>``; yields what it is there, and its folder. Raises ConfigError where something lies there
    already, and where no policy's weights were saved."""
    actors = sorted(checkpoint.glob("*/actor"))
    if not actors:
        raise ConfigError(
            f"{checkpoint}: no policy's weights in it; expected <policy>/actor, as a run of this version saves them"
        )
    for actor in actors:
        name = actor.parent.name
        folder, temporary = target / name, target / f".{name}.making"
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder}: something lies there, and nothing is written over; remove it, or choose another --to"
            )
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        kind = write(actor, temporary, base_of(checkpoint, name), merged)
        origin = {"checkpoint": str(checkpoint), "policy": name, "kind": kind}
        (temporary / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        yield kind, folder


def write(actor: Path, folder: Path, base: str, merged: bool) -> str:
    """Write the policy that was saved in ``actor``; returns ``adapter`` or ``model``."""
    model, adapter = actor / MODEL, actor / ADAPTER
    if is_adapter := (adapter / "adapter_config.json").is_file() and not merged:
        copy(model, folder, weights=False)
        copy(adapter, folder)
        name_base(folder, base)
    elif has_weights(model):  # whole ones, merged where there is an adapter
        copy(model, folder)
    elif (adapter / "adapter_config.json").is_file():
        merge_adapter(adapter, base, folder)
        copy(model, folder, weights=False)
    else:
        merge_shards(actor, folder)
    add_tokenizer(folder, base)
    if not is_adapter:
        name_dtype(folder)
    return "adapter" if is_adapter else "model"


def copy(source: Path, target: Path, weights: bool = True) -> None:
    """The files of a folder; without its weights and its model's configuration, those of the tokenizer are left."""
    left_out = () if weights else (*WEIGHTS, "config.json", "generation_config.json", "*.index.json")
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)


def base_of(checkpoint: Path, policy: str) -> str:
    """The model that a policy's adapter is on: what ``run.json`` names."""
    config: dict[str, Any] = json.loads((checkpoint / RUN).read_text())["config"]
    own = ((config.get("policies") or {}).get(policy) or {}).get("model") or {}
    return str(own.get("path") or config["actor_rollout_ref"]["model"]["path"])


def name_base(folder: Path, base: str) -> None:
    """Let the adapter's configuration name its base, so that PEFT finds it."""
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    settings["base_model_name_or_path"] = settings.get("base_model_name_or_path") or base
    path.write_text(json.dumps(settings, indent=2) + "\n")


def add_tokenizer(folder: Path, base: str) -> None:
    """The base's tokenizer, where the checkpoint holds none."""
    if not any(folder.glob("tokenizer*")):
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(base, trust_remote_code=False).save_pretrained(folder)


def name_dtype(folder: Path) -> None:
    """Let the model's configuration name the precision of its weights, in which transformers then loads them."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        with safe_open(files[0], framework="np") as weights:
            kinds = {weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118 - no mapping
        path = folder / "config.json"
        settings = json.loads(path.read_text())
        settings["dtype"] = next((name for kind, name in DTYPES.items() if kind in kinds), settings.get("dtype"))
        path.write_text(json.dumps(settings, indent=2) + "\n")


def merge_adapter(adapter: Path, base: str, folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", trust_remote_code=False)
    except (OSError, ValueError) as error:
        line = str(error).splitlines()[0]
        raise ConfigError(
            f"{base}: the adapter's base cannot be loaded: {line}; restore it, or export without --merged"
        ) from None
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(folder)


def merge_shards(actor: Path, folder: Path) -> None:
    """verl's own merger, in a process of its own, where reading a shard executes nothing."""
    words = ["-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    words += ["--local_dir", str(actor), "--target_dir", str(folder)]
    safe = os.environ | {FORCED: "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE_S, env=safe)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError(
            f"{actor}: verl's shards cannot be merged: {last}; add hf_model to actor.checkpoint.save_contents"
        )
