"""Checks and resolves a configuration before anything is started."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf, open_dict

import marl.config.schema  # noqa: F401 - registers our groups
from marl.config.copies import copied
from marl.config.endpoints import access_keys
from marl.config.errors import ConfigError, resolve
from marl.config.external import VARIABLE
from marl.config.identity import plain_of
from marl.config.kinds import answers_only
from marl.config.policies import apply_sharing
from marl.config.rules import check
from marl.data.columns import use_columns
from marl.data.rows import check_data_files, check_files, file_list, warn_of_shared
from marl.preflight.compatibility import check_facts, choose_credit
from marl.run_setup import Setup
from marl.utils.secret_masking import hide

logger = logging.getLogger(__name__)
if os.environ.get(VARIABLE) or any(plugin.name != "marl" for plugin in entry_points(group="verl.plugins")):
    import_module("marl.platform.cpu")  # imports verl, which imports them, and they may register options

if TYPE_CHECKING:
    from marl.preflight.checks import CheckedSetup


def prepare(config: DictConfig) -> CheckedSetup:
    """Resolve, make paths absolute (workers have other working directories), and check every rule. Raises ConfigError."""
    given, config = config, copied(config)
    resolve(config)
    use_columns(config)
    apply_sharing(config)
    check(config)
    check_data_files(config)
    hide(access_keys(plain_of(config)))
    choose_credit(config)
    setup = Setup.of(config)
    check_facts(setup)
    with open_dict(config):
        absolutise(config)
    if not setup.method.offline:
        check_tasks(setup)
    # heavy: imported once the rules hold
    from marl.cluster.session import fitting_platform
    from marl.preflight.checks import preflight
    from marl.preflight.plan import divide_gpus
    from marl.rewards.custom import checked_function
    from marl.rewards.rules import check_extractors

    fitting_platform(config.trainer.device)
    checked_function(config)
    check_extractors(config)
    checked = preflight(setup)
    divide_gpus(checked)
    return fitted(checked, given)


def fitted(setup: CheckedSetup, given: DictConfig) -> CheckedSetup:
    """The run with smaller micro-batches where this machine has less memory than it needs and nobody has set their size."""
    actor = given.actor_rollout_ref.actor
    if not OmegaConf.is_interpolation(actor, "ppo_max_token_len_per_gpu"):
        return setup
    from marl.preflight.plan import fitting_tokens

    tokens = fitting_tokens(setup)
    if tokens == actor.ppo_max_token_len_per_gpu:
        return setup
    logger.warning(
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=%d: the default, %d, needs more memory than this machine has; set the "
        "key to choose the size of a micro-batch yourself", tokens, actor.ppo_max_token_len_per_gpu,
    )  # fmt: skip
    smaller = copied(given)
    smaller.critic.ppo_max_token_len_per_gpu = (
        setup.config.critic.ppo_max_token_len_per_gpu
    )  # which has to hold a conversation
    smaller.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = tokens
    return prepare(smaller)


def check_tasks(setup: Setup) -> None:
    """Raise ConfigError for rows that are no tasks, and for too few of them; name those to validate that are trained."""
    config = setup.config
    keys = ("val_files",) if answers_only(config) else ("train_files", "val_files")
    questions = {key: check_files(config.data[key], config.data.prompt_key, list(config.agents)) for key in keys}
    if "train_files" not in questions:
        return
    train, val = questions["train_files"], questions["val_files"]
    if len(train) < config.data.train_batch_size or not val:
        raise ConfigError(
            f"data.train_batch_size={config.data.train_batch_size}: data.train_files hold {len(train)} rows and "
            f"data.val_files {len(val)}; expected at least one batch and one row, use a smaller batch or more data"
        )
    if not setup.runner.scores_turns:  # whose payoffs are the task, not what the rows ask
        warn_of_shared(train, val)


def absolutise(config: DictConfig) -> None:
    def absolute(path: str) -> str:
        expanded = Path(path).expanduser()
        return str(expanded.resolve()) if expanded.exists() else path

    settings = [config.actor_rollout_ref, *filter(None, config.policies.values())]
    holders = [config.critic, *settings, *(own.ref for own in settings if "ref" in own)]
    for model in (holder.model for holder in holders if "model" in holder):
        for key in ("path", "tokenizer_path", "lora_adapter_path"):
            if isinstance(model.get(key), str):
                model[key] = absolute(model[key])
    if config.reward.custom_reward_function.path:
        config.reward.custom_reward_function.path = absolute(config.reward.custom_reward_function.path)
    for key in ("train_files", "val_files"):
        config.data[key] = [absolute(file) for file in file_list(config.data[key])]
    if "files" in config.method:
        config.method.files = [absolute(file) for file in config.method.files]
    for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir", "resume_from_path"):
        if config.trainer[key]:
            config.trainer[key] = str(Path(config.trainer[key]).expanduser().resolve())
