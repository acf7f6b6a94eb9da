"""Our groups of the configuration, beside verl's. Defaults are written here and nowhere else."""

import secrets
import time
from dataclasses import dataclass, field
from enum import Enum
from importlib.resources import files
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from marl.config.precision import register_resolvers
from marl.utils.numbers import SCORE, SECONDS, SHARE, TEMPERATURE, TOKENS, TOP_K, TOP_P, Number, bounded, count


@dataclass
class AgentConfig:
    """``agents.<name>``: a decision maker."""

    policy: str | None = None
    """The policy it acts with; null for one of its own, of its name."""
    policy_by_round: list[str] = field(default_factory=list)
    """The policies of rounds 1, 2, …, the last one for all later rounds too; empty for ``policy`` in every round."""
    role: str = ""
    """Text after the question in its first observation."""
    system: str = ""
    """System prompt: a system message in front of its conversation. One of the row's stands behind it, in the same message."""
    trainable: bool = True
    """False: its turns are played and never trained."""
    agent_loop: str | None = None
    """verl's agent loop that makes its turns, by its registered name; null for one request a turn."""
    temperature: float | None = bounded(None, TEMPERATURE.or_null())
    """Sampling in training; null for the policy's ``rollout`` value, as below."""
    top_p: float | None = bounded(None, TOP_P.or_null())
    """Smallest probability mass to sample from."""
    top_k: int | None = bounded(None, TOP_K.or_null())
    """Number of tokens to sample from; -1 for all."""
    max_tokens: int | None = bounded(None, TOKENS.or_null())
    """Longest answer; at most ``data.max_response_length``."""
    stop: list[str] = field(default_factory=list)
    """Strings that end an answer."""


class Placement(Enum):
    separate = "separate"
    """Every policy has its own pool; all work at the same time."""
    colocated = "colocated"
    """All policies share one pool, one process a rank."""


@dataclass
class PoolConfig:
    """``resources.pools.<name>``: processes that its members share. Servers sleep while others of the pool train."""

    gpus: int | None = bounded(None, count(1, 128, null=True))
    """Ranks on each of its nodes (CPUs with ``hardware=cpu``); null for ``trainer.n_gpus_per_node``."""
    nodes: int | None = bounded(None, count(1, 4096, null=True))
    """null for ``trainer.nnodes``."""
    policies: list[str] = field(default_factory=list)
    critics: list[str] = field(default_factory=list)


class WeightCheck(Enum):
    """``resources.weight_check``: proof, after every sync, that the servers hold their trainer's weights."""

    auto = "auto"
    """``digest`` for ``hf`` servers, ``probe`` for others."""
    digest = "digest"
    """The numbers themselves are compared, in a sample of every tensor. ``hf`` servers alone."""
    probe = "probe"
    """The log-probs of a short answer are compared."""
    none = "none"
    """No proof: a run learns from whatever the servers hold."""


@dataclass
class ResourcesConfig:
    """Placement of policies and critics. A pool has ``trainer.nnodes`` x ``trainer.n_gpus_per_node`` ranks, unless ``pools``
    gives it others."""

    placement: Placement = Placement.separate
    """Placement of policies and critics that no pool of ``pools`` names."""
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    """Pools by name, each with its own size and members."""
    one_process: bool = False
    """Everything in the driver's process, without Ray: ``breakpoint()`` works anywhere, in a reward function with
    ``judge.processes=0``. One rank, the hf rollout."""
    weight_check: WeightCheck = WeightCheck.auto
    """Proof, after every weight sync, that the servers hold their trainer's weights: auto, digest, probe or none."""
    placement_timeout_s: float = bounded(60.0, SECONDS)
    """Deadline for the cluster to allocate a pool that fits on it."""
    timeout_s: float = bounded(600.0, SECONDS)
    """Deadline of every single call to workers and servers, except those of phases with one of their own:"""
    start_timeout_s: float | None = bounded(None, SECONDS.or_null())
    """loading models, starting servers and episode workers; null for ``timeout_s``, as below"""
    request_timeout_s: float | None = bounded(None, SECONDS.or_null())
    """time without any answer of a policy's servers; null: also at least .1 s for each token of the longest answer"""
    sync_timeout_s: float | None = bounded(None, SECONDS.or_null())
    """sending weights, and proving that they have arrived"""
    update_timeout_s: float | None = bounded(None, SECONDS.or_null())
    """an update, or a forward pass"""
    save_timeout_s: float | None = bounded(None, SECONDS.or_null())
    """saving and loading a checkpoint; files that are written beside a step and still grow are waited for longer"""
    process_group_timeout_s: float = bounded(120.0, SECONDS)
    """Deadline of a collective between ranks on a CPU (gloo); it names a hung or unreachable rank if it is below ``timeout_s``."""
    max_restarts: int = bounded(3, count(0))
    """Number of times that a run is built anew after a fault (a process that died or hangs, a lost node, a phase beyond its
    deadline, weights that did not arrive) before it ends with that error. Reaching a new step resets the count."""


class CriticLevel(Enum):
    """``critic.level``: what a critic gives a value."""

    turn = "turn"
    token = "token"

    @classmethod
    def of(cls, config: Any) -> "CriticLevel":
        return cls(config.critic.level)


class LogProbSource(Enum):
    """``controller.old_log_probs``: source of the log-probs to which an update compares its own."""

    auto = "auto"
    """The servers, for a policy whose servers compute as its trainer does; checked on some rows in every step."""
    server = "server"
    """The servers, whatever the gap to the trainer."""
    trainer = "trainer"
    """A forward pass of the trainer."""

    @classmethod
    def of(cls, config: Any) -> "LogProbSource":
        return cls(config.controller.old_log_probs)


class PackTurns(Enum):
    """``controller.pack_turns``: packing of an agent's turns into shared rows."""

    auto = "auto"
    """They do where that changes the number of tokens and nothing else."""
    true = "true"
    """They do; a setting that rules it out is an error."""
    false = "false"

    @classmethod
    def of(cls, config: Any) -> "PackTurns":
        """YAML's true and false are no strings. Raises ValueError for another value."""
        return cls(str(config.controller.pack_turns).lower())


class RequestSeeds(Enum):
    """``controller.request_seeds``: whether each request to a server carries a seed, so that its answer can be drawn again."""

    auto = "auto"
    """Seeds where they cost nothing: ``hf``, CPUs, and engines that were asked to be deterministic."""
    always = "always"
    never = "never"

    @classmethod
    def of(cls, config: Any) -> "RequestSeeds":
        return cls(config.controller.request_seeds)


class AnswerRule(Enum):
    strict = "strict"
    """The last ``#### number`` counts, as verl has it."""
    flexible = "flexible"
    """The last number of the text counts."""


SCORERS = count(
    0, expected="must be at least 1, or 0 to score in the driver, where a reward function that hangs is never stopped"
)


@dataclass
class ControllerConfig:
    """Settings of episode generation."""

    num_workers: int = bounded(0, count(0, 1024))
    """Number of processes that run and score episodes, half a gigabyte each; 0 runs them in the driver, whose thread
    spends 0.1 to 0.2 ms per turn on it. Results are identical."""
    episode_timeout_s: float = bounded(600.0, SECONDS)
    """Deadline of an episode, not counting its waits for servers and reward functions, which have deadlines of their
    own (``resources.timeout_s``, ``judge.timeout_s``)."""
    max_error_rate: float = bounded(0.5, SHARE)
    """Maximum share of a step's episodes lost at the first attempt, or of its texts not scored; more ends the run."""
    min_sample_share: float = bounded(0.5, SHARE)
    """Minimum share of a task's samples: if errors leave fewer, the lost ones are run again; in validation, if any is
    lost."""
    max_attempts: int = bounded(2, count(1, 100))
    """Maximum number of attempts to run an episode or to score a text."""
    old_log_probs: LogProbSource = LogProbSource.auto
    """Source of the log-probs to which an update compares its own: auto, server or trainer. auto takes the servers', which
    saves a forward pass, where the gap to the trainer's is within ``log_prob_gap_bound`` on the rows checked."""
    log_prob_gap_bound: float = bounded(1.0e-4, Number(0))
    """Largest gap, in nats, at which ``old_log_probs=auto`` takes the servers' log-probs."""
    log_prob_check_rows: int = bounded(2, count())
    """Rows of every policy on which a step computes the gap: the longest, one of every agent, and others at random."""
    log_prob_gap_alarm: float | None = bounded(None, Number(0, null=True))
    """Warns if the log-probs of a token in a server and in the trainer differ by more; null for the bound of the policy's
    precision."""
    request_seeds: RequestSeeds = RequestSeeds.auto
    """Seeds of requests: auto, always or never. With seeds a run can be repeated and resumed answer by answer; on an
    accelerator vLLM then draws row by row, and SGLang needs deterministic inference. auto sends them where they cost nothing."""
    pack_turns: Any = PackTurns.auto.value
    """Turns of an agent whose observations extend one another are trained as one sequence: fewer tokens, the same gradient.
    ``auto`` packs where that is all that changes, ``true`` refuses settings under which it is not, ``false`` never packs."""
    lazy_agent_share: float | None = bounded(0.2, SHARE.or_null())
    """Warns once if an agent's credit share over twenty steps is below this part of an equal share; null: never."""
    degenerate_steps: int | None = bounded(5, count(null=True))
    """Number of consecutive steps with only degenerate groups before a warning names likely causes; null for never."""
    ledger: bool = True
    """Turns and scores are written into ``ledger/`` of the run's folder as they end: a run that was killed in the middle of
    a step goes on from the interrupted turns."""
    keep_ledger: bool = False
    """Keep the ledgers of all steps; else those that a resumed run needs, from the newest checkpoint on."""
    train_truncated: bool = True
    """Train on truncated answers."""
    thinking: Any = "auto"
    """Marks that separate a reasoning model's thought from its answer; peers and rewards see the answer only. ``auto``
    finds the marks in the chat template, ``none`` takes the whole response as the answer, {start: …, end: …} sets them.
    ``policies.<name>.thinking`` overrides this for one policy."""


@dataclass
class JudgeConfig:
    """Scoring of texts: answers, the threshold of a right one, penalties, and the processes of reward functions."""

    answer_rule: AnswerRule = AnswerRule.strict
    """Rule that finds the answer in a response to a GSM8K question."""
    extractors: dict[str, str] = field(default_factory=dict)
    """Answer extractors, by data source or its prefix: only, strict, flexible, hashes, math, prose, or your own
    ``<file>.py:<function>``, text -> answer or None. They override ``extract(text)`` in the reward function's file,
    which overrides the built-in rules. Votes, credit, reports and ``hide_answers`` all use them."""
    right_at: float = bounded(1.0, SCORE)
    """Score from which a text is right, in every accuracy, vote and stop; a reward function that returns ``acc`` decides by that."""
    failure_score: float = bounded(0.0, SCORE)
    """The score of a conversation that outgrew its context, and of a text on which the reward function fails; never right."""
    no_answer_score: float | None = bounded(None, SCORE.or_null())
    """Score of a turn that lacks a required answer, and of a team without one: otherwise agents learn to abstain where
    that helps the team. null: the reward function's score. Turns that it scores as right keep their score."""
    truncated_score: float | None = bounded(None, SCORE.or_null())
    """Score of an answer that was truncated at its limit; null: the reward function's score."""
    overlong_buffer: int = bounded(0, count(0))
    """Number of tokens before an answer's limit in which length is penalised (DAPO's overlong shaping); 0 for none."""
    overlong_penalty: float = bounded(1.0, Number(0, SCORE.high))
    """Penalty for an answer that reaches its length limit; applied in training only."""
    processes: int = bounded(2, SCORERS)
    """Number of processes that score what may hang: mathematics, and custom reward functions that are not async. They
    start with the first text that needs one; every worker has its own. 0 scores in the driver (or the workers), without
    a deadline; breakpoints work there."""
    timeout_s: float = bounded(30.0, SECONDS)
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
    """Settings of ``marl ensemble``, which measures agents that answer together without exchanging messages."""

    checkpoint: str | None = None
    """The folder ``…/global_step_N`` whose weights answer; null for the configuration's models, the first weights."""
    modes: list[EnsembleMode] | None = None
    """null for all that these models allow."""
    samples: int | None = bounded(None, count(null=True))
    """Answers to each task; null for ``rollout.val_kwargs.n``."""
    tasks: int | None = bounded(None, count(null=True))
    """Number of validation tasks; null for all."""
    weights: list[float] | None = None
    """Weights of the agents in a mean, in agent order; null for equal weights."""
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
        "judge": JudgeConfig,
        "ensemble": EnsembleConfig,
    }.items():
        ConfigStore.instance().store(group=group, name="schema", node=node)
    register_resolvers()
    OmegaConf.register_new_resolver("new_run", new_run, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("token_limit", lambda: TOKEN_LIMIT, replace=True)
    OmegaConf.register_new_resolver("package_folder", package_folder, replace=True)


TOKEN_LIMIT = 16384
"""verl's default of ``ppo_max_token_len_per_gpu``; as an interpolation, it tells a key that nobody has set."""


def new_run() -> str:
    """Stamp of a run that starts now, the same for a whole configuration: ``${new_run:}``.

    The seed stands beside it in the folder's name: Hydra resolves once before it applies overrides, and that result is kept.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def package_folder(name: str) -> str:
    """Where an installed package keeps its files: ``${package_folder:recipe}/…``."""
    return str(files(name))


register()
