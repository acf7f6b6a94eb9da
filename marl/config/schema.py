"""Our groups of the configuration, beside verl's. Defaults are written here and nowhere else."""

import secrets
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf


@dataclass
class AgentConfig:
    """``agents.<name>``: a decision maker."""

    policy: str | None = None
    """The policy it acts with; null for one of its own, of its name."""
    policy_by_round: list[str] = field(default_factory=list)
    """The policies of rounds 1, 2, …, the last one for all later rounds too; empty for ``policy`` in every round."""
    role: str = ""
    """Text after the question in its first observation."""
    trainable: bool = True
    """False: its turns are played and never trained."""
    agent_loop: str | None = None
    """verl's agent loop that makes its turns, by its registered name; null for one request a turn."""
    temperature: float | None = None
    """Sampling in training; null for the policy's ``rollout`` value, as below."""
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    """Strings that end an answer."""


class Placement(Enum):
    separate = "separate"
    """Every policy has a pool of its own; all work at the same time."""
    colocated = "colocated"
    """All policies share one pool, one process a rank."""


@dataclass
class ResourcesConfig:
    """Where policies live. A pool has ``trainer.nnodes`` x ``trainer.n_gpus_per_node`` ranks."""

    placement: Placement = Placement.separate
    critic_pool: str | None = None
    """The pool of the critics; null for pools of their own, or the shared one where policies are colocated."""
    one_process: bool = False
    """Everything in the driver's process, without Ray: ``breakpoint()`` works anywhere. One rank, the hf rollout."""
    placement_timeout_s: float = 60.0
    """How long the cluster may take to give a pool that it could give."""
    timeout_s: float = 600.0
    """Deadline of every single call to workers and servers."""
    process_group_timeout_s: float = 120.0
    """Deadline of a collective between ranks on a CPU (gloo); it notices a hung or unreachable rank. Below ``timeout_s``."""


class AnswerRule(Enum):
    strict = "strict"
    """The last ``#### number`` counts, as verl has it."""
    flexible = "flexible"
    """The last number of the text counts."""


@dataclass
class ControllerConfig:
    """How episodes are played."""

    num_workers: int = 0
    """How many processes play and judge the episodes, half a gigabyte each; 0: the driver, whose thread needs 0.1 to 0.2 ms a
    turn for that. The episodes are the same."""
    episode_timeout_s: float = 600.0
    """Ends an episode that is stuck: what it may take itself, while it waits for no server and no reward function, which have
    deadlines of their own (``resources.timeout_s``, ``reward_timeout_s``)."""
    max_error_rate: float = 0.5
    """The run ends where a larger share of a step's episodes are lost at the first attempt, or of its texts cannot be judged."""
    min_sample_share: float = 0.5
    """Where less than this share of a task's samples is left, because the machine lost the others, those are played again; in
    validation, where any is missing."""
    max_attempts: int = 2
    """How often an episode is played, and a text judged, at most."""
    failure_score: float = 0.0
    """The score of a conversation that outgrew its context, and of a text on which the reward function fails."""
    pack_turns: bool = False
    """Turns of an agent whose observations extend one another are trained as one sequence: fewer tokens, the same gradient."""
    log_prob_gap_alarm: float = 1.0
    """A larger difference between a server's and the trainer's log-prob of a token is warned of."""
    lazy_agent_share: float | None = 0.2
    """An agent whose share of the credit, over twenty steps, is below so much of an equal one is warned of, once; null for never."""
    degenerate_steps: int | None = 5
    """After so many steps in a row all of whose groups are alike, a warning names likely causes; null for never."""
    answer_rule: AnswerRule = AnswerRule.strict
    """Where a text gives its answer to a GSM8K question."""
    extractors: dict[str, str] = field(default_factory=dict)
    """How texts give their final answers, by data source or how its name begins: only, strict, flexible, hashes, math, or
    ``<file>.py:<function>`` of your own, text -> answer or None. Before ``extract(text)`` of the reward function's file, and
    the built-in rules. Votes, credit, reports and ``hide_answers`` all go by it."""
    no_answer_score: float | None = None
    """The score of a turn that gives no answer where it should, and of a team without one: an abstention that helps the team
    is otherwise learned as a trick. null: what the reward function says. What that calls right stays right."""
    truncated_score: float | None = None
    """The score of an answer that was cut off at its limit; null: what the reward function says."""
    overlong_buffer: int = 0
    """The last tokens before an answer's limit, in which its length begins to cost (DAPO's overlong shaping); 0 for none."""
    overlong_penalty: float = 1.0
    """What an answer at its limit is charged in training."""
    train_truncated: bool = True
    """Whether answers that were cut off are trained."""
    thinking: Any = "auto"
    """How a reasoning model's thought is told from its answer, which alone others read and rewards judge: ``auto`` finds the
    marks in the chat template, ``none`` takes all for the answer, {start: …, end: …} are marks. ``policies.<name>.thinking``
    says it for one policy."""
    reward_processes: int = 2
    """How many processes judge what may hang: mathematics, and custom reward functions that are not async. They start
    with the first text that needs one; every worker has its own. 0 judges in the driver (or the workers), without a
    deadline, where a breakpoint works."""
    reward_timeout_s: float = 30.0
    """Deadline of a reward function for one text."""


class EnsembleMode(Enum):
    vote = "vote"
    """The majority of the agents' own answers."""
    distribution = "distribution"
    """One answer, of the mean of their next-token distributions."""
    hidden = "hidden"
    """One answer, of the mean of their last hidden states."""


@dataclass
class EnsembleConfig:
    """What ``marl ensemble`` measures: agents that answer together, without a word between them."""

    checkpoint: str | None = None
    """The folder ``…/global_step_N`` whose weights answer; null for the configuration's models, the first weights."""
    modes: list[EnsembleMode] | None = None
    """null for all that these models allow."""
    samples: int | None = None
    """Answers to each task; null for ``rollout.val_kwargs.n``."""
    tasks: int | None = None
    """How many validation tasks; null for all."""
    weights: list[float] | None = None
    """Of the agents in a mean, in their order; null for equal ones."""
    device: str | None = None
    """null for ``trainer.device``."""


def register() -> None:
    """Make every group a Hydra option ``<group>: schema``."""
    # a typed node holds the types of its children: agents that a YAML file or the command line adds are checked too
    agents = DictConfig({}, element_type=AgentConfig)
    # `agent` gives one more of them that type: see marl.config.overrides.new_agents
    for group, node in {
        "agents": agents,
        "agent": AgentConfig,
        "resources": ResourcesConfig,
        "controller": ControllerConfig,
        "ensemble": EnsembleConfig,
    }.items():
        ConfigStore.instance().store(group=group, name="schema", node=node)
    OmegaConf.register_new_resolver("new_run", new_run, use_cache=True, replace=True)


def new_run(seed: int) -> str:
    """Name of the folder of a run that starts now: ``${new_run:${seed}}``, once for a configuration."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}-seed{seed}"


register()
