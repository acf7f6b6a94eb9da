"""Prompts that agents are shown before anybody has spoken, measured before the start."""

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from omegaconf import DictConfig

from marl.config.errors import ConfigError
from marl.config.policies import policies_by_agent
from marl.controller.chat import ChatEncoder
from marl.data.rows import file_list, rows_of
from marl.rewards.answers import only_answer
from marl.runners import instructions_of
from marl.types import Task

logger = logging.getLogger(__name__)

ROWS_READ = 100
"""First rows of every file that are measured: encoding a large file takes minutes. Later rows that are too long are overflows,
which the run counts and warns of."""
ROWS_NAMED = 5


def check_prompts(config: DictConfig, encoders: Mapping[str, ChatEncoder]) -> list[Task]:
    """The tasks of the rows that were measured. Raises ConfigError where more than ``controller.max_error_rate`` of a file's are
    longer than ``data.max_prompt_length`` tokens, and warns of fewer."""
    limit, tasks = config.data.max_prompt_length, []
    for file in [file for key in ("train_files", "val_files") for file in file_list(config.data[key])]:
        rows = list(islice(rows_of(file, config.data.prompt_key), ROWS_READ))
        lengths = prompt_lengths(config, encoders, rows)
        tasks += [task_of(row, f"{file}, row {i}", config.data.prompt_key) for i, row in enumerate(rows)]
        long = {row: length for row, length in enumerate(lengths) if length > limit}
        if len(long) > config.controller.max_error_rate * len(rows):
            raise ConfigError(
                f"data.max_prompt_length={limit}: {len(long)} of the first {len(rows)} prompts of {file} are longer, up to "
                f"{max(lengths)} tokens before anybody has answered; set it to at least that"
            )
        if long and not config.data.filter_overlong_prompts:
            named = ", ".join(f"row {row} ({length} tokens)" for row, length in islice(long.items(), ROWS_NAMED))
            logger.warning(
                "%s: %d of the first %d rows are longer than data.max_prompt_length=%d before anybody speaks, and teach nothing: "
                "%s%s; raise it, or leave them out by data.filter_overlong_prompts=true. A step in which all rows are such ends "
                "the run",
                file, len(long), len(rows), limit, named, ", …" if len(long) > ROWS_NAMED else "",
            )  # fmt: skip
    return tasks


def prompt_lengths(
    config: DictConfig, encoders: Mapping[str, ChatEncoder], rows: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Tokens of the longest first prompt of each row, over the agents whose policies have an encoder: those of endpoints have
    limits of their own."""
    instructions, policies = instructions_of(config.agents), policies_by_agent(config.agents)
    agents = [(agent, encoders[names[0]]) for agent, names in policies.items() if names[0] in encoders]
    lengths = []
    for row in rows:
        private = (row.get("extra_info") or {}).get("agent_prompts") or {}
        shown = {agent: list(private.get(agent) or row[config.data.prompt_key]) for agent, _ in agents}
        lengths.append(max(len(encoder.encode(instructions[a].beside(shown[a]))) for a, encoder in agents))
    return lengths


def task_of(row: Mapping[str, Any], id: str, prompt_key: str) -> Task:
    truth, extra = row["reward_model"]["ground_truth"], row.get("extra_info") or {}
    return Task(id, list(row[prompt_key]), truth, row["data_source"], only_answer, extra)
