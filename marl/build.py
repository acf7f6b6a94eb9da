"""Builds the trainer's parts from the configuration: tokenizers, tasks, clients, controller, critic inputs."""

import marl.platform.cpu  # isort: skip - registers the platform before anything of verl asks for one

import math
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils import hf_tokenizer
from verl.workers.rollout.llm_server import LLMServerClient

import marl.config.schema  # noqa: F401 - registers our groups
from marl.batch.critic_spec import CriticSpec, Reader
from marl.batch.utility_inputs import JointStates
from marl.build_method import Data, method_options, offline_data
from marl.cluster.critic_group import Critics
from marl.cluster.launch import make_groups, start_groups, wait_for_cluster
from marl.cluster.layout import model_config, policy_configs
from marl.config.deadlines import Phase, deadline_of, request_deadline
from marl.config.engines import seeds_requests
from marl.config.errors import ConfigError
from marl.config.policies import endpoint_policies, loops_of, thinking_of
from marl.config.schema import CriticLevel
from marl.controller.agent_loop import LoopClient, Loops
from marl.controller.chat import ChatEncoder, check_round_trip
from marl.controller.client import PolicyClient
from marl.controller.controller import Controller
from marl.controller.endpoint_client import make_endpoint_client
from marl.controller.episode_workers import EpisodeWorkers, SpreadController, spawn
from marl.controller.ledger import Ledger, forget_all
from marl.controller.tasks import TaskStream, train_loader, validation_tasks
from marl.marl_trainer import MARLTrainer
from marl.methods.hybrid import TwoStreams
from marl.modules.pretrained import load_config, load_generation_config
from marl.platform.determinism import seed_generators
from marl.rewards import build_reward
from marl.rollout.decoding import end_ids
from marl.run_setup import Setup, make_runner
from marl.runners import Runner, register_runner
from marl.utils.deadlines import interrupted_after
from marl.utils.endings import interrupted_at_once
from marl.utils.seeding import derive_seed


def tokenizer_of(model: DictConfig) -> Any:
    tokenizer = hf_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def load_data(setup: Setup, tokenizers: dict[str, Any]) -> Data:
    """The tasks that are played, or the examples of a method that plays nothing."""
    if setup.method.offline:
        return offline_data(setup, tokenizers)
    loader, validation, steps = load_tasks(setup.config, tokenizers)
    return Data(loader, validation, steps, **method_options(setup, tokenizers, steps))


def load_tasks(config: DictConfig, tokenizers: dict[str, Any]) -> tuple[Any, list[Any], int]:
    """The loader of training tasks, the validation tasks, and how many steps there will be. Raises ConfigError where there
    are too few rows, or where a tokenizer cannot carry them."""
    first = next(iter(tokenizers.values()))
    loader, validation = train_loader(config, first), validation_tasks(config, first)
    if not len(loader):
        raise ConfigError(f"data.train_files hold fewer rows than data.train_batch_size={config.data.train_batch_size}")
    if not validation:
        raise ConfigError(
            f"data.val_files={list(config.data.val_files)} hold no row, or data.val_max_samples leaves none"
        )
    samples = {task.observation(agent)[-1]["content"] for task in validation[:20] for agent in config.agents}
    for tokenizer in tokenizers.values():
        try:
            check_round_trip(tokenizer, sorted(samples))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    steps = config.trainer.total_training_steps
    return loader, validation, config.trainer.total_epochs * len(loader) if steps is None else steps


def make_clients(config: DictConfig, groups: dict[str, Any], tokenizers: dict[str, Any]) -> dict[str, Any]:
    """One client per policy, which turns messages into turns."""
    served = {name: make_client(config, name, group, tokenizers[name]) for name, group in groups.items()}
    return served | {name: make_endpoint_client(config, name) for name in endpoint_policies(config)}


def make_client(config: DictConfig, name: str, group: Any, tokenizer: Any) -> PolicyClient:
    model, loops = load_config(group.config.actor_rollout_ref.model, name), loops_of(config, name)
    encoder = ChatEncoder(tokenizer, config.data.apply_chat_template_kwargs, thinking_of(config, name))
    text = model.get_text_config()
    ends = end_ids(tokenizer, text, load_generation_config(group.config.actor_rollout_ref.model.path))
    parts = (name, group.rollout, group.client(), tokenizer, encoder, text.vocab_size, ends)
    settings: dict[str, Any] = {
        "patience": request_deadline(config.resources, group.rollout.response_length),
        "seeded": seeds_requests(config, group.rollout),
    }
    if not loops:
        return PolicyClient(*parts, **settings)
    return LoopClient(*parts, **settings, loops=Loops(group.config, loops, tokenizer, model.model_type))


@dataclass(frozen=True)
class ServedPolicy:
    """The part of a policy's worker group that a client needs; picklable."""

    config: DictConfig
    server: LLMServerClient

    @property
    def rollout(self) -> DictConfig:
        return self.config.actor_rollout_ref.rollout

    def client(self) -> LLMServerClient:
        return self.server


async def start_controller(
    setup: Setup, groups: dict[str, Any], tokenizers: dict[str, Any], run_id: str, cleanup: ExitStack
) -> Controller:
    """The driver's controller; episodes run in it, or in ``controller.num_workers`` processes."""
    config, exchange_every = setup.config, setup.learner.exchange_every
    count = config.controller.num_workers
    if not count:
        return make_controller(config, setup.runner, exchange_every, groups, tokenizers, cleanup)
    served = {name: ServedPolicy(group.config, group.client()) for name, group in groups.items()}
    make = partial(controller_of_worker, config, type(setup.runner), exchange_every, served)
    workers = EpisodeWorkers(spawn(count, run_id), config.controller.episode_timeout_s)
    cleanup.callback(workers.stop)
    await workers.start(make, *deadline_of(config.resources, Phase.start))
    kind = partial(SpreadController, workers)
    return make_controller(config, setup.runner, exchange_every, groups, tokenizers, cleanup, kind)


def controller_of_worker(
    config: DictConfig,
    runner: type[Runner],
    exchange_every: int,
    policies: dict[str, ServedPolicy],
    cleanup: ExitStack,
) -> Controller:
    register_runner(config.runner.name)(runner)  # it may be known to the driver's main module alone
    tokenizers = {name: tokenizer_of(policy.config.actor_rollout_ref.model) for name, policy in policies.items()}
    return make_controller(config, make_runner(config), exchange_every, policies, tokenizers, cleanup)


def make_controller(
    config: DictConfig,
    runner: Runner,
    exchange_every: int,
    groups: dict[str, Any],
    tokenizers: dict[str, Any],
    cleanup: ExitStack,
    kind: Callable[..., Controller] = Controller,
) -> Controller:
    to_object = OmegaConf.to_object  # reading a configuration node costs more than judging a short text
    return kind(
        runner,
        to_object(config.agents),
        make_clients(config, groups, tokenizers),
        build_reward(config, cleanup),
        seed=config.seed,
        max_prompt_length=config.data.max_prompt_length,
        settings=to_object(config.controller),
        judging=to_object(config.judge),
        exchange_every=exchange_every,
        ledger=Ledger(Path(config.trainer.default_local_dir) if config.controller.ledger else None),
    )


def make_critics(setup: Setup, groups: dict[str, Any]) -> Critics:
    """Join the critics' worker groups with the reader of their rows, and with the joint observation if the learner wants it."""
    config, critics = setup.config, setup.critics
    reading = critic_reader(config, critics, setup.policies) if critics and groups else None
    states = JointStates(tokenizer_of(config.critic.model)) if setup.learner.reads_joint else None
    return Critics(groups, reading, states)


def critic_reader(config: DictConfig, critics: CriticSpec, policies: list[str]) -> Reader:
    """Make the reader of the critics' rows, in the agents' tokenizer or in one of their own. Raises ConfigError for values of tokens of
    another tokenizer, and for a tokenizer that cannot end an answer."""

    def folder(model: DictConfig) -> str:
        return str(model.tokenizer_path or model.path)

    own, level = tokenizer_of(config.critic.model), CriticLevel.of(config)
    foreign = {folder(model_config(config, name)) for name in policies} - {folder(config.critic.model)}
    if foreign and level is CriticLevel.token:
        raise ConfigError(
            f"critic.level=token values the agents' tokens, and {', '.join(sorted(foreign))} may cut a text into others than "
            f"the critic's {folder(config.critic.model)}. Set critic.level=turn, or critic.model.path to the agents' model"
        )
    if foreign and critics.values_ends and own.eos_token_id is None:
        raise ConfigError(
            f"critic.model.path={config.critic.model.path}: its tokenizer has no end-of-text token, where an answer would be "
            "valued; use another model, or the agents'"
        )
    chat = foreign and not critics.reads_joint
    encoder = ChatEncoder(own, config.data.apply_chat_template_kwargs) if chat else None
    reader: Reader = critics.reader(level, own, encoder)
    return reader


def ledger_is_foreign(config: DictConfig, again: bool) -> bool:
    """True where the turns in the run's folder may be another run's; after a fault they are its own, however it began."""
    return not again and bool(config.trainer.resume_mode != "auto" or config.trainer.resume_changes)


def start_deadline(config: DictConfig, pools: int) -> tuple[float, str, str]:
    """Deadline of verl's constructors, which wait for Ray without one, beyond the placement of pools, which has its own. A
    debugger's user may take longer."""
    seconds, key = deadline_of(config.resources, Phase.start)
    placing = pools * config.resources.placement_timeout_s
    return math.inf if config.resources.one_process else seconds + placing, "placing the worker groups", key


async def build(
    setup: Setup, cleanup: ExitStack, progress: Any = None, again: bool = False, servers: bool = True
) -> Any:
    """Start every policy's pool, workers and servers, and put the trainer together; ``cleanup`` learns how to end them.

    ``again``: after a fault of this process's run, whose ledger is therefore this run's own. Without ``servers`` nothing can be
    generated: all turns are read from a ledger.
    """
    config, names, run_id = setup.config, setup.policies, uuid.uuid4().hex[:8]
    if not config.resources.one_process:
        await wait_for_cluster(setup, config.resources.placement_timeout_s if again else 0.0)
    seed_generators(derive_seed(config.seed, "generators of the driver"))
    tokenizers = {name: tokenizer_of(model_config(config, name)) for name in names}
    data = load_data(setup, tokenizers)
    configs = policy_configs(config, names, run_id, data.steps)
    if config.controller.ledger and ledger_is_foreign(config, again):
        forget_all(Path(config.trainer.default_local_dir))
    with interrupted_at_once(), interrupted_after(*start_deadline(config, len(setup.pools))):
        groups, critics = make_groups(setup, configs, cleanup)
    await start_groups(groups, critics, servers)
    controller = await start_controller(setup, groups, tokenizers, run_id, cleanup)
    values = make_critics(setup, critics)
    parts = config, groups, controller, setup.learner, values, data.loader, data.validation, data.steps, progress
    trainer = MARLTrainer(*parts, method=setup.method, encoders=data.encoders, held_out=data.held_out)
    if data.first is not None:
        trainer.tasks = TwoStreams(TaskStream(data.first, trainer.tasks.reads_ahead), trainer.tasks)
    return trainer
