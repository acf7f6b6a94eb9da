"""Keys that nothing reads: those of verl's trainer, reward loops and other engines, each with what is read instead, and those of a
user's that no other key refers to. Pure."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from marl.config.errors import ConfigError, hint_for, plain
from marl.config.identity import leaves
from marl.config.known_keys import TYPED, known_keys

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REWARD = "use reward.custom_reward_function, a Python function that does what it would"
BY_TOKENS = "micro-batches are sized in tokens: use "
MEGATRON = "the FSDP engine does not read it: remove it"
PROFILING = "nothing starts verl's profilers: remove it"
REPLACED = "remove it: this package has a trainer of its own"

UNREAD: Mapping[str, str] = {
    f"{ACTOR}.grad_clip": f"use {ACTOR}.optim.clip_grad",
    "critic.grad_clip": "use critic.optim.clip_grad",
    f"{ACTOR}.ppo_micro_batch_size*": f"{BY_TOKENS}{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size*": f"{BY_TOKENS}{ROLLOUT}.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size*": f"{BY_TOKENS}actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "critic.ppo_micro_batch_size*": f"{BY_TOKENS}critic.ppo_max_token_len_per_gpu",
    "critic.forward_micro_batch_size*": f"{BY_TOKENS}critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu": "use critic.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.*.rollout_n": f"use {ROLLOUT}.n",
    "critic.rollout_n": f"use {ROLLOUT}.n",
    f"{ACTOR}.use_remove_padding": "use actor_rollout_ref.model.use_remove_padding",
    f"{ACTOR}.use_fused_kernels": "use actor_rollout_ref.model.use_fused_kernels",
    f"{ACTOR}.use_torch_compile": f"use {ACTOR}.fsdp_config.use_torch_compile",
    "actor_rollout_ref.ref.use_torch_compile": "use actor_rollout_ref.ref.fsdp_config.use_torch_compile",
    f"{ACTOR}.qat.*": f"use {ACTOR}.fsdp_config.qat",
    f"{ACTOR}.freeze_vision_tower": "models read text alone: remove it",
    f"{ACTOR}.use_prefix_grouper": "use controller.pack_turns",
    "*.checkpoint.async_save": "use trainer.save_in_background",
    "*.turbo_config.*": MEGATRON,
    "*.profiler.*": PROFILING,
    "global_profiler.*": PROFILING,
    f"{ROLLOUT}.over_sample_rate": "use learner.drop_equal, which plays further tasks in place of those without a difference",
    f"{ROLLOUT}.multi_stage_wake_up": "remove it: servers wake in one stage",
    f"{ROLLOUT}.moe_load_balance_metrics_interval": "remove it: no such metric is written",
    f"{ROLLOUT}.calculate_log_probs": "remove it: servers always return log-probs",
    f"{ROLLOUT}.nnodes": "use trainer.nnodes, or resources.pools.<name>.nodes",
    f"{ROLLOUT}.n_gpus_per_node": "use trainer.n_gpus_per_node, or resources.pools.<name>.gpus",
    f"{ROLLOUT}.multi_turn.enable": "use a runner (runner=multi_turn), or agents.<name>.agent_loop",
    f"{ROLLOUT}.multi_turn.num_repeat_rollouts": f"use {ROLLOUT}.n",
    f"{ROLLOUT}.multi_turn.use_inference_chat_template": "remove it: tokens of the servers are trained as they are",
    f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode": "remove it: nothing is tokenized again for training",
    f"{ROLLOUT}.agent.num_workers": "use controller.num_workers",
    f"{ROLLOUT}.agent.custom_async_server.*": "use policies.<name>.endpoint for a server of your own",
    f"{ROLLOUT}.trace.*": "read trainer.rollout_data_dir, which holds every conversation",
    "*.model.mtp.enable_train": MEGATRON,
    "*.model.mtp.detach_encoder": MEGATRON,
    "*.model.mtp.mtp_loss_scaling_factor": MEGATRON,
    "actor_rollout_ref.hybrid_engine": "use resources.placement, and trainer.val_only",
    "actor_rollout_ref.nccl_timeout": "use resources.timeout_s and resources.process_group_timeout_s",
    "data.tokenizer": "use actor_rollout_ref.model.tokenizer_path",
    "data.reward_fn_key": "rows name their rule in data_source: rename that column, or set data.columns={data_source: …}",
    "data.gen_batch_size": "use data.train_batch_size",
    "data.val_batch_size": "remove it: all validation tasks are played at once",
    "data.validation_shuffle": "remove it: all validation tasks are played at once",
    "data.return_raw_input_ids": "remove it: agents read messages, and rows are tokenized for each",
    "data.return_full_prompt": "remove it: agents read messages, and rows are tokenized for each",
    "data.return_raw_chat": "remove it: agents read messages, and rows are tokenized for each",
    "data.return_multi_modal_inputs": "models read text alone: remove it",
    "data.trust_remote_code": "use actor_rollout_ref.model.trust_remote_code",
    "reward_model.*": REWARD,
    "reward.reward_model.*": REWARD,
    "reward.reward_manager.*": REWARD,
    "reward.num_workers": "use controller.reward_processes",
    "sandbox_fusion.*": REWARD,
    "reward.sandbox_fusion.*": REWARD,
    "algorithm.filter_groups.*": "use learner.drop_equal (learner=dapo)",
    "algorithm.use_pf_ppo": "remove it: PF-PPO is not part of this version",
    "algorithm.pf_ppo.*": "remove it: PF-PPO is not part of this version",
    "distillation.*": "use method=sft on a teacher's episodes (docs/methods.md)",
    "transfer_queue.*": REPLACED,
    "skip.*": "remove it: controller.ledger keeps the turns of an interrupted step",
    "trainer.esi_redundant_time": REPLACED,
    "trainer.checkpoint_callback_class": REPLACED,
    "trainer.default_hdfs_dir": "use trainer.default_local_dir",
    "trainer.del_local_ckpt_after_load": "use trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "use trainer.max_actor_ckpt_to_keep, which counts a step's critics too",
    "trainer.ray_wait_register_center_timeout": "use resources.start_timeout_s",
    "trainer.use_v1": REPLACED,
    "trainer.v1.*": REPLACED,
    "ray_kwargs.timeline_json_file": REPLACED,
    "*.model.lora.rank": "use model.lora_rank",
    "*.model.lora.alpha": "use model.lora_alpha",
    "*.model.lora.adapter_path": "use model.lora_adapter_path",
    "*.model.lora.target_modules": "use model.target_modules",
    "*.model.lora.exclude_modules": "use model.exclude_modules",
    **dict.fromkeys(
        (f"*.model.lora.{key}" for key in ("type", "d*", "lora_?_init_method", "a2a_*", "freeze_*")), MEGATRON
    ),
}
"""Patterns of keys, and what to do instead."""


QUICKSTARTS = ("task", "assets")
"""Keys of our own configurations at the top level."""


def check_keys(config: Any) -> None:
    """Raise ConfigError for keys that have no effect, of a configuration as it was composed."""
    written = plain(config)
    check_top_level(written, known_keys())
    check_unread(written, known_keys())


def check_top_level(config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key of a user's at the top level that no interpolation refers to."""
    text = repr(config)
    for key in config:
        interpolation = rf"\$\{{(?:[^}}]*[:,])?\s*\.*{re.escape(key)}\b"
        if key in known or key in (*TYPED, *QUICKSTARTS) or re.search(interpolation, text):
            continue
        hint = hint_for(key, "", {**known, **{group: {} for group in TYPED}})
        raise ConfigError(
            f"unknown key '{key}' (={config[key]}): it has no effect.{hint} Use that key, refer to yours as ${{{key}}}, or remove it"
        )


def check_unread(config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ConfigError for every key that is not as ``known`` has it, and that nothing reads. Both with their interpolations as they
    are written."""
    defaults = dict(leaves(known))
    found = {key: value for key, value in leaves(config) if key in defaults and value != defaults[key]}
    own = bool(config["data"]["custom_cls"]["path"])  # a data set of the user's may read them
    found = {key: value for key, value in found.items() if not (own and key.startswith("data."))}
    for name, changes in (config.get("policies") or {}).items():
        found |= {f"policies.{name}.{key}": value for key, value in leaves(changes or {})}
    said = [f"{key}={value}: it has no effect; {remedy}" for key, value in found.items() if (remedy := unread(key))]
    if said:
        raise ConfigError("\n".join(said))


def unread(key: str) -> str | None:
    """Remedy for a key that nothing reads; None for one that is read."""
    if key.startswith("policies."):
        key = f"actor_rollout_ref.{key.split('.', 2)[2]}"
    return next((remedy for pattern, remedy in UNREAD.items() if fnmatchcase(key, pattern)), None)
