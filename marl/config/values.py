"""Allowed values of single keys. Pure.

verl's YAML is untyped, so Hydra accepts any value for its keys; a wrong one would fail in a worker after a minute, or
never. Every value must be of its default's type, and numbers and words of the tables below within their bounds. Our own groups are
dataclasses, whose fields declare their bounds (:mod:`marl.utils.numbers`).
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from marl.config.errors import ConfigError
from marl.config.keys import TYPED, known_keys
from marl.utils.near import did_you_mean
from marl.utils.numbers import POSITIVE, SHARE, TEMPERATURE, TOKENS, TOP_K, TOP_P, Number, count, out_of_bounds

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

NUMBERS: dict[str, Number] = {  # a key before those that follow it by an interpolation, so that an error names it
    "trainer.critic_warmup": count(0),
    "trainer.ref_update_freq": count(0),
    "algorithm.kl_ctrl.kl_coef": Number(0),
    "algorithm.kl_ctrl.target_kl": POSITIVE,
    "seed": count(0),
    "data.seed": count(0, null=True),
    "data.train_batch_size": count(1, 2**20),
    "data.max_prompt_length": TOKENS,
    "data.max_response_length": TOKENS,
    "data.val_share": Number(0, 0.9, above=True),
    "data.train_max_samples": count(1, also=-1),
    "data.val_max_samples": count(1, also=-1),
    f"{ACTOR}.ppo_mini_batch_size": count(1, 2**20),
    f"{ACTOR}.ppo_epochs": count(1, 1000),
    f"{ACTOR}.ppo_max_token_len_per_gpu": count(1, 2**28),
    f"{ACTOR}.clip_ratio": POSITIVE,
    f"{ACTOR}.clip_ratio_low": Number(0, 1),
    f"{ACTOR}.clip_ratio_high": Number(0),
    f"{ACTOR}.clip_ratio_c": Number(1, above=True),
    f"{ACTOR}.entropy_coeff": Number(),
    f"{ACTOR}.kl_loss_coef": Number(0),
    f"{ACTOR}.grad_clip": POSITIVE,
    f"{ACTOR}.ulysses_sequence_parallel_size": count(1, 1024),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": count(1, 1024, optional=True),
    f"{ACTOR}.optim.lr": SHARE,
    f"{ACTOR}.optim.weight_decay": Number(0),
    f"{ACTOR}.optim.clip_grad": POSITIVE,
    f"{ACTOR}.optim.lr_warmup_steps": count(0, null=True, also=-1),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": SHARE,
    f"{ACTOR}.optim.min_lr_ratio": Number(0, 1, null=True),
    f"{ACTOR}.fsdp_config.fsdp_size": count(1, also=-1, optional=True),
    f"{ROLLOUT}.n": count(1, 2**16),
    f"{ROLLOUT}.temperature": TEMPERATURE,
    f"{ROLLOUT}.top_p": TOP_P,
    f"{ROLLOUT}.top_k": TOP_K,
    f"{ROLLOUT}.prompt_length": TOKENS,
    f"{ROLLOUT}.response_length": TOKENS,
    f"{ROLLOUT}.gpu_memory_utilization": Number(0, 1, above=True),
    f"{ROLLOUT}.tensor_model_parallel_size": count(1, 1024),
    f"{ROLLOUT}.data_parallel_size": count(1, 1024),
    f"{ROLLOUT}.pipeline_model_parallel_size": count(1, 1024),
    f"{ROLLOUT}.expert_parallel_size": count(1, 1024),
    f"{ROLLOUT}.max_num_seqs": count(1, 2**20),
    f"{ROLLOUT}.max_num_batched_tokens": count(1, 2**28),
    f"{ROLLOUT}.max_model_len": count(1, 2**26, null=True),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": count(1, 2**28),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": count(1, 2**28),
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": count(1, 2**20),
    f"{ROLLOUT}.val_kwargs.n": count(1, 2**16),
    f"{ROLLOUT}.val_kwargs.temperature": TEMPERATURE,
    f"{ROLLOUT}.val_kwargs.top_p": TOP_P,
    f"{ROLLOUT}.val_kwargs.top_k": TOP_K,
    f"{MODEL}.lora_rank": count(0, 2**16),
    f"{MODEL}.lora_alpha": POSITIVE,
    "critic.optim.lr": SHARE,
    "critic.optim.weight_decay": Number(0),
    "critic.optim.clip_grad": POSITIVE,
    "critic.optim.lr_warmup_steps": count(0, null=True, also=-1),
    "critic.optim.lr_warmup_steps_ratio": SHARE,
    "critic.optim.min_lr_ratio": Number(0, 1, null=True),
    "critic.fsdp.ulysses_sequence_parallel_size": count(1, 1024),
    "critic.cliprange_value": POSITIVE,
    "critic.ppo_epochs": count(1, 10**4),
    "critic.ppo_mini_batch_size": count(1, 2**20),
    "critic.ppo_max_token_len_per_gpu": TOKENS,
    "trainer.nnodes": count(1, 4096),
    "trainer.n_gpus_per_node": count(1, 128),
    "trainer.total_epochs": count(1),
    "trainer.total_training_steps": count(0, null=True),
    "trainer.save_freq": count(0, also=-1),
    "trainer.test_freq": count(0, also=-1),
    "trainer.log_val_generations": count(0),
    "trainer.max_actor_ckpt_to_keep": count(1, null=True),
    "trainer.keep_best": count(0),
    "algorithm.gamma": SHARE,
    "algorithm.lam": SHARE,
}

DTYPES = ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16")
LOSS_SUMS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
WORDS: dict[str, tuple[str | None, ...]] = {
    "sharing": ("individual", "shared", "groups", "lora", None),
    "precision": ("fp32", "bf16", None),
    "determinism": ("strict", None),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    f"{ACTOR}.loss_agg_mode": (*LOSS_SUMS, "seq-mean-token-sum-norm"),
    "critic.loss_agg_mode": LOSS_SUMS,
    "critic.strategy": ("fsdp", "fsdp2"),
    "critic.level": ("turn", "token"),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.kl_penalty": ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"),
    "algorithm.rollout_correction.rollout_is": ("token", "sequence", None),
    f"{ACTOR}.optim.lr_scheduler_type": ("constant", "cosine"),
    "critic.optim.lr_scheduler_type": ("constant", "cosine"),
    "critic.fsdp.model_dtype": DTYPES,
    f"{ACTOR}.fsdp_config.model_dtype": DTYPES,
    f"{ROLLOUT}.dtype": ("bfloat16", "float16", "float32"),
    f"{ROLLOUT}.mode": ("async",),
    f"{ROLLOUT}.checkpoint_engine.backend": ("naive",),
    "data.truncation": ("error", "left", "right", "middle"),
}
TEXTS = (
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    f"{MODEL}.path",
    "critic.model.path",
)
"""Texts that cannot be left empty, and have an interpolation or another package's words as their default."""
TEXTS_OR_NULL = (
    f"{MODEL}.tokenizer_path",
    f"{MODEL}.custom_chat_template",
    "critic.model.tokenizer_path",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.resume_from_path",
    "reward.custom_reward_function.path",
    "custom_reward_function.path",
)
OTHERWISE_CHECKED = ("data.train_files", "data.val_files", "baseline")
"""Keys that take a text or a list; what reads them says so."""
OLDER = "custom_reward_function"
"""verl's older key of a group, which may be null."""


def check_values(config: Any) -> None:
    """Raise ConfigError for the first key that holds what it cannot."""
    check_types(config, known_keys())
    for group in TYPED:
        if group in config:
            must_be_a_group(group, config[group])
        for message in out_of_bounds(config.get(group), group):
            raise ConfigError(message)
    for key in NUMBERS:
        check_number(config, key)
    for key, words in WORDS.items():
        value = OmegaConf.select(config, key, default=words[0])
        if value not in words:
            expected = ", ".join("null" if word is None else word for word in words)
            near = did_you_mean(str(value), [word for word in words if word])
            raise ConfigError(f"{key}={value}: expected one of {expected}.{near}")
    for key in (*TEXTS, *TEXTS_OR_NULL):
        value = OmegaConf.select(config, key)
        if not (isinstance(value, str) and value.strip()) and not (value is None and key in TEXTS_OR_NULL):
            raise ConfigError(f"{key}={value}: expected text; set it, as in {key}=…")


def check_number(config: Any, key: str) -> None:
    number = NUMBERS[key]
    value = OmegaConf.select(config, key, default=...)
    if value is not ... and not number.takes(value):
        raise ConfigError(f"{key}={value}: {number}")


def check_types(node: Any, defaults: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ConfigError for the first value that is not of the type of its default."""
    for name, default in defaults.items():
        key = f"{prefix}{name}"
        if (
            name not in node
            or OmegaConf.is_missing(node, name)
            or key in OTHERWISE_CHECKED
            or key in NUMBERS
            or key in WORDS
        ):
            continue
        value = node[name]
        if isinstance(default, Mapping):
            if value is None and key == OLDER:
                continue
            must_be_a_group(key, value)
            check_types(value, default, f"{key}.")
        elif isinstance(default, str) and "_target_" in defaults:
            continue  # a dataclass of verl's knows more, such as that a list may stand there
        elif expected := wrong_type(default, value):
            raise ConfigError(f"{key}={value}: expected {expected}")


def wrong_type(default: Any, value: Any) -> str | None:
    """The type that was expected in place of a value's; None for one of its default's type. A number may be null: bounds and verl's dataclasses
    know whether it may."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if number or value is None else "a number"
    if isinstance(default, str) and not default.startswith("${"):
        return None if isinstance(value, str) and (value.strip() or not default) else "text"
    if isinstance(default, list):
        listed = hasattr(value, "__iter__") and not isinstance(value, str) and not hasattr(value, "keys")
        return None if listed else "a list, as in [a,b]"
    return None


def must_be_a_group(key: str, value: Any) -> None:
    if not hasattr(value, "keys"):
        raise ConfigError(f"{key}={value}: expected a group of keys, as in {key}.<key>=<value>")
