"""Checks of prompt lengths, at the start and as they grow over rounds."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import Any

from omegaconf import DictConfig

from marl.batch.critic_spec import CriticSpec
from marl.config.dataset_rows import file_list, rows_of
from marl.config.errors import ConfigError
from marl.config.policies import critic_tokens, own_settings, policies_by_agent
from marl.config.schema import CriticLevel
from marl.controller.chat import ChatEncoder
from marl.modules import pretrained
from marl.preflight.prompt_growth import Growth, Seat, measure
from marl.rewards.answers import only_answer
from marl.run_setup import Setup
from marl.runners import Instructions, Overflow, TooManyTurns, instructions_of
from marl.types import Episode, Task

logger = logging.getLogger(__name__)

PROMPTS_READ = 100
"""Rows read of every file, the first and the longest others; encoding all of a large one takes minutes."""
ROWS_NAMED = 5


def check_prompts(config: DictConfig, encoders: Mapping[str, ChatEncoder]) -> list[list[Task]]:
    """Raise ConfigError where agents, but those of endpoints, are shown more than ``data.max_prompt_length`` before anybody has spoken. Returns the
    tasks of every file that were read, the longest first."""
    limit, tasks, first = config.data.max_prompt_length, [], FirstPrompts.of(config, encoders)
    for key in ("train_files", "val_files"):
        for file in file_list(config.data[key]):
            every = rows_of(file, config.data.prompt_key)
            rows = list(islice(every, PROMPTS_READ))
            lengths = [first.tokens(row) for row in rows]
            order = sorted(range(len(rows)), key=lambda i: -lengths[i])
            tasks.append([task_of(rows[i], f"{file}, row {i}", config.data.prompt_key) for i in order])
            long = [length for length in lengths if length > limit]
            if len(long) > config.controller.max_error_rate * len(lengths):
                raise ConfigError(
                    f"data.max_prompt_length={limit}: {len(long)} of the first {len(lengths)} prompts of {file} are longer, "
                    f"up to {max(long)} tokens before anybody has answered; set it to at least that"
                )
            if not config.data.filter_overlong_prompts:
                longest = nlargest(
                    PROMPTS_READ, enumerate(every, len(rows)), key=lambda numbered: first.characters(numbered[1])
                )
                others = {i: first.tokens(row) for i, row in longest}
                warn_of_long_rows(file, dict(enumerate(lengths)) | others, limit)
    return tasks


@dataclass(frozen=True)
class FirstPrompts:
    """First prompts of a row: those that agents, but those of endpoints, are shown before anybody has spoken. It holds plain values:
    a configuration's take far longer to read, and data sets have millions of rows."""

    prompt_key: str
    seats: Sequence[tuple[str, Instructions, ChatEncoder]]
    """Agents, their instructions and the encoders of their first policies."""

    @classmethod
    def of(cls, config: DictConfig, encoders: Mapping[str, ChatEncoder]) -> "FirstPrompts":
        policies, told = policies_by_agent(config.agents), instructions_of(config.agents)
        seats = [(agent, told[agent], encoders[own[0]]) for agent, own in policies.items() if own[0] in encoders]
        return cls(config.data.prompt_key, seats)

    def shown_to(self, row: Mapping[str, Any], agent: str, told: Instructions) -> list[dict[str, Any]]:
        private = ((row.get("extra_info") or {}).get("agent_prompts") or {}).get(agent)
        return told.beside(list(private or row[self.prompt_key]))

    def tokens(self, row: Mapping[str, Any]) -> int:
        """Tokens of a row's longest prompt."""
        return max(len(encoder.encode(self.shown_to(row, agent, told))) for agent, told, encoder in self.seats)

    def characters(self, row: Mapping[str, Any]) -> int:
        """Characters of a row's longest prompt."""
        return max(sum(len(m["content"]) for m in self.shown_to(row, agent, told)) for agent, told, _ in self.seats)


def warn_of_long_rows(file: str, lengths: Mapping[int, int], limit: int) -> None:
    """``lengths``: tokens of some rows' prompts, by the rows' numbers."""
    long = {row: length for row, length in sorted(lengths.items()) if length > limit}
    if long:
        named = ", ".join(f"row {row} ({length} tokens)" for row, length in islice(long.items(), ROWS_NAMED))
        logger.warning(
            "%s: at least %d rows are longer than data.max_prompt_length=%d before anybody speaks, and teach nothing: %s%s; raise it, "
            "or leave them out by data.filter_overlong_prompts=true. A step in which all rows are such ends the run",
            file, len(long), limit, named, ", …" if len(long) > ROWS_NAMED else "",
        )  # fmt: skip


def task_of(row: Mapping[str, Any], id: str, prompt_key: str) -> Task:
    """A row as a task of which only lengths are used."""
    truth, extra = row["reward_model"]["ground_truth"], row.get("extra_info") or {}
    return Task(id, list(row[prompt_key]), truth, row["data_source"], only_answer, extra)


def growth_of(
    setup: Setup, encoders: Mapping[str, ChatEncoder], tasks: Sequence[Task], shortest: bool = False
) -> Growth:
    """Prompt growth on some tasks, with the longest answers or the shortest. Raises ConfigError."""
    config = setup.config
    policies = policies_by_agent(config.agents)
    allowed = {name: own_settings(config, name).rollout.response_length for name in [*encoders, *setup.endpoints]}
    reader = next(iter(encoders.values()))

    def seat(agent: str, round: int) -> Seat:
        policy = policies[agent][min(round, len(policies[agent])) - 1]
        most = config.agents[agent].max_tokens or allowed[policy]
        tokens, encoder = 1 if shortest else most, encoders.get(policy, reader)
        return Seat(policy, encoder, tokens, ends=shortest and most > 1, limited=policy in encoders)

    roles = instructions_of(config.agents)
    critic = None if shortest else joint_critic(setup)
    joint = {"joint": longest_read(config, critic)} if critic else {}
    try:
        return measure(setup.runner, tasks, seat, roles, config.data.max_prompt_length, **joint)
    except TooManyTurns as error:
        raise ConfigError(str(error)) from None


def joint_critic(setup: Setup) -> CriticSpec | None:
    """The critic whose rows grow with the conversation, where there is one."""
    return setup.critics if setup.critics and setup.critics.reads_joint else None


def longest_read(config: DictConfig, critic: CriticSpec) -> Callable[[Episode], int]:
    """Tokens of the longest row of an episode that such a critic reads."""
    longest: Callable[[Episode], int] = critic.reader(
        CriticLevel.of(config), pretrained.load_tokenizer(config.critic.model, "critic.model")
    ).longest
    return longest


def check_growth(setup: Setup, encoders: Mapping[str, ChatEncoder], tasks: Sequence[Sequence[Task]]) -> None:
    """Raise ConfigError where conversations cannot be played to their end even with the shortest answers, or where the central
    critic could not read the longest."""
    config = setup.config
    limit, share = config.data.max_prompt_length, config.controller.max_error_rate
    for read in tasks:
        # the longest that has to fit: as many as may fail are longer
        task = read[min(int(share * len(read)), len(read) - 1)]
        least = growth_of(setup, encoders, [task], shortest=True)
        if least.prompt > limit:
            raise ConfigError(
                f"data.max_prompt_length={limit}: {grows(config, least)} even if every answer is a single token ({task.id}); "
                f"{remedy(config, least)}"
            )
    if joint_critic(setup):
        check_joint(config, growth_of(setup, encoders, [read[0] for read in tasks]))


def check_joint(config: DictConfig, growth: Growth) -> None:
    """Raise ConfigError where the central critic could not read the longest conversation; warn if its length is unknown."""
    if growth.unknown:
        logger.warning(
            "how much the central critic of learner=%s will read is not known, runner=%s: %s; an episode is "
            "refused where that exceeds %d tokens (critic.ppo_max_token_len_per_gpu)",
            *(config.learner.name, config.runner.name, growth.unknown, critic_tokens(config.critic)),
        )
    # where agents are refused longer prompts, no conversation is longer than all of these
    longest = config.data.max_prompt_length + config.data.max_response_length
    most = len(config.agents) * longest if config.runner.overflow == Overflow.refuse else growth.joint
    needed, limit = min(growth.joint, most), config.critic.ppo_max_token_len_per_gpu
    if needed > critic_tokens(config.critic):
        raise ConfigError(
            f"critic.ppo_max_token_len_per_gpu={limit}: the central critic of learner={config.learner.name} reads the whole "
            f"conversation, up to {needed} tokens with answers of data.max_response_length={config.data.max_response_length}; "
            f"set it to at least {-(-needed * limit // critic_tokens(config.critic))}, or lower data.max_response_length or the "
            "number of rounds"
        )


def grows(config: DictConfig, growth: Growth) -> str:
    """The prompt lengths of the rounds as text."""
    lengths = [str(growth.by_round[round]) for round in sorted(growth.by_round) if round]
    shown = lengths if len(lengths) <= ROUNDS_SHOWN else [*lengths[: ROUNDS_SHOWN - 1], "…", lengths[-1]]
    return f"prompts grow to {growth.prompt} tokens (runner={config.runner.name}, by round: {', '.join(shown)})"


ROUNDS_SHOWN = 8


def remedy(config: DictConfig, growth: Growth) -> str:
    shorter = "" if config.runner.overflow != Overflow.refuse else ", set runner.overflow=drop_oldest or summarise"
    return f"set data.max_prompt_length to at least {growth.prompt}, lower the number of rounds{shorter}, or use shorter roles"
