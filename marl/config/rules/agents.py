"""Rules about agents, their answers and the runner's templates."""

import re
import string
from typing import Any

from marl.config.errors import ConfigError
from marl.config.kinds import answers_only
from marl.config.overrides import NAME
from marl.config.policies import all_policies
from marl.utils.numbers import LEAST_TEMPERATURE
from marl.utils.registry import did_you_mean


def there_are_agents(config: Any) -> None:
    if not config.agents:
        raise ConfigError("agents is empty: name at least one, as in +agents.solver.role='Think step by step.'")
    if not answers_only(config) and not any(agent.trainable for agent in config.agents.values()):
        raise ConfigError("no agent is trainable: set agents.<name>.trainable=true for at least one")


def trained_agents_sample(config: Any) -> None:
    for name, agent in config.agents.items():
        if agent.trainable and agent.temperature is not None and agent.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"agents.{name}.temperature={agent.temperature}: a trained agent has to sample; set it to {LEAST_TEMPERATURE:g} at least, or "
                f"agents.{name}.trainable=false"
            )
    if config.actor_rollout_ref.rollout.temperature < LEAST_TEMPERATURE:
        raise ConfigError(
            f"actor_rollout_ref.rollout.temperature={config.actor_rollout_ref.rollout.temperature}: must be "
            f"at least {LEAST_TEMPERATURE:g}: below, sampling is greedy"
        )


def trained_rounds_exist(config: Any) -> None:
    rounds = config.learner.get("train_rounds")
    if rounds is not None and (not rounds or min(rounds) < 1):
        raise ConfigError(
            f"learner.train_rounds={list(rounds)}: rounds are counted from 1; use some of them, or null for all"
        )


def names_are_valid(config: Any) -> None:
    """Names become folders, actors, metrics and keys."""
    agents = {f"agents.{name}": name for name in config.agents}
    policies = {f"agents.{name}.policy={agent.policy}": agent.policy for name, agent in config.agents.items()}
    policies |= {
        f"agents.{name}.policy_by_round={list(agent.policy_by_round)}": policy
        for name, agent in config.agents.items()
        for policy in agent.policy_by_round
    }
    pools = {f"resources.pools.{name}": name for name in config.resources.pools}
    for key, name in (agents | policies | pools).items():
        if name is not None and (not isinstance(name, str) or not NAME.fullmatch(name) or "_fwmn_" in name):
            raise ConfigError(f"{key}: {name!r} is not a valid name; expected up to 64 letters, digits, _ and -")
    folded: dict[str, str] = {}
    for policy in all_policies(config.agents):
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


def templates_can_be_filled(config: Any) -> None:
    for key, known in TEMPLATES.items():
        group, name = key.split(".")
        template = config[group].get(name)
        if template is None:
            continue
        expected = (
            f"expected a text with the fields {', '.join(f'{{{field}}}' for field in known)}; write {{{{ for a brace"
        )
        try:
            parsed = [
                (field, layout) for _, field, layout, _ in string.Formatter().parse(template) if field is not None
            ]
            fields = [field for field, _ in parsed]
            for field, layout in parsed:
                if not field.isidentifier() or not LAYOUT.fullmatch(layout or ""):
                    shown = f"{field}:{layout}" if layout else field
                    raise ValueError(f"{{{shown}}} is no plain field")
            template.format(**known)
        except (KeyError, IndexError, AttributeError):
            missing = next(field for field in fields if field not in known)
            raise ConfigError(f"{key}={template!r}: there is no field {missing!r}; {expected}") from None
        except ValueError as error:
            raise ConfigError(f"{key}={template!r}: {error}; {expected}") from None


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


RULES = (
    there_are_agents,
    trained_agents_sample,
    trained_rounds_exist,
    names_are_valid,
    thoughts_have_marks,
    answers_fit,
    agent_loops_are_the_agents,
    templates_can_be_filled,
)
