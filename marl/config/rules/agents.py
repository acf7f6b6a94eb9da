"""Rules about agents, the policies that they act with, and the models that policies share."""

import re
import string
from collections.abc import Iterator
from typing import Any

from marl.config.errors import ConfigError
from marl.config.kinds import adapter_policies, answers_only, frozen_policies
from marl.config.overrides import NAME
from marl.config.placement import pool_of
from marl.config.policies import (
    OURS,
    Sharing,
    all_policies,
    changes_of,
    hosted_policies,
    leaves,
    own_settings,
    policies_by_agent,
    within,
)
from marl.utils.near import did_you_mean
from marl.utils.numbers import LEAST_TEMPERATURE

LAYOUT = re.compile(r"[<>^]?[0-9]{0,2}(?:\.[0-9]{1,2})?[a-z%]?")
"""Formats such as ``.2f``. A width of a billion would fill the memory."""
TEMPLATES: dict[str, dict[str, Any]] = {
    "runner.peer_template": {"agent": "", "text": "", "answer": "", "score": 0.0},
    "runner.instruction_template": {"instruction": "", "question": ""},
    "runner.menu": {"workers": ""},
    "runner.foresee_request": {"agent": ""},
    "runner.foreseen_template": {"agent": "", "text": ""},
    "method.peers_request": {"agent": ""},
}
"""Templates, with a value of each field."""
OWN_MODEL_KEYS = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
OWN_ROLLOUT_KEYS = ("temperature", "top_p", "top_k", "val_kwargs", "do_sample", "multi_turn", "agent")
BASE_ACTOR_KEYS = (
    "strategy", "fsdp_config", "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", "checkpoint",
    "use_fused_kernels", "ulysses_sequence_parallel_size", "use_remove_padding", "engine",
)  # fmt: skip
SERVERS_OF_ADAPTERS = ("hf", "vllm")
MOST_VLLM_RANK = 512
"""The last of vLLM's ``MaxLoRARanks``."""


def there_are_agents(config: Any) -> None:
    if not config.agents:
        raise ConfigError("agents is empty: name at least one, as in +agents.solver.role='Think step by step.'")
    if not answers_only(config) and not any(agent.trainable for agent in config.agents.values()):
        raise ConfigError("no agent is trainable: set agents.<name>.trainable=true for at least one")


def names_are_valid(config: Any) -> None:
    """Names become folders, actors, metrics and keys."""
    names: list[tuple[str, Any]] = [(f"agents.{name}", name) for name in config.agents]
    for name, agent in config.agents.items():
        rounds = list(agent.policy_by_round)
        names.append((f"agents.{name}.policy={agent.policy}", agent.policy))
        names += [(f"agents.{name}.policy_by_round={rounds}", policy) for policy in rounds]
    names += [(f"resources.pools.{name}", name) for name in config.resources.pools]
    for key, name in names:
        if name is not None and (not isinstance(name, str) or not NAME.fullmatch(name) or "_fwmn_" in name):
            raise ConfigError(f"{key}: {name!r} is not a valid name; expected up to 64 letters, digits, _ and -")
    folded: dict[str, str] = {}
    for policy in all_policies(config.agents):
        if policy == "central" or policy.endswith("_critic"):
            raise ConfigError(
                f"a policy may not be called {policy!r}, which is a name of critics' workers; rename the agent or its agents.<name>.policy"
            )
        other = folded.setdefault(policy.lower(), policy)
        if other != policy:
            raise ConfigError(
                f"agents: the policies {other!r} and {policy!r} differ in case alone, and so would their folders; "
                "use other names"
            )


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


def templates_can_be_filled(config: Any) -> None:
    for key, known in TEMPLATES.items():
        group, name = key.split(".")
        if (template := config[group].get(name)) is None:
            continue
        problem = ""
        try:
            parsed = [
                (field, layout or "") for _, field, layout, _ in string.Formatter().parse(template) if field is not None
            ]
            for field, layout in parsed:
                if not field.isidentifier() or not LAYOUT.fullmatch(layout):
                    problem = problem or f"{{{field}:{layout}}} is no plain field".replace(":}", "}")
                elif field not in known:
                    problem = problem or f"there is no field {field!r}"
            if not problem:
                template.format(**known)
        except ValueError as error:
            problem = str(error)
        if problem:
            fields = ", ".join(f"{{{field}}}" for field in known)
            raise ConfigError(
                f"{key}={template!r}: {problem}; expected a text with the fields {fields}; write {{{{ for a brace"
            )


def policies_are_acted_with(config: Any) -> None:
    known = all_policies(config.agents)
    for name, changes in config.policies.items():
        if name not in known:
            raise ConfigError(
                f"policies.{name}: no agent acts with it; expected one of {', '.join(known)}.{did_you_mean(name, known)}"
            )
        if "n" in ((changes or {}).get("rollout") or {}):
            raise ConfigError(
                f"policies.{name}.rollout.n={changes.rollout.n}: all agents play the same episodes; set actor_rollout_ref.rollout.n"
            )


def policies_of_rounds_take_turns(config: Any) -> None:
    for name, agent in config.agents.items():
        rounds = list(agent.policy_by_round)
        if rounds and agent.policy is not None:
            raise ConfigError(
                f"agents.{name}.policy={agent.policy} and agents.{name}.policy_by_round={rounds} both name its policy; unset one"
            )
        if rounds and agent.temperature is None:
            heat = {policy: own_settings(config, policy).rollout.temperature for policy in rounds}
            if len(set(heat.values())) > 1:
                raise ConfigError(
                    f"agents.{name}.policy_by_round={rounds}: its policies sample at the temperatures {heat}, and an agent has "
                    f"one; set agents.{name}.temperature"
                )


def policies_change_known_keys(config: Any) -> None:
    for name in config.policies:
        for path in leaves(changes_of(config.policies, name)):
            node, walked = config.actor_rollout_ref, f"policies.{name}"
            for key in path:
                if not hasattr(node, "keys") or key not in node:
                    known = [*(map(str, node) if hasattr(node, "keys") else ()), *OURS]
                    raise ConfigError(
                        f"unknown key '{walked}.{key}': a policy's keys are those of actor_rollout_ref, and {', '.join(map(repr, OURS))}."
                        f"{did_you_mean(key, known)}"
                    )
                node, walked = node[key], f"{walked}.{key}"
                if hasattr(node, "keys") and not node:
                    break  # an open dict, such as override_config


def frozen_models_are_whole(config: Any) -> None:
    """Servers of policies that nobody trains load the model's weights, and no adapter beside them."""
    for name in frozen_policies(config):
        adapter = own_settings(config, name).model.get("lora_adapter_path")
        if adapter is not None:
            raise ConfigError(
                f"policies.{name}.model.lora_adapter_path={adapter}: no agent of this policy is trained, and its servers load whole "
                "models; merge the adapter (PEFT's merge_and_unload) and set model.path to the result, or train one of its agents"
            )


def agents_share_as_the_mode_says(config: Any) -> None:
    sharing = Sharing.of(config)
    if sharing is Sharing.individual:
        owners: dict[str, str] = {}
        for agent, policies in policies_by_agent(config.agents).items():
            for policy in policies:
                if owners.setdefault(policy, agent) != agent:
                    raise ConfigError(
                        f"sharing=individual: the agents {owners[policy]} and {agent} both act with the policy {policy!r}; give "
                        f"{agent} another agents.{agent}.policy, or set sharing=groups"
                    )
    if sharing is Sharing.shared and len(policies := hosted_policies(config)) > 1:
        raise ConfigError(
            f"sharing=shared: the agents name the policies {', '.join(policies)}, and all act with one; unset "
            "agents.<name>.policy and agents.<name>.policy_by_round, or set sharing=groups"
        )
    for name, agent in config.agents.items() if sharing is Sharing.groups else ():
        if agent.policy is None and not agent.policy_by_round:
            raise ConfigError(
                f"sharing=groups: the agent {name} is in none; set agents.{name}.policy to its group's name, or "
                "sharing=individual, under which every agent has a policy of its own"
            )


def adapters_fit_their_base(config: Any) -> None:
    for name in adapter_policies(config):
        adapter_fits(own_settings(config, name), name, within(config, name))


def adapter_fits(own: Any, name: str, where: str) -> None:
    """``where``: the beginning of an error."""
    model, rollout, rank = own.model, own.rollout, own.model.lora_rank
    if rollout.name not in SERVERS_OF_ADAPTERS:
        raise ConfigError(
            f"{where}actor_rollout_ref.rollout.name={rollout.name}: sharing=lora serves several adapters on one base with hf or vllm; "
            "use one of them, or sharing=individual with lora_rank for an adapter and a base for every policy"
        )
    if model.lora.merge:
        raise ConfigError(
            f"{where}actor_rollout_ref.model.lora.merge=true: sharing=lora serves one base with every policy's adapter beside it, and "
            "a merged one would be another base; set it to false, or sharing=individual"
        )
    if rank < 1:
        raise ConfigError(
            f"policies.{name}.model.lora_rank={rank}: under sharing=lora a policy is an adapter, of rank 1 or more; leave "
            "it out, or set sharing=individual"
        )
    if rollout.name == "vllm" and rank > MOST_VLLM_RANK:
        raise ConfigError(
            f"{where}actor_rollout_ref.model.lora_rank={rank}: vLLM serves adapters of rank {MOST_VLLM_RANK} at "
            "most; lower it, or set actor_rollout_ref.rollout.name=hf"
        )
    if own.actor.strategy != "fsdp2":
        raise ConfigError(
            f"{where}actor_rollout_ref.actor.strategy={own.actor.strategy}: sharing=lora switches between adapters, which "
            "FSDP1's flat parameters do not allow; use fsdp2"
        )


def policies_of_a_base_agree(config: Any) -> None:
    """Policies of one pool change alike what belongs to the base model, its engine and its server."""
    first: dict[str, str] = {}
    for name in adapter_policies(config):
        other = first.setdefault(pool_of(config, name), name)
        mine, theirs = (dict(base_changes(config, policy)) for policy in (name, other))
        for key in {**theirs, **mine}:
            if mine.get(key) != theirs.get(key):
                owner, value = (name, mine[key]) if key in mine else (other, theirs[key])
                raise ConfigError(
                    f"policies.{owner}.{key}={value}: {other} and {name} are adapters on the one base model of the pool "
                    f"{pool_of(config, name)!r} and share its settings; set it for both, in actor_rollout_ref.{key}, or put "
                    f"one into another pool, resources.pools={{own:{{policies:[{owner}]}}}}"
                )


def base_changes(config: Any, policy: str) -> Iterator[tuple[str, Any]]:
    """A policy's changes that are none of its adapter, its update and its sampling, by dotted key."""
    precision = (config.policies.get(policy) or {}).get("precision")
    if precision is not None:
        yield "precision", precision
    changes = changes_of(config.policies, policy)
    for path in leaves(changes):
        if not is_of_the_adapter(path):
            value = changes
            for key in path:
                value = value[key]
            yield ".".join(path), value


def is_of_the_adapter(path: tuple[str, ...]) -> bool:
    group, *keys = path
    if group == "actor":
        return keys[0] not in BASE_ACTOR_KEYS
    return bool(keys) and keys[0] in {"model": OWN_MODEL_KEYS, "rollout": OWN_ROLLOUT_KEYS}.get(group, ())


def trained_agents_sample(config: Any) -> None:
    for name, agent in config.agents.items():
        if agent.trainable and agent.temperature is not None and agent.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"agents.{name}.temperature={agent.temperature}: a trained agent has to sample; set it to {LEAST_TEMPERATURE:g} at least, or "
                f"agents.{name}.trainable=false"
            )
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature < LEAST_TEMPERATURE:
        raise ConfigError(
            f"actor_rollout_ref.rollout.temperature={temperature}: must be at least {LEAST_TEMPERATURE:g}: below, sampling is greedy"
        )


def answers_fit(config: Any) -> None:
    limit = config.actor_rollout_ref.rollout.response_length
    for name, agent in config.agents.items():
        if agent.max_tokens is not None and agent.max_tokens > limit:
            raise ConfigError(
                f"agents.{name}.max_tokens={agent.max_tokens}: expected at most data.max_response_length={limit}; "
                "lower the former, or raise the latter"
            )
        if not all(agent.stop):
            raise ConfigError(f"agents.{name}.stop={list(agent.stop)}: an empty string cannot end an answer; remove it")


def tools_have_a_reader(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
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


RULES = (
    there_are_agents,
    policies_are_acted_with,
    policies_of_rounds_take_turns,
    policies_change_known_keys,
    names_are_valid,
    agents_share_as_the_mode_says,
    adapters_fit_their_base,
    policies_of_a_base_agree,
    frozen_models_are_whole,
    thoughts_have_marks,
    templates_can_be_filled,
)
POLICY_RULES = (trained_agents_sample, answers_fit, tools_have_a_reader)
"""Rules that every policy's own settings have to keep, too."""
