"""Allowed values of single keys: types, ranges, switches, choices. Pure.

verl's YAML is untyped, so Hydra accepts any value for its keys; a wrong one would fail in a worker after a minute, or
never. The tables hold verl's keys, and ours within verl's groups; our own groups are dataclasses, whose fields declare
their bounds (:mod:`marl.utils.numbers`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from marl.config.errors import ConfigError
from marl.config.known_keys import TYPED
from marl.utils.numbers import POSITIVE, SHARE, TEMPERATURE, TOKENS, TOP_K, TOP_P, Number, count, out_of_bounds
from marl.utils.registry import did_you_mean

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

NUMBERS: dict[str, Number] = {  # a key before those that follow it by an interpolation, so that an error names it
    "trainer.critic_warmup": count(0),
    "trainer.ref_update_freq": count(0),
    "algorithm.kl_ctrl.kl_coef": Number(0),
    "algorithm.kl_ctrl.target_kl": POSITIVE,
    "algorithm.kl_ctrl.horizon": count(1),
    "seed": count(0),
    "data.seed": count(0, null=True),
    "data.train_batch_size": count(1, 2**20),
    "data.max_prompt_length": TOKENS,
    "data.max_response_length": TOKENS,
    "data.val_share": Number(0, 0.9, above=True),
    "data.train_max_samples": count(1, also=-1),
    "data.val_max_samples": count(1, also=-1),
    "data.dataloader_num_workers": count(0, 256),
    "data.filter_overlong_prompts_workers": count(1, 1024, null=True),
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
    f"{ACTOR}.data_loader_seed": count(0, null=True),
    f"{ACTOR}.ulysses_sequence_parallel_size": count(1, 1024),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": count(1, 1024, optional=True),
    f"{ACTOR}.optim.lr": SHARE,
    f"{ACTOR}.optim.weight_decay": Number(0),
    f"{ACTOR}.optim.clip_grad": POSITIVE,
    f"{ACTOR}.optim.lr_warmup_steps": count(0, null=True, also=-1),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": SHARE,
    f"{ACTOR}.optim.min_lr_ratio": Number(0, 1, null=True),
    f"{ACTOR}.optim.num_cycles": POSITIVE,
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
    "critic.optim.num_cycles": POSITIVE,
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
    "ray_kwargs.ray_init.num_cpus": count(1, null=True),
}

SWITCHES = (
    "verbose",
    "data.shuffle",
    "data.filter_overlong_prompts",
    "data.trust_remote_code",
    "trainer.val_before_train",
    "trainer.val_only",
    "trainer.save_final",
    "trainer.save_in_background",
    "critic.enable",
    "algorithm.use_kl_in_reward",
    "algorithm.norm_adv_by_std_in_grpo",
)
"""true or false; null where the default is null."""

WORDS: dict[str, tuple[str, ...]] = {
    f"{ACTOR}.loss_agg_mode": (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ),
    "critic.loss_agg_mode": ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"),
    "critic.strategy": ("fsdp", "fsdp2"),
    "critic.level": ("turn", "token"),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.kl_penalty": ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"),
    f"{ACTOR}.optim.lr_scheduler_type": ("constant", "cosine"),
    "critic.optim.lr_scheduler_type": ("constant", "cosine"),
    "critic.fsdp.model_dtype": ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16"),
    f"{ACTOR}.fsdp_config.model_dtype": ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16"),
    f"{ROLLOUT}.dtype": ("bfloat16", "float16", "float32"),
    f"{ROLLOUT}.mode": ("async",),
    "data.truncation": ("error", "left", "right", "middle"),
}

TEXTS = (
    "data.prompt_key",
    "trainer.keep_best_metric",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.device",
    "actor_rollout_ref.model.path",
    "critic.model.path",
)
"""Words that cannot be left empty."""

TEXTS_OR_NULL = (
    "actor_rollout_ref.model.tokenizer_path",
    "critic.model.tokenizer_path",
    "actor_rollout_ref.model.custom_chat_template",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.resume_from_path",
    "reward.custom_reward_function.path",
)

GROUPS = (
    "runner",
    "learner",
    "credit",
    "method",
    "agents",
    "policies",
    "resources",
    "controller",
    "ray_kwargs.ray_init",
    "reward.custom_reward_function",
    "reward.reward_manager",
    "data.apply_chat_template_kwargs",
    "data.custom_cls",
    "actor_rollout_ref.actor.policy_loss",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.ref.model",
    "actor_rollout_ref.rollout.agent",
    "actor_rollout_ref.rollout.disaggregation",
    "actor_rollout_ref.rollout.multi_turn",
    "algorithm.rollout_correction",
)
"""Keys that hold further keys, beside those that the tables above go through."""

GROUPS_OR_NULL = ("custom_reward_function", "ray_kwargs.ray_init.runtime_env")
"""Further ones, which null leaves out."""


def check_values(config: Any) -> None:
    """Raise ConfigError for the first key that holds what it cannot."""
    for key in GROUPS:
        must_be_a_group(key, look_up(config, key, ()))
    for key in GROUPS_OR_NULL:
        if (value := look_up(config, key, ())) is not None:
            must_be_a_group(key, value)
    for key in NUMBERS:
        check_number(config, key)
    for key in SWITCHES:
        value = look_up(config, key, ())
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{key}={value}: expected true or false")
    for key, words in WORDS.items():
        value = look_up(config, key, ())
        if value is not ABSENT and value not in words:
            raise ConfigError(f"{key}={value}: expected one of {', '.join(words)}.{did_you_mean(str(value), words)}")
    check_texts(config)
    for message in (message for group in TYPED for message in out_of_bounds(config.get(group), group)):
        raise ConfigError(message)


def check_number(config: Any, key: str) -> None:
    number = NUMBERS[key]
    value = look_up(config, key, (number,))
    if value is not ABSENT and not number.takes(value):
        raise ConfigError(f"{key}={value}: {number}")


def check_texts(config: Any) -> None:
    for key in TEXTS:
        value = look_up(config, key, ())
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{key}={value}: expected text; set it, as in {key}=…")
    for key in TEXTS_OR_NULL:
        value = look_up(config, key, ())
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{key}={value}: expected text, or null")


ABSENT = object()


def look_up(config: Any, key: str, rules: Sequence[Number]) -> Any:
    """The value of a dotted key; ABSENT for one that is there in some configurations only."""
    node = config
    for walked, name in path(key):
        if walked:
            must_be_a_group(walked, node)
        if name not in node:
            if any(number.optional for number in rules) or key in WORDS:
                return ABSENT
            raise ConfigError(f"{f'{walked}.' if walked else ''}{name} is missing: expected as in `--cfg job`; set it")
        node = node[name]
    return node


def path(key: str) -> Iterator[tuple[str, str]]:
    """Every part of a dotted key, with what stands before it."""
    parts = key.split(".")
    for index, name in enumerate(parts):
        yield ".".join(parts[:index]), name


def must_be_a_group(key: str, value: Any) -> None:
    if not hasattr(value, "keys"):
        raise ConfigError(f"{key}={value}: expected a group of keys, as in {key}.<key>=<value>")
