"""Keys that nothing reads: a typo that ``+`` or a YAML file adds to an untyped group, keys of verl's trainer, reward loops and other
engines, each with what is read instead, and those of a user's that no other key refers to. Pure."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from marl.config.errors import MOVED, ConfigError, hint_for, listing, plain
from marl.config.identity import leaves
from marl.utils.registry import did_you_mean

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""In C where it is built: OmegaConf's takes .3 s for verl's file."""
TYPED = ("agents", "resources", "controller", "judge", "runner", "learner", "credit", "method", "ensemble", "policies")
"""Groups that are typed, or have a rule of their own."""

READ: Mapping[str, tuple[str, ...]] = {
    "data": ("cache_dir", "chat_template_func", "need_tools_kwargs", "filter_prompts", "sampler", "datagen"),
    "reward.custom_reward_function": ("reward_kwargs",),
    "custom_reward_function": ("reward_kwargs",),
}
"""Keys that are read where they are given, and that no default names."""

OPEN = (
    "ray_kwargs.ray_init",
    "actor_rollout_ref.rollout.engine_kwargs",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy",
    "critic.fsdp.wrap_policy",
    "global_profiler.global_tool_config",
)
"""Groups whose keys are another library's arguments. So are those that are empty or null by default."""


@cache
def known_keys() -> Mapping[str, Any]:
    """verl's configuration with its defaults, and ours over it, without what is typed. verl is found and not imported."""
    verl = find_spec("verl")
    assert verl is not None and verl.origin is not None
    theirs = Path(verl.origin).parent.joinpath("trainer/config/_generated_ppo_trainer.yaml").read_text()
    ours = files("marl.configs").joinpath("marl.yaml").read_text()
    trees = (yaml.load(text, Loader=LOADER) for text in (theirs, ours))
    return plain(OmegaConf.merge(*trees, {"model_engine": None}))


def check_typed(config: Any) -> None:
    """Raise ConfigError for the first key of a typed group that its dataclass does not have."""
    for group in TYPED:
        if group in config:
            check_fields(config[group], group)


def check_fields(node: Any, key: str) -> None:
    if not OmegaConf.is_dict(node):
        return
    kind = OmegaConf.get_type(node)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(node)
    for name in node:
        if name not in names:
            moved = MOVED.get(f"{key}.{name}")
            hint = f" It is {moved!r} now." if moved else f"{did_you_mean(str(name), names)}{listing(names)}"
            raise ConfigError(
                f"unknown key '{key}.{name}' (={node[name]}): it has no effect.{hint} Use one of them, or remove it"
            )
        check_fields(node[name], f"{key}.{name}")


FieldsOf = Callable[[str], Collection[str]]
"""The fields of the dataclass that a ``_target_`` names."""


def check_known(config: Mapping[str, Any], known: Mapping[str, Any], fields_of: FieldsOf) -> None:
    """Raise ConfigError for the first key of a plain configuration that is not ``known``, with the nearest that is."""
    for key, nodes in groups(config, known):
        if key == "data" and reads_own_data(config):
            continue
        node, default = nodes
        allowed = {*default, *READ.get(key, ()), *(fields_of(default["_target_"]) if "_target_" in default else ())}
        for name in node:
            if name not in allowed:
                hint = hint_for(name, key, known) or did_you_mean(name, allowed)
                raise ConfigError(
                    f"unknown key '{key}.{name}' (={node[name]}): it has no effect.{hint} Use a key of '{key}' as --cfg job "
                    "shows them, or remove it; your own keys belong at the top level of the configuration"
                )


def reads_own_data(config: Mapping[str, Any]) -> bool:
    """True if a data set of the user's may read keys of its own."""
    custom = config["data"].get("custom_cls") if isinstance(config["data"], Mapping) else None
    return isinstance(custom, Mapping) and bool(custom.get("path"))


def groups(
    config: Mapping[str, Any], known: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, tuple[Mapping[str, Any], Mapping[str, Any]]]]:
    """Every group whose keys are known, by its dotted name: as it is, and as it is by default."""
    for name, node in config.items():
        key, default = f"{prefix}{name}", known.get(name)
        if key in OPEN or not isinstance(node, Mapping) or not isinstance(default, Mapping) or not default:
            continue
        yield key, (node, default)
        yield from groups(node, default, f"{key}.")


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
REWARD = "reward.custom_reward_function, a Python function that does what it would"
UNREAD: Mapping[str, str] = {
    f"{ACTOR}.grad_clip": f"{ACTOR}.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    f"{ACTOR}.ppo_micro_batch_size*": f"{ACTOR}.ppo_max_token_len_per_gpu, in tokens",
    f"{ROLLOUT}.log_prob_micro_batch_size*": f"{ROLLOUT}.log_prob_max_token_len_per_gpu, in tokens",
    "actor_rollout_ref.ref.log_prob_micro_batch_size*": "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu, in tokens",
    **dict.fromkeys(
        ("critic.ppo_micro_batch_size*", "critic.forward_micro_batch_size*", "critic.forward_max_token_len_per_gpu"),
        "critic.ppo_max_token_len_per_gpu, in tokens",
    ),
    "actor_rollout_ref.*.rollout_n": f"{ROLLOUT}.n",
    "critic.rollout_n": f"{ROLLOUT}.n",
    f"{ROLLOUT}.multi_turn.num_repeat_rollouts": f"{ROLLOUT}.n",
    f"{ACTOR}.use_remove_padding": f"{MODEL}.use_remove_padding",
    f"{ACTOR}.use_fused_kernels": f"{MODEL}.use_fused_kernels",
    f"{ACTOR}.use_torch_compile": f"{ACTOR}.fsdp_config.use_torch_compile",
    "actor_rollout_ref.ref.use_torch_compile": "actor_rollout_ref.ref.fsdp_config.use_torch_compile",
    f"{ACTOR}.qat.*": f"{ACTOR}.fsdp_config.qat",
    f"{ACTOR}.use_prefix_grouper": "controller.pack_turns",
    "*.checkpoint.async_save": "trainer.save_in_background",
    f"{ROLLOUT}.over_sample_rate": "learner.drop_equal, which plays further tasks in place of those without a difference",
    f"{ROLLOUT}.nnodes": "trainer.nnodes, or resources.pools.<name>.nodes",
    f"{ROLLOUT}.n_gpus_per_node": "trainer.n_gpus_per_node, or resources.pools.<name>.gpus",
    f"{ROLLOUT}.multi_turn.enable": "a runner (runner=multi_turn), or agents.<name>.agent_loop",
    f"{ROLLOUT}.agent.default_agent_loop": "agents.<name>.agent_loop: every agent says what makes its turns",
    f"{ROLLOUT}.agent.num_workers": "controller.num_workers",
    f"{ROLLOUT}.agent.custom_async_server.*": "policies.<name>.endpoint for a server of your own",
    f"{ROLLOUT}.trace.*": "trainer.rollout_data_dir, which holds every conversation",
    "actor_rollout_ref.hybrid_engine": "resources.placement, and trainer.val_only",
    "actor_rollout_ref.nccl_timeout": "resources.timeout_s and resources.process_group_timeout_s",
    "data.tokenizer": f"{MODEL}.tokenizer_path",
    "data.reward_fn_key": "data.columns={data_source: …}, or rename the column: rows name their rule in data_source",
    "data.gen_batch_size": "data.train_batch_size",
    "data.trust_remote_code": f"{MODEL}.trust_remote_code",
    **dict.fromkeys(("reward_model.*", "reward.reward_model.*", "reward.reward_manager.*"), REWARD),
    **dict.fromkeys(("sandbox_fusion.*", "reward.sandbox_fusion.*"), REWARD),
    "reward.num_workers": "judge.processes",
    "algorithm.filter_groups.*": "learner.drop_equal (learner=dapo)",
    "distillation.*": "method=sft on a teacher's episodes (docs/methods.md)",
    "trainer.default_hdfs_dir": "trainer.default_local_dir",
    "trainer.del_local_ckpt_after_load": "trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep, which counts a step's critics too",
    "trainer.ray_wait_register_center_timeout": "resources.start_timeout_s",
    "*.model.lora.rank": "model.lora_rank",
    "*.model.lora.alpha": "model.lora_alpha",
    "*.model.lora.adapter_path": "model.lora_adapter_path",
    "*.model.lora.target_modules": "model.target_modules",
    "*.model.lora.exclude_modules": "model.exclude_modules",
}
"""Patterns of keys, and what is read instead."""
IDLE = (
    f"{ACTOR}.freeze_vision_tower", "*.turbo_config.*", "*.profiler.*", "global_profiler.*", f"{ROLLOUT}.multi_stage_wake_up",
    f"{ROLLOUT}.moe_load_balance_metrics_interval", f"{ROLLOUT}.calculate_log_probs", f"{ROLLOUT}.disaggregation.*",
    f"{ROLLOUT}.multi_turn.use_inference_chat_template", f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode",
    "*.model.mtp.enable_train", "*.model.mtp.detach_encoder", "*.model.mtp.mtp_loss_scaling_factor", "data.val_batch_size",
    "data.validation_shuffle", "data.return_raw_input_ids", "data.return_full_prompt", "data.return_raw_chat",
    "data.return_multi_modal_inputs", "algorithm.use_pf_ppo", "algorithm.pf_ppo.*", "transfer_queue.*", "skip.*",
    "trainer.esi_redundant_time", "trainer.checkpoint_callback_class", "trainer.use_v1", "trainer.v1.*",
    "ray_kwargs.timeline_json_file", "*.model.lora.type", "*.model.lora.d*", "*.model.lora.lora_?_init_method",
    "*.model.lora.a2a_*", "*.model.lora.freeze_*",
)  # fmt: skip
"""Patterns of keys that nothing reads, and nothing stands for."""
QUICKSTARTS = ("task", "assets")
"""Keys of our own configurations at the top level."""


def check_keys(config: Any) -> None:
    """Raise ConfigError for keys that have no effect, of a configuration as it was composed: interpolations are as they are written."""
    written = plain(config)
    check_top_level(written, known_keys())
    check_unread(written, known_keys())


def check_top_level(config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key of a user's that no interpolation refers to."""
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
    """Raise ConfigError for every key that is not as ``known`` has it, and that nothing reads."""
    defaults = dict(leaves(known))
    found = {key: value for key, value in leaves(config) if key in defaults and value != defaults[key]}
    own = reads_own_data(config)
    found = {key: value for key, value in found.items() if not (own and key.startswith("data."))}
    for name, changes in (config.get("policies") or {}).items():
        found |= {
            f"policies.{name}.{key}": value for key, value in leaves(changes if isinstance(changes, Mapping) else {})
        }
    said = [f"{key}={value}: it has no effect; {remedy}" for key, value in found.items() if (remedy := unread(key))]
    if said:
        raise ConfigError("\n".join(said))


def unread(key: str) -> str | None:
    """Remedy for a key that nothing reads; None for one that is read."""
    if key.startswith("policies."):
        key = f"actor_rollout_ref.{key.split('.', 2)[2]}"
    found = next((f"use {instead}" for pattern, instead in UNREAD.items() if fnmatchcase(key, pattern)), None)
    return found or ("remove it" if any(fnmatchcase(key, pattern) for pattern in IDLE) else None)
