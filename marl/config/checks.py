"""Rules that hold between keys, checked before anything starts. One function a rule; each names the remedy.

A rule takes the resolved configuration and raises ConfigError. It imports neither torch nor ray.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from marl.config.data import file_list
from marl.config.errors import ConfigError
from marl.config.policies import changes_of, policy_by_agent
from marl.utils.registry import did_you_mean

RULES: list[Callable[[Any], None]] = []


def rule(function: Callable[[Any], None]) -> Callable[[Any], None]:
    RULES.append(function)
    return function


def check(config: Any) -> None:
    """Raise ConfigError for the first rule that does not hold, for the whole or for one policy's changes to it."""
    for function in RULES:
        function(config)
    whole = OmegaConf.create(config)
    OmegaConf.set_struct(
        whole, False
    )  # what a policy adds to an open dict, such as override_config; its keys are checked
    for name in config.policies:
        own = OmegaConf.merge(whole, {"actor_rollout_ref": changes_of(config.policies, name), "policies": {}})
        try:
            for function in RULES:
                function(own)
        except ConfigError as error:
            raise ConfigError(f"policies.{name}: {error}") from None


@rule
def samples_are_the_teams(config: Any) -> None:
    for name, changes in config.policies.items():
        if "n" in ((changes or {}).get("rollout") or {}):
            raise ConfigError(
                f"policies.{name}.rollout.n={changes.rollout.n}: all agents play the same episodes; set actor_rollout_ref.rollout.n"
            )


def policy_names(config: Any) -> list[str]:
    return list(dict.fromkeys(policy_by_agent(config.agents).values()))


@rule
def there_are_agents(config: Any) -> None:
    if not config.agents:
        raise ConfigError("agents is empty: name at least one, as in +agents.solver.role='Think step by step.'")
    if not any(agent.trainable for agent in config.agents.values()):
        raise ConfigError("no agent is trainable: set agents.<name>.trainable=true for at least one")


@rule
def policies_are_acted_with(config: Any) -> None:
    known = policy_names(config)
    for name in config.policies:
        if name not in known:
            raise ConfigError(
                f"policies.{name}: no agent acts with it; policies: {', '.join(known)}.{did_you_mean(name, known)}"
            )


@rule
def policies_change_known_keys(config: Any) -> None:
    for name in config.policies:
        for path in leaves(changes_of(config.policies, name)):
            node, walked = config.actor_rollout_ref, f"policies.{name}"
            for key in path:
                if not hasattr(node, "keys") or key not in node:
                    known = [str(k) for k in node] if hasattr(node, "keys") else []
                    raise ConfigError(
                        f"unknown key '{walked}.{key}': a policy's keys are those of actor_rollout_ref, and 'pool'."
                        f"{did_you_mean(key, [*known, 'pool'])}"
                    )
                node, walked = node[key], f"{walked}.{key}"
                if hasattr(node, "keys") and not node:
                    break  # an open dict, such as override_config


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if hasattr(value, "items") and value:
            yield from leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key))


@rule
def mini_batches_divide(config: Any) -> None:
    tasks, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini < 1 or tasks % mini:
        raise ConfigError(
            f"data.train_batch_size={tasks} does not divide into mini-batches of "
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} tasks: {tasks} % {mini} = {tasks % mini if mini > 0 else tasks}; "
            f"every mini-batch holds ppo_mini_batch_size x rollout.n={config.actor_rollout_ref.rollout.n} episodes. "
            f"Choose a divisor of {tasks}"
        )


@rule
def micro_batches_are_by_tokens(config: Any) -> None:
    if not config.actor_rollout_ref.actor.use_dynamic_bsz:
        raise ConfigError(
            "actor_rollout_ref.actor.use_dynamic_bsz=false: agents speak a different number of times, so rows do not "
            "divide into micro-batches of a fixed size. Leave it true, and set the size in tokens by "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
        )
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    if actor.ppo_max_token_len_per_gpu < longest:
        raise ConfigError(
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} cannot hold one row of "
            f"data.max_prompt_length + data.max_response_length = {rollout.prompt_length} + {rollout.response_length} = "
            f"{longest} tokens; raise it to at least that"
        )


@rule
def ranks_divide_among_servers(config: Any) -> None:
    ranks, rollout = config.trainer.nnodes * config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout
    if ranks < 1:
        raise ConfigError(
            f"trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} gives a "
            "policy no rank; both must be at least 1"
        )
    servers = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    if ranks % servers:
        raise ConfigError(
            f"a policy's {ranks} ranks (trainer.nnodes x trainer.n_gpus_per_node) do not divide into servers of "
            f"{servers} (rollout.tensor_model_parallel_size x data_parallel_size x pipeline_model_parallel_size): "
            f"{ranks} % {servers} = {ranks % servers}"
        )


@rule
def a_cpu_has_its_engines(config: Any) -> None:
    if config.trainer.device != "cpu":
        return
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.strategy != "fsdp2":
        raise ConfigError(
            f"actor_rollout_ref.actor.strategy={actor.strategy} does not run on a CPU; use fsdp2 (hardware=cpu sets it)"
        )
    if rollout.name != "hf":
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={rollout.name} needs an accelerator; use hf (hardware=cpu sets it)"
        )


@rule
def one_process_is_one_rank(config: Any) -> None:
    if not config.resources.one_process:
        return
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if ranks != 1:
        raise ConfigError(
            f"resources.one_process=true has one rank, and trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node="
            f"{config.trainer.n_gpus_per_node} ask for {ranks}; set both to 1"
        )
    if config.actor_rollout_ref.rollout.name != "hf":
        raise ConfigError(
            f"resources.one_process=true serves with the hf rollout, not with actor_rollout_ref.rollout.name="
            f"{config.actor_rollout_ref.rollout.name}; use hf"
        )


@rule
def critics_value_turns_or_tokens(config: Any) -> None:
    if config.critic.level not in ("turn", "token"):
        raise ConfigError(
            f"critic.level={config.critic.level}; expected turn or token.{did_you_mean(str(config.critic.level), ('turn', 'token'))}"
        )
    if "central" in policy_names(config):
        raise ConfigError(
            "a policy may not be called 'central', which is the central critic's name; rename the agent or its agents.<name>.policy"
        )


@rule
def critic_batches_divide(config: Any) -> None:
    tasks, mini = config.data.train_batch_size, config.critic.ppo_mini_batch_size
    if mini < 1 or tasks % mini:
        raise ConfigError(
            f"critic.ppo_mini_batch_size={mini} does not divide data.train_batch_size={tasks}; choose a divisor of {tasks}"
        )
    if not config.critic.use_dynamic_bsz:
        raise ConfigError(
            "critic.use_dynamic_bsz=false: rows are of different lengths and numbers; leave it true, and set the size in "
            "tokens by critic.ppo_max_token_len_per_gpu"
        )


@rule
def references_are_renewed_where_there_are_any(config: Any) -> None:
    freq = config.trainer.ref_update_freq
    if freq < 0:
        raise ConfigError(f"trainer.ref_update_freq={freq} must be 0 (never) or a number of steps")
    if freq > 0 and not (config.algorithm.use_kl_in_reward or kl_in_any_loss(config)):
        raise ConfigError(
            f"trainer.ref_update_freq={freq}: there is no reference to renew; set actor_rollout_ref.actor.use_kl_loss=true or "
            "algorithm.use_kl_in_reward=true"
        )
    if freq > 0 and config.actor_rollout_ref.model.lora_rank:
        raise ConfigError(
            f"trainer.ref_update_freq={freq}: with actor_rollout_ref.model.lora_rank={config.actor_rollout_ref.model.lora_rank} "
            "the reference is the policy without its adapters, which never changes; set it to 0"
        )


def kl_in_any_loss(config: Any) -> bool:
    losses = [(changes_of(config.policies, name).get("actor") or {}).get("use_kl_loss") for name in config.policies]
    return bool(config.actor_rollout_ref.actor.use_kl_loss or any(losses))


@rule
def corrections_are_whole(config: Any) -> None:
    correction = config.algorithm.rollout_correction
    if correction.rollout_rs and correction.rollout_rs_threshold is None:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs} needs "
            "algorithm.rollout_correction.rollout_rs_threshold, such as 2.0 or '0.5_2.0'"
        )


@rule
def trained_agents_sample(config: Any) -> None:
    for name, agent in config.agents.items():
        if agent.trainable and agent.temperature is not None and agent.temperature <= 0:
            raise ConfigError(
                f"agents.{name}.temperature={agent.temperature}: a trained agent has to sample; set it above 0, or "
                f"agents.{name}.trainable=false"
            )
    if config.actor_rollout_ref.rollout.temperature <= 0:
        raise ConfigError(
            f"actor_rollout_ref.rollout.temperature={config.actor_rollout_ref.rollout.temperature} must be above 0"
        )


@rule
def trained_rounds_exist(config: Any) -> None:
    rounds, last = config.learner.get("train_rounds"), config.runner.get("num_rounds")
    if rounds is not None and (not rounds or min(rounds) < 1 or (last is not None and max(rounds) > last)):
        raise ConfigError(
            f"learner.train_rounds={list(rounds)}: rounds are counted from 1{f' to runner.num_rounds={last}' if last else ''}; "
            "null trains all"
        )


@rule
def steps_are_known(config: Any) -> None:
    if config.trainer.total_training_steps is not None and config.trainer.total_training_steps < 0:
        raise ConfigError(
            f"trainer.total_training_steps={config.trainer.total_training_steps} must be 0 or more, or null"
        )


@rule
def models_exist(config: Any) -> None:
    paths = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    for name, changes in config.policies.items():
        model = (changes or {}).get("model") or {}
        if "path" in model:
            paths[f"policies.{name}.model.path"] = model["path"]
    for key, path in paths.items():
        expanded = Path(str(path)).expanduser()
        looks_local = str(path).startswith(("/", "~", ".")) or str(path).count("/") != 1
        if looks_local and not (expanded / "config.json").is_file():
            raise ConfigError(
                f"{key}={path}: no config.json there; expected a folder of a Hugging Face model, or a hub id as in org/name"
            )


@rule
def data_files_exist(config: Any) -> None:
    for key in ("train_files", "val_files"):
        for file in file_list(config.data[key]):
            if not Path(file).expanduser().is_file():
                raise ConfigError(f"data.{key}={file}: no such file; expected parquet or jsonl with verl's columns")


@rule
def rewards_are_bounded(config: Any) -> None:
    controller = config.controller
    if controller.reward_processes < 0:
        raise ConfigError(
            f"controller.reward_processes={controller.reward_processes}: must be at least 1, or 0 to judge in the driver, "
            "where nothing ends a reward function that hangs"
        )
    if controller.reward_timeout_s <= 0:
        raise ConfigError(
            f"controller.reward_timeout_s={controller.reward_timeout_s:g}: must be above 0, seconds for one text"
        )


@rule
def reward_functions_exist(config: Any) -> None:
    """verl's key, and its older one at the top."""
    older = config.get("custom_reward_function") or {}
    nodes = {"reward.custom_reward_function": config.reward.custom_reward_function, "custom_reward_function": older}
    given = {key: node.path for key, node in nodes.items() if node and node.path}
    if len(set(given.values())) > 1:
        named = " and ".join(f"{key}.path={path}" for key, path in given.items())
        raise ConfigError(f"{named} name two reward functions; unset the second, which is verl's older key")
    for key, path in given.items():
        if not path.startswith("pkg://") and not Path(path.removeprefix("file://")).expanduser().is_file():
            raise ConfigError(
                f"{key}.path={path}: no such file; expected a Python file with a function "
                f"{nodes[key].name or 'compute_score'}(data_source, solution_str, ground_truth, extra_info)"
            )


@rule
def resuming_has_a_path(config: Any) -> None:
    modes = ("auto", "disable", "resume_path")
    if config.trainer.resume_mode not in modes:
        raise ConfigError(
            f"trainer.resume_mode={config.trainer.resume_mode}; expected one of {', '.join(modes)}."
            f"{did_you_mean(str(config.trainer.resume_mode), modes)}"
        )
    if config.trainer.resume_mode == "resume_path" and not Path(str(config.trainer.resume_from_path)).is_dir():
        raise ConfigError(
            f"trainer.resume_from_path={config.trainer.resume_from_path}: no such folder; expected …/global_step_N"
        )


@rule
def packed_turns_are_weighed_by_token(config: Any) -> None:
    if not config.controller.pack_turns:
        return
    actor = config.actor_rollout_ref.actor
    if actor.loss_agg_mode != "token-mean":
        raise ConfigError(
            f"controller.pack_turns=true with actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}: a mean over "
            "sequences would depend on how turns are packed; use token-mean, or controller.pack_turns=false"
        )
    if actor.policy_loss.loss_mode in ("gspo", "geo_mean"):
        raise ConfigError(
            f"controller.pack_turns=true with actor_rollout_ref.actor.policy_loss.loss_mode={actor.policy_loss.loss_mode}: its "
            "ratio is a sequence's, and a packed sequence holds several answers; set controller.pack_turns=false"
        )


BASELINES = ("solo", "vote", "untrained")


@rule
def baselines_are_known(config: Any) -> None:
    for name in [config.baseline] if isinstance(config.baseline, str) else config.baseline:
        if name not in BASELINES:
            raise ConfigError(
                f"baseline={name}: no such baseline; known: {', '.join(BASELINES)}.{did_you_mean(str(name), BASELINES)}"
            )
