"""The trained agents that a command names: a run, one of its checkpoints, or a plain model folder."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marl.config.errors import ConfigError
from marl.modules.pretrained import WEIGHTS
from marl.preflight.run_folder import family_of, read_identity
from marl.report.runs import RUN, is_running, must_be_plain
from marl.utils import folders
from marl.utils.manifest import Damaged
from marl.utils.registry import did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Agents to evaluate or to serve."""

    path: Path
    """A checkpoint ``…/global_step_N``, or a model's folder."""
    step: int | None
    """The checkpoint's step; None for a model's folder."""
    saved: Any = None
    """The run's resolved configuration, as ``run.json`` has it; None for a model's folder."""
    untrained: bool = False
    """The team of a configuration that the user named, with the weights that its training would begin with."""
    modules: Any = None
    """Modules of the user's that the run imported, and their folders, as ``run.json`` has them."""

    @property
    def name(self) -> str:
        """A short name for tables: the run and the step, or the model."""
        if self.untrained:
            return "untrained"
        return self.path.name if self.step is None else f"{self.path.parent.name}@{self.step}"

    @property
    def results(self) -> Path:
        """Folder that evaluations are written to."""
        return (Path("outputs") if self.step is None else self.path.parent) / "evaluations"


def find(word: str) -> Source:
    """Raises ConfigError for what is neither a run, nor a checkpoint, nor a model."""
    path = Path(word).expanduser().resolve()
    if folders.STEP.fullmatch(path.name):
        return of_checkpoint(path, word)
    if not path.is_dir():
        raise ConfigError(f"{word}: no such folder;{nearest(path)} expected a run, …/global_step_N of one, or a model")
    if (path / RUN).is_file() or folders.named(path):
        return of_run(path, word)
    if not (path / "config.json").is_file():
        inside = [entry.name for entry in sorted(path.iterdir()) if (entry / RUN).is_file()]
        hint = f" It holds runs: {', '.join(inside[:5])}; name one of them." if inside else ""
        raise ConfigError(
            f"{word}: it holds neither {RUN} nor config.json; expected a run's folder, …/global_step_N of one, or a model's folder.{hint}"
        )
    if not has_weights(path):
        raise ConfigError(f"{word}: there are no weights beside its config.json; expected one of {', '.join(WEIGHTS)}")
    return Source(path, None)


def nearest(path: Path) -> str:
    """A hint at a folder beside it with a similar name."""
    parent = path.parent
    return did_you_mean(path.name, [entry.name for entry in parent.iterdir()]) if parent.is_dir() else ""


def of_checkpoint(path: Path, word: str) -> Source:
    """Raises ConfigError for one that is not there, with the nearest that is, and for one that is damaged."""
    if not path.is_dir():
        steps = [step for step, _ in folders.numbered(path.parent)] if path.parent.is_dir() else []
        wanted = int(re.sub(r"\D", "", path.name))
        near = min(steps, key=lambda step: abs(step - wanted), default=None)
        hint = "" if near is None else f" Did you mean global_step_{near}? There are: {', '.join(map(str, steps))}."
        raise ConfigError(f"{word}: no such checkpoint.{hint} Expected …/global_step_N of a run")
    must_be_plain(path.parent)
    try:
        facts = folders.checked(path, family=None)
    except (Damaged, OSError) as error:
        raise ConfigError(
            f"{word}: the checkpoint is not whole: {error}; expected one as it was saved, name another one"
        ) from None
    return source_at(path, int(facts["step"]))


def of_run(path: Path, word: str) -> Source:
    """The newest whole checkpoint of a run, which may still be training."""
    must_be_plain(path)
    writing = is_running(path)
    found, refused = folders.newest_valid(path, family_of(path))
    for name, why in refused.items():
        logger.warning("%s is not used: %s", path / name, why)
    if found is None:
        why = "the run is still being written: wait for its first checkpoint (trainer.save_freq), and ask again"
        done = "the run saved none: train with trainer.save_freq=N or trainer.save_final=true"
        damaged = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ConfigError(f"{word}: there is no whole checkpoint. {damaged or (why if writing else done)}")
    if writing:
        logger.warning("%s is still being written: its newest whole checkpoint, %s, is used", path, found.name)
    return source_at(found, int(folders.STEP.fullmatch(found.name)[1]))  # type: ignore[index]


def has_weights(folder: Path) -> bool:
    return any(file for pattern in WEIGHTS for file in folder.glob(pattern))


def source_at(checkpoint: Path, step: int) -> Source:
    identity = read_identity(checkpoint)
    if identity is None or "config" not in identity:
        raise ConfigError(
            f"{checkpoint}: no {RUN} in it or beside it; expected the one that the run left, copy it there from the run's folder"
        )
    agents = {name: identity["config"]["agents"][name] for name in identity["agents_in_order"]}
    return Source(checkpoint, step, identity["config"] | {"agents": agents}, modules=identity.get("modules"))


def reads_examples(source: Source) -> bool:
    """True for a run whose files hold examples, not tasks."""
    return (source.saved.get("method") or {}).get("source", "play") != "play"


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's state. Raises ConfigError for a folder that is not a checkpoint."""
    try:
        return folders.read_state(checkpoint)
    except FileNotFoundError as error:
        raise ConfigError(f"{checkpoint}: {error}; expected …/global_step_N") from None


def saved_weights(checkpoint: Path, policy: str) -> Path:
    """Folder of a policy's model in Hugging Face format within a checkpoint. Raises ConfigError if it is missing."""
    policies = saved_state(checkpoint)["policies"]
    if policy not in policies:
        raise ConfigError(
            f"{checkpoint}: it holds the policies {', '.join(policies)}, and an agent acts with {policy!r}; expected the agents that "
            "were trained, set agents.<name>.policy to one of these"
        )
    weights = checkpoint / policy / "actor" / "huggingface"
    if not has_weights(weights):
        raise ConfigError(
            f"{checkpoint}: {weights} holds no weights; expected a checkpoint that was saved with hf_model in "
            "actor_rollout_ref.actor.checkpoint.save_contents; train with it, or convert by verl.model_merger"
        )
    return weights
