"""Rules about the run as a whole: penalties, resuming, baselines, trackers."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from marl.config.errors import ConfigError
from marl.config.schema import ControllerConfig
from marl.utils.registry import did_you_mean


def overlong_penalties_have_a_buffer_and_a_price(config: Any) -> None:
    buffer, price = config.controller.overlong_buffer, config.controller.overlong_penalty
    if buffer and not price:
        raise ConfigError(
            f"controller.overlong_penalty={price:g}: controller.overlong_buffer={buffer} would cost nothing; set it above 0, or "
            "controller.overlong_buffer=0"
        )
    if not buffer and price != ControllerConfig.overlong_penalty:
        raise ConfigError(
            f"controller.overlong_penalty={price:g}: with controller.overlong_buffer=0 it has no effect; set "
            "controller.overlong_buffer to the number of tokens before the limit in which length costs, or leave it out"
        )


def resuming_has_a_path(config: Any) -> None:
    modes = ("auto", "disable", "resume_path")
    if config.trainer.resume_mode not in modes:
        raise ConfigError(
            f"trainer.resume_mode={config.trainer.resume_mode}; expected one of {', '.join(modes)}."
            f"{did_you_mean(str(config.trainer.resume_mode), modes)}"
        )
    path = Path(str(config.trainer.resume_from_path)).expanduser()
    if config.trainer.resume_mode == "resume_path" and not path.is_dir():
        raise ConfigError(
            f"trainer.resume_from_path={config.trainer.resume_from_path}: no such folder; expected …/global_step_N"
        )


def resume_changes_are_keys(config: Any) -> None:
    changes = config.trainer.resume_changes
    if isinstance(changes, str) or not hasattr(changes, "__iter__") or not all(isinstance(key, str) for key in changes):
        raise ConfigError(
            f"trainer.resume_changes={changes}: expected a list of keys, as in trainer.resume_changes=[learner.lam]"
        )
    known = [*config, "versions", "agents"]
    for key in changes:
        if key.split(".")[0] not in known:
            raise ConfigError(
                f"trainer.resume_changes={list(changes)}: unknown key {key!r}; expected keys of the configuration, groups of "
                f"them, or versions.<package>.{did_you_mean(key.split('.')[0], known)}"
            )


BASELINES = ("solo", "vote", "untrained")


def baselines_are_known(config: Any) -> None:
    names = [config.baseline] if isinstance(config.baseline, str) else config.baseline
    if not hasattr(names, "__iter__"):
        raise ConfigError(f"baseline={names}: expected a list of {', '.join(BASELINES)}; [] for none")
    for name in names:
        if name not in BASELINES:
            raise ConfigError(
                f"baseline={name}: no such baseline; known: {', '.join(BASELINES)}.{did_you_mean(str(name), BASELINES)}"
            )


def trackers_are_listed(config: Any) -> None:
    loggers = config.trainer.logger
    if isinstance(loggers, str) or not hasattr(loggers, "__iter__"):
        raise ConfigError(f"trainer.logger={loggers}: expected a list of trackers, as in trainer.logger=[{loggers}]")
    for name in loggers:
        if name not in TRACKERS:
            raise ConfigError(
                f"trainer.logger={list(loggers)}: unknown {name!r}; expected {', '.join(TRACKERS)}."
                f"{did_you_mean(str(name), TRACKERS)}"
            )
        found = find_spec(TRACKERS[name] or "marl")
        if found is None or found.origin is None:  # a folder of this name, as offline runs of W&B leave one
            raise ConfigError(
                f"trainer.logger={list(loggers)}: {name} is not installed; expected the package {TRACKERS[name]}: install it, or "
                "leave this tracker out"
            )


TRACKERS = {"console": None, "file": None, "vemlp_wandb": "volcengine_ml_platform"} | {
    name: name for name in ("tensorboard", "wandb", "mlflow", "swanlab", "clearml", "trackio")
}
"""verl's trackers, and the packages that they need."""


RULES = (
    overlong_penalties_have_a_buffer_and_a_price,
    resuming_has_a_path,
    resume_changes_are_keys,
    baselines_are_known,
    trackers_are_listed,
)
