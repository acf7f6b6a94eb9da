"""Rules that hold between keys, checked before anything starts. One function a rule; each names the remedy.

A rule takes the resolved configuration and raises ConfigError. It imports neither torch nor ray.
"""

import os
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from marl.config.bounds import check_values
from marl.config.data import DATA_SUFFIXES, file_list
from marl.config.errors import ConfigError
from marl.config.policies import OURS, all_policies, changes_of, own_settings, policies_by_agent
from marl.config.schema import ControllerConfig
from marl.utils.registry import did_you_mean

RULES: list[Callable[[Any], None]] = []


def rule(function: Callable[[Any], None]) -> Callable[[Any], None]:
    RULES.append(function)
    return function


def check(config: Any) -> None:
    """Raise ConfigError for the first rule that does not hold, for the whole or for one policy's changes to it."""
    for function in RULES:
        function(config)
    for name in config.policies:
        own = OmegaConf.create(config)
        own.actor_rollout_ref = own_settings(config, name)
        try:
            for function in RULES:
                if function not in OF_ALL_POLICIES:
                    function(own)
        except ConfigError as error:
            raise ConfigError(f"policies.{name}: {error}") from None


@rule
def values_are_in_their_ranges(config: Any) -> None:
    check_values(config)


@rule
def policies_change_groups(config: Any) -> None:
    for name, changes in config.policies.items():
        for key, value in ({f"policies.{name}": changes} | nested(f"policies.{name}", changes)).items():
            if value is not None and not hasattr(value, "items"):
                raise ConfigError(f"{key}={value}: expected a group of keys, as in {key}.<key>=<value>")


def nested(name: str, changes: Any) -> dict[str, Any]:
    """A policy's own groups of ``actor_rollout_ref``."""
    if not hasattr(changes, "items"):
        return {}
    return {f"{name}.{key}": value for key, value in changes.items() if key in ("actor", "rollout", "model", "ref")}


@rule
def samples_are_the_teams(config: Any) -> None:
    for name, changes in config.policies.items():
        if "n" in ((changes or {}).get("rollout") or {}):
            raise ConfigError(
                f"policies.{name}.rollout.n={changes.rollout.n}: all agents play the same episodes; set actor_rollout_ref.rollout.n"
            )


def policy_names(config: Any) -> list[str]:
    return all_policies(config.agents)


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
                f"policies.{name}: no agent acts with it; expected one of {', '.join(known)}.{did_you_mean(name, known)}"
            )


@rule
def policies_of_rounds_take_turns(config: Any) -> None:
    for name, agent in config.agents.items():
        rounds = list(agent.policy_by_round)
        if rounds and agent.policy is not None:
            raise ConfigError(
                f"agents.{name}.policy={agent.policy} and agents.{name}.policy_by_round={rounds} both name its policy; unset one"
            )
        if rounds and agent.temperature is None:
            heat = {
                policy: own_settings(config, policy).rollout.temperature
                for policy in policies_by_agent(config.agents)[name]
            }
            if len(set(heat.values())) > 1:
                raise ConfigError(
                    f"agents.{name}.policy_by_round={rounds}: its policies sample at the temperatures {heat}, and an agent has "
                    f"one; set agents.{name}.temperature"
                )


OF_ALL_POLICIES = [policies_of_rounds_take_turns]
"""Rules that look at every policy's settings themselves."""


@rule
def policies_change_known_keys(config: Any) -> None:
    for name in config.policies:
        for path in leaves(changes_of(config.policies, name)):
            node, walked = config.actor_rollout_ref, f"policies.{name}"
            for key in path:
                if not hasattr(node, "keys") or key not in node:
                    known = [str(k) for k in node] if hasattr(node, "keys") else []
                    raise ConfigError(
                        f"unknown key '{walked}.{key}': a policy's keys are those of actor_rollout_ref, and {' and '.join(map(repr, OURS))}."
                        f"{did_you_mean(key, [*known, *OURS])}"
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
            f"{ranks} % {servers} = {ranks % servers}. Use a multiple"
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
def hf_serves_whole_models(config: Any) -> None:
    own = config.actor_rollout_ref
    if own.rollout.name == "hf" and own.model.lora_rank and not own.model.lora.merge:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank={own.model.lora_rank}: rollout.name=hf serves whole models, and is sent "
            "adapters alone; set actor_rollout_ref.model.lora.merge=true, or lora_rank=0"
        )


@rule
def one_process_has_no_workers(config: Any) -> None:
    if config.resources.one_process and config.controller.num_workers:
        raise ConfigError(
            f"controller.num_workers={config.controller.num_workers}: with resources.one_process=true the driver plays the "
            "episodes itself; set it to 0, or resources.one_process=false"
        )


@rule
def names_are_free_for_critics(config: Any) -> None:
    if "central" in policy_names(config):
        raise ConfigError(
            "a policy may not be called 'central', which is the central critic's name; rename the agent or its agents.<name>.policy"
        )
    for name in policy_names(config):
        if name.endswith("_critic"):
            raise ConfigError(
                f"a policy may not be called {name!r}: names that end in _critic are those of critics' workers; rename the "
                "agent or its agents.<name>.policy"
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
    if correction.rollout_is not in (None, "token", "sequence"):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={correction.rollout_is}: expected token, sequence or null."
            f"{did_you_mean(str(correction.rollout_is), ('token', 'sequence'))}"
        )
    sequences = [f"{key}={value}" for key in ("rollout_is", "rollout_rs") if "seq" in str(value := correction[key])]
    if sequences and config.controller.pack_turns:
        raise ConfigError(
            f"controller.pack_turns=true with algorithm.rollout_correction.{sequences[0]}: a packed sequence holds several "
            "answers; correct by token, or set controller.pack_turns=false"
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
    rounds = config.learner.get("train_rounds")
    if rounds is not None and (not rounds or min(rounds) < 1):
        raise ConfigError(
            f"learner.train_rounds={list(rounds)}: rounds are counted from 1; use some of them, or null for all"
        )


@rule
def models_exist(config: Any) -> None:
    paths = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    for name, changes in config.policies.items():
        model = (changes or {}).get("model") or {}
        if "path" in model:
            paths[f"policies.{name}.model.path"] = model["path"]
    references = {"actor_rollout_ref.ref.model.path": config.actor_rollout_ref.ref.model.get("path")}
    paths |= {key: path for key, path in references.items() if path is not None}
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
        given = config.data[key]
        files = file_list(given) if isinstance(given, str) or hasattr(given, "__iter__") else []
        if not files or not all(isinstance(file, str) for file in files):
            raise ConfigError(f"data.{key}={given}: expected a file or a list of files, parquet or jsonl")
        for file in files:
            if not Path(file).expanduser().is_file():
                raise ConfigError(f"data.{key}={file}: no such file; expected parquet or jsonl with verl's columns")
            if Path(file).suffix not in DATA_SUFFIXES:
                raise ConfigError(
                    f"data.{key}={file}: the name ends in {Path(file).suffix!r}; expected {', '.join(DATA_SUFFIXES)}"
                )


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
def overlong_penalties_have_a_buffer_and_a_price(config: Any) -> None:
    buffer, price = config.controller.overlong_buffer, config.controller.overlong_penalty
    if buffer and not price:
        raise ConfigError(
            f"controller.overlong_penalty={price:g}: controller.overlong_buffer={buffer} would cost nothing; set it above 0, or "
            "controller.overlong_buffer=0"
        )
    if not buffer and price != ControllerConfig.overlong_penalty:
        raise ConfigError(
            f"controller.overlong_penalty={price:g}: with controller.overlong_buffer=0 no answer is charged it; set "
            "controller.overlong_buffer to the number of tokens before the limit in which length costs, or leave it out"
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


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


@rule
def names_are_names(config: Any) -> None:
    """Names become folders, actors, metrics and keys."""
    agents = {f"agents.{name}": name for name in config.agents}
    policies = {f"agents.{name}.policy={agent.policy}": agent.policy for name, agent in config.agents.items()}
    policies |= {
        f"agents.{name}.policy_by_round={list(agent.policy_by_round)}": policy
        for name, agent in config.agents.items()
        for policy in agent.policy_by_round
    }
    pools = {
        f"policies.{name}.pool={changes.pool}": changes.pool
        for name, changes in config.policies.items()
        if changes and "pool" in changes
    }
    for key, name in (agents | policies | pools).items():
        if name is not None and (not isinstance(name, str) or not NAME.fullmatch(name) or "_fwmn_" in name):
            raise ConfigError(f"{key}: {name!r} is no name; expected up to 64 letters, digits, _ and -")
    folded: dict[str, str] = {}
    for policy in policy_names(config):
        other = folded.setdefault(policy.lower(), policy)
        if other != policy:
            raise ConfigError(
                f"agents: the policies {other!r} and {policy!r} differ in case alone, and so would their folders; "
                "use other names"
            )


@rule
def thoughts_have_marks(config: Any) -> None:
    settings = {"controller.thinking": config.controller.thinking}
    settings |= {
        f"policies.{name}.thinking": changes.thinking
        for name, changes in config.policies.items()
        if changes and "thinking" in changes
    }
    for key, value in settings.items():
        marks = set(value) == {"start", "end"} if hasattr(value, "keys") else False
        if marks and all(isinstance(mark, str) and mark for mark in value.values()) and value["start"] != value["end"]:
            continue
        if value not in ("auto", "none"):
            raise ConfigError(
                f"{key}={value}: expected auto, none, or the marks around a thought, two different texts, as in "
                f"{key}={{start: '<think>', end: '</think>'}}.{did_you_mean(str(value), ('auto', 'none'))}"
            )


@rule
def answers_fit(config: Any) -> None:
    limit = config.actor_rollout_ref.rollout.response_length
    for name, agent in config.agents.items():
        if agent.max_tokens is not None and agent.max_tokens > limit:
            raise ConfigError(
                f"agents.{name}.max_tokens={agent.max_tokens}: expected at most data.max_response_length={limit}; "
                "lower it, or raise that"
            )
        if not all(agent.stop):
            raise ConfigError(f"agents.{name}.stop={list(agent.stop)}: an empty text ends no answer; remove it")


@rule
def agent_loops_are_the_agents(config: Any) -> None:
    """verl's own key would be one loop for all; and what loops read has a reader."""
    rollout = config.actor_rollout_ref.rollout
    default = rollout.agent.default_agent_loop
    if default not in (None, "single_turn_agent"):
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={default}: every agent says what makes its turns; set "
            f"agents.<name>.agent_loop={default}, and leave this key single_turn_agent"
        )
    read = {
        "agent.agent_loop_config_path": rollout.agent.agent_loop_config_path,
        "multi_turn.tool_config_path": rollout.multi_turn.tool_config_path,
        "multi_turn.function_tool_path": rollout.multi_turn.function_tool_path,
    }
    for key, path in read.items():
        if path is not None and all(agent.agent_loop is None for agent in config.agents.values()):
            raise ConfigError(
                f"actor_rollout_ref.rollout.{key}={path}: no agent acts by an agent loop, which would read it; set "
                "agents.<name>.agent_loop, or unset it"
            )


@rule
def a_conversation_fits_the_server(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_model_len is not None and rollout.max_model_len < rollout.prompt_length + rollout.response_length:
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}: expected at least "
            f"data.max_prompt_length + data.max_response_length = {rollout.prompt_length} + {rollout.response_length}; "
            "raise it, or set null"
        )


@rule
def templates_can_be_filled(config: Any) -> None:
    for key, known in TEMPLATES.items():
        template = config.runner.get(key)
        if template is None:
            continue
        expected = (
            f"expected a text with the fields {', '.join(f'{{{field}}}' for field in known)}; write {{{{ for a brace"
        )
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
            template.format(**known)
        except (KeyError, IndexError, AttributeError):
            missing = next(field for field in fields if field not in known)
            raise ConfigError(f"runner.{key}={template!r}: there is no field {missing!r}; {expected}") from None
        except ValueError as error:
            raise ConfigError(f"runner.{key}={template!r}: {error}; {expected}") from None


TEMPLATES: dict[str, dict[str, Any]] = {
    "peer_template": {"agent": "", "text": "", "answer": "", "score": 0.0},
    "menu": {"workers": ""},
}
"""Templates of runners, with a value of each field."""


@rule
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


TRACKERS = ("console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "vemlp_wandb", "clearml", "trackio")


@rule
def folders_can_be_written(config: Any) -> None:
    for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        given = config.trainer[key]
        if given is None:
            continue
        wanted = Path(str(given)).expanduser().absolute()
        there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            reason = "is no folder" if not there.is_dir() else "cannot be written"
            raise ConfigError(f"trainer.{key}={given}: {there} {reason}; set it to a folder that can be made")


@rule
def own_code_is_there(config: Any) -> None:
    file = config.data.custom_cls.path
    if file is not None and not str(file).startswith("pkg://") and not Path(str(file)).expanduser().is_file():
        raise ConfigError(f"data.custom_cls.path={file}: no such file; expected a Python file, or pkg://module")


@rule
def a_laptop_has_so_many_ranks(config: Any) -> None:
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if config.trainer.device == "cpu" and ranks > CPU_RANKS:
        raise ConfigError(
            f"trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: every "
            f"rank is a process, and on CPUs a policy takes at most {CPU_RANKS}; use fewer"
        )


CPU_RANKS = 64


@rule
def betas_are_two_shares(config: Any) -> None:
    betas = config.actor_rollout_ref.actor.optim.betas
    two = hasattr(betas, "__len__") and not isinstance(betas, str) and len(betas) == 2
    if not two or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
        raise ConfigError(
            f"actor_rollout_ref.actor.optim.betas={betas}: expected two numbers, at least 0 and below 1, as in [0.9,0.95]"
        )


@rule
def what_is_not_there_yet_is_refused(config: Any) -> None:
    """Keys of verl that change results and that this version does not read."""
    for key in (
        "algorithm.filter_groups.enable",
        "algorithm.use_pf_ppo",
        "reward.reward_model.enable",
        "distillation.enabled",
    ):
        if OmegaConf.select(config, key):
            raise ConfigError(f"{key}={OmegaConf.select(config, key)}: not part of this version; set it to false")
    if config.reward.reward_manager.name != "naive":
        raise ConfigError(
            f"reward.reward_manager.name={config.reward.reward_manager.name}: verl's reward managers are not read; set naive, "
            "and write what it does as reward.custom_reward_function"
        )


@rule
def a_reference_of_another_model_needs_weights_of_its_own(config: Any) -> None:
    model = config.actor_rollout_ref.model
    if model.lora_rank and config.actor_rollout_ref.ref.model.get("path"):
        raise ConfigError(
            f"actor_rollout_ref.ref.model.path={config.actor_rollout_ref.ref.model.path}: with actor_rollout_ref.model.lora_rank="
            f"{model.lora_rank} the reference is the policy without its adapters; unset it"
        )
