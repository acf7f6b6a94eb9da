"""The records that a run left in its folder, as a replay needs them: settings, checkpoints, metrics, dumps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict

from marl.config.errors import ConfigError
from marl.config.overrides import hydra_overrides
from marl.config.schema import AgentConfig
from marl.controller.recorded_ledger import has_step
from marl.preflight.run_folder import RUN, family_of
from marl.report.runs import must_be_plain, read_record
from marl.utils import folders, manifest
from marl.utils.folders import METRICS, whole_lines
from marl.utils.manifest import Damaged
from marl.utils.pickles import read
from marl.utils.trees import load_tree

OPTIONS = ("runner", "learner", "credit")
MEASURED = ("timing", "perf/", "endpoint/", "reward/")
"""Beginnings of metrics that tell of machines and requests, not of what was computed."""
VALIDATED = ("val/", "validation_", "baseline/")
SHOWN = 5
"""Differences that are named, of each kind."""


@dataclass(frozen=True)
class RecordedRun:
    folder: Path
    identity: dict[str, Any]

    @classmethod
    def at(cls, folder: Path) -> "RecordedRun":
        """Raises ConfigError for a folder without a run, for one whose record cannot be read, and for one of another method than
        ``rl``: its servers played its references, or it has no turns."""
        if not (folder / RUN).is_file():
            raise ConfigError(f"{folder} holds no {RUN}: expected the folder of a run, as in outputs/quickstart/latest")
        must_be_plain(folder)
        run = cls(folder, read_record(folder / RUN))
        method = run.settings["method"]["name"] if "method" in run.settings else "rl"  # which older runs do not name
        if method != "rl":
            raise ConfigError(
                f"{folder}: method={method}; marl replay plays runs of method=rl; name one of these, or resume this one to repeat its "
                "steps"
            )
        return run

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self.identity["config"]
        return settings

    def config(self, changes: Sequence[str] = ()) -> DictConfig:
        """The run's configuration, with the types of its groups, and ``changes`` (``key=value``) to it."""
        names = [f"{group}={self.settings[group]['name']}" for group in OPTIONS]
        with initialize_config_module("marl.configs", version_base="1.3"):
            config = compose("marl", overrides=hydra_overrides(names))
        with open_dict(config):
            config.agents = DictConfig({}, element_type=AgentConfig)
        OmegaConf.set_struct(config, False)
        whole = OmegaConf.merge(config, self.settings)
        OmegaConf.set_struct(whole, True)
        changed = OmegaConf.merge(whole, OmegaConf.from_dotlist(list(changes)))
        assert isinstance(changed, DictConfig)
        return changed

    def checkpoint_before(self, step: int) -> tuple[Path | None, dict[str, str]]:
        """The newest whole checkpoint that precedes a step, None for the first weights, and what is wrong with newer ones."""
        refused: dict[str, str] = {}
        for number, folder in reversed(folders.named(self.folder)):
            if number >= step:
                continue
            try:
                folders.checked(folder, family_of(self.folder), number)
            except (Damaged, OSError) as error:
                refused[folder.name] = str(error)
            else:
                return folder, refused
        return None, refused

    def must_hold(self, steps: Sequence[int]) -> None:
        """Raise ConfigError where the turns of one of the steps were not kept."""
        missing = [step for step in steps if not has_step(self.folder, step)]
        if missing:
            raise ConfigError(
                f"{self.folder}/ledger holds no turns of step {', '.join(map(str, missing[:SHOWN]))}, of steps {steps[0]} to "
                f"{steps[-1]} that lead from the nearest checkpoint to step={steps[-1]}; train with controller.keep_ledger=true, "
                "which keeps the ledgers of all steps, or choose a step behind another checkpoint (trainer.save_freq)"
            )

    def metrics(self, step: int) -> dict[str, Any] | None:
        """Numbers logged for a step that a replay computes too, merged from all its lines; None if there are none."""
        found: dict[str, Any] = {}
        for line in map(orjson.loads, whole_lines(self.folder / METRICS)):
            if line["step"] == step:
                found |= line["data"]
        return comparable(found) or None

    def dump(self, step: int) -> Path | None:
        """The dump of a step, where the run wrote it or, if its folder was moved, where it lies now."""
        written = self.settings["trainer"].get("rollout_data_dir")
        places = [Path(written)] if written else []
        found = [place / f"{step}.jsonl" for place in (*places, self.folder / "rollouts")]
        return next((path for path in found if path.is_file()), None)

    def checkpoint(self, step: int) -> Path | None:
        folder = self.folder / f"global_step_{step}"
        return folder if (folder / manifest.MANIFEST).is_file() else None


def comparable(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as ``metrics.jsonl`` holds them, without those of the clock, of requests, of validation and of baselines."""
    plain: dict[str, Any] = orjson.loads(orjson.dumps(dict(metrics), option=orjson.OPT_SERIALIZE_NUMPY))
    return {key: value for key, value in plain.items() if not is_measured(key) and not key.startswith(VALIDATED)}


def is_measured(key: str) -> bool:
    return key.startswith(MEASURED) or key.split("/")[-1] in ("mfu", "worker_seconds") or "memory" in key


def different_metrics(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys([*recorded, *replayed])
    return [
        f"{key}: recorded {recorded.get(key, 'nothing')}, replayed {replayed.get(key, 'nothing')}"
        for key in keys
        if key not in recorded or key not in replayed or recorded[key] != replayed[key]
    ]


def lines_of(dump: Path) -> list[str]:
    """The lines of a dump, whose texts may hold other ends of lines than its own."""
    text = dump.read_text().rstrip("\n")
    return text.split("\n") if text else []


def different_lines(recorded: Path, replayed: Path) -> list[str]:
    """The first column that differs in each turn of two dumps."""
    pairs = [[json.loads(line) for line in lines_of(path)] for path in (recorded, replayed)]
    counts = [f"recorded {len(pairs[0])} turns, replayed {len(pairs[1])}"] if len(pairs[0]) != len(pairs[1]) else []
    return counts + [found for one, other in zip(*pairs, strict=False) for found in different_columns(one, other)]


def different_columns(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    where = f"task {one['task']}, sample {one['sample']}, {one['agent']}, round {one['round']}"
    for key in dict.fromkeys([*one, *other]):
        before, now = (repr(line.get(key)) for line in (one, other))
        if before != now:
            yield f"{where}: {key}: recorded {short(before)}, replayed {short(now)}"
            return


def short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}…"


def different_files(recorded: Path, replayed: Path) -> list[str]:
    """Weights and optimizers, learners and references that differ between two checkpoints."""
    names = [sorted(str(path.relative_to(root)) for path in state_files(root)) for root in (recorded, replayed)]
    missing = [f"{name} is in one of them alone" for name in sorted(set(names[0]) ^ set(names[1]))]
    both = [name for name in names[0] if name in names[1]]
    return missing + [f"{name} differs" for name in both if not same_state(recorded / name, replayed / name)]


def state_files(folder: Path) -> list[Path]:
    """Files of a checkpoint that depend on nothing but its training."""
    own = [path for path in manifest.files_in(folder) if path.suffix in (".pt", ".safetensors")]
    return [path for path in own if path.parent != folder or path.stem == "learner"]


def same_state(one: Path, other: Path) -> bool:
    if one.read_bytes() == other.read_bytes():
        return True
    if one.suffix == ".pt":
        return same(read(one), read(other))
    whole = {"huggingface", "lora_adapter"} & set(one.parts)
    return False if whole else same(load_tree(one), load_tree(other))


def same(one: Any, other: Any) -> bool:
    """True if two nested states hold the same numbers, to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(*(getattr(t, "_local_tensor", t) for t in (one, other)))
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool((one == other) is True or repr(one) == repr(other))
