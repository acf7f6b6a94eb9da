"""Rules about checkpoints: what is saved, and what a run that goes on reads of it."""

from typing import Any

from marl.config.errors import ConfigError
from marl.config.policies import value_at
from marl.utils.registry import did_you_mean

STATES = ("model", "optimizer", "extra")
"""States that a policy or a critic goes on from, in verl's words: weights, optimizer, and schedule with random states."""
WHOLE_MODEL = "hf_model"
CONTENTS = (*STATES, WHOLE_MODEL)
GROUPS = ("actor_rollout_ref.actor.checkpoint", "critic.checkpoint")


def contents_are_known(config: Any) -> None:
    """verl asks whether each of its words is in the list: another word, as a misspelt one, would leave a state out."""
    for key in (f"{group}.{name}" for group in GROUPS for name in ("save_contents", "load_contents")):
        contents = value_at(config, key)
        if isinstance(contents, str) or not hasattr(contents, "__iter__") or hasattr(contents, "keys"):
            raise ConfigError(f"{key}={contents}: expected a list of {', '.join(CONTENTS)}")
        for word in contents:
            if word not in CONTENTS:
                raise ConfigError(
                    f"{key}={contents}: {word} is nothing to save; expected a list of {', '.join(CONTENTS)}."
                    f"{did_you_mean(str(word), CONTENTS)}"
                )


def checkpoints_hold_weights(config: Any) -> None:
    trainer = config.trainer
    if trainer.val_only or not (trainer.save_freq > 0 or trainer.save_final):
        return
    for key in (f"{group}.save_contents" for group in GROUPS):
        contents = value_at(config, key)
        if "model" not in contents and (WHOLE_MODEL not in contents or key.startswith("critic")):
            raise ConfigError(
                f"{key}={contents}: checkpoints would hold no weights; add model, or save none (trainer.save_freq=-1, "
                "trainer.save_final=false)"
            )


RULES = (contents_are_known, checkpoints_hold_weights)
