"""Trained agents that answer and are not trained: a run's configuration with a checkpoint's weights, in servers alone."""

import asyncio
import logging
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from transformers.utils import logging as transformers_logging

from marl.build import start_controller, start_deadline, tokenizer_of
from marl.cluster.launch import check_cluster, make_groups, start_groups
from marl.cluster.layout import model_config, policy_configs
from marl.cluster.session import session
from marl.config.errors import ConfigError
from marl.config.external import naming_modules
from marl.config.overrides import hydra_overrides
from marl.config.policies import hosted_policies, own_settings
from marl.config.schema import Placement
from marl.controller.controller import Controller
from marl.controller.policy_map import PolicyMap
from marl.controller.tasks import validation_tasks
from marl.evaluation import saved_settings
from marl.evaluation.source import Source, saved_state, saved_weights
from marl.modules.pretrained import load_config
from marl.preflight.checks import check_endpoints
from marl.preflight.prepare import prepare
from marl.run_setup import Setup
from marl.types import Task
from marl.utils.deadlines import interrupted_after

logger = logging.getLogger(__name__)
ALONE = "solo"
"""The one agent of a plain model's team."""
SHARED_MODEL = "actor_rollout_ref.model.path"
LENGTHS = ("max_prompt_length", "max_response_length")


@dataclass(frozen=True)
class Team:
    """Agents whose servers are up. ``loop`` runs everything of theirs."""

    source: Source
    setup: Setup
    controller: Controller
    loop: asyncio.AbstractEventLoop
    tokenizer: Any

    @property
    def step(self) -> int:
        return self.source.step or 0

    def tasks(self) -> list[Task]:
        return validation_tasks(self.setup.config, self.tokenizer)


@contextmanager
def opened(source: Source, words: Sequence[str] = ()) -> Iterator[Team]:
    """Start the servers of a team; ``words`` override its configuration. Raises ConfigError."""
    transformers_logging.disable_progress_bar()
    setup = setup_of(source, words)
    check_endpoints(setup)
    loop = asyncio.new_event_loop()
    with session(setup), ExitStack() as cleanup:
        cleanup.callback(loop.close)
        controller = loop.run_until_complete(start(setup, source, cleanup))
        yield Team(source, setup, controller, loop, tokenizer_of(model_config(setup.config, setup.policies[0])))


def setup_of(source: Source, words: Sequence[str] = ()) -> Setup:
    """The checked configuration of a team. Raises ConfigError, with the modules that its run imported and this process did not."""
    with naming_modules(source.modules):
        return prepare(config_of(source, words))


async def start(setup: Setup, source: Source, cleanup: ExitStack) -> Controller:
    """The controller of servers that hold the source's weights."""
    config, run_id, step = setup.config, uuid.uuid4().hex[:8], source.step or 0
    if not config.resources.one_process:
        check_cluster(setup)
    tokenizers = {name: tokenizer_of(model_config(config, name)) for name in setup.policies}
    configs = policy_configs(config, setup.policies, run_id, 1)
    with interrupted_after(*start_deadline(config, len(setup.pools))):
        groups, _ = make_groups(setup, configs, cleanup)
    await start_groups(groups, {})
    controller = await start_controller(setup, groups, tokenizers, run_id, cleanup)
    await asyncio.gather(*(group.sync_weights(step) for group in groups.values()))
    if source.step is not None:
        exchange_every = source.saved["learner"].get("exchange_every") or 0
        controller.policy_map = PolicyMap(config.agents, exchange_every)
        controller.accuracy.load_state_dict(saved_state(source.path)["accuracy"])
    return controller


def config_of(source: Source, words: Sequence[str] = ()) -> DictConfig:
    """The configuration under which the source's agents answer: the run's, that of an untrained team, or the defaults with one agent
    for a plain model; the ``key=value`` of the command line last."""
    options = [word for word in words if is_option(word)]
    if source.saved is None:
        named = {word.partition("=")[0] for word in options}
        runner = [] if "runner" in named else ["runner=single_turn"]
        config = composed(["agents=schema", f"+agents.{ALONE}={{}}", *runner, *device(named), *options])
        config.actor_rollout_ref.model.path = str(source.path)
    else:
        must_fit_a_run(source, options)
        config = of_run(source, options, words)
    with open_dict(config):
        answers_alone(config)
        served = take_weights(config, source) if source.step is not None else None
        if source.saved is not None:
            config.data.columns = None  # its files were converted; others have verl's columns
        changed(config, [word for word in words if word not in options])
        if served is not None:
            must_have_weights(config, source, served, words)
        if source.saved is None:
            fit_context(config, words)
        config.data.train_files = config.data.val_files  # which nobody reads
        fit_process(config)
    return config


def must_fit_a_run(source: Source, options: Sequence[str]) -> None:
    """Raise ConfigError for an option that the saved settings would override."""
    for word in options:
        if word.startswith("hardware="):
            raise ConfigError(
                f"{word}: {source.path} is opened with the settings that it was saved with; name single keys, as in "
                "trainer.device=cpu actor_rollout_ref.rollout.name=hf"
            )


def is_option(word: str) -> bool:
    """True for a word that chooses a group's option, such as ``runner=debate``."""
    return word.partition("=")[0] in ("runner", "hardware")


def device(named: set[str]) -> list[str]:
    """The CPU's settings on a machine without an accelerator, unless ``hardware`` is named."""
    import torch

    return [] if "hardware" in named or torch.cuda.is_available() else ["hardware=cpu"]


def composed(words: Sequence[str]) -> DictConfig:
    with initialize_config_module("marl.configs", version_base="1.3"):
        return compose("marl", overrides=hydra_overrides(["learner=grpo", "credit=own", *words]))


def of_run(source: Source, options: Sequence[str], words: Sequence[str]) -> DictConfig:
    """The saved settings in the types of this version, those of a run's folder as far as they are allowed; method, learner and credit
    train, and are left out. Raises ConfigError for settings that this version does not know."""
    named = {word.partition("=")[0] for word in options}
    kept = {key: value for key, value in source.saved.items() if key not in {"method", "learner", "credit", *named}}
    if not str(name := source.saved["runner"]["name"]).isidentifier():
        raise ConfigError(f"{source.path}: runner.name={name!r:.80}: expected the name of a runner")
    runner = [] if "runner" in named else [f"runner={name}"]
    base = composed(["agents=schema", f"hardware={hardware_of(source.saved)}", *runner, *options])
    OmegaConf.set_struct(base, False)
    if not source.untrained:
        saved_settings.must_be_resolved(kept := saved_settings.allowed(kept))
        defaults: Any = OmegaConf.to_container(base, resolve=True, enum_to_str=True)
        if missing := saved_settings.left_out(source.saved, words, defaults):
            logger.warning(
                "%s: settings of its run that hold only if you name them: %s", source.path, " ".join(missing)
            )
    try:
        merged = OmegaConf.merge(base, kept)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{source.path}: its run.json holds settings that this version of marl does not know: {str(error).splitlines()[0]}; "
            "use the version that saved it"
        ) from None
    OmegaConf.set_struct(merged, True)
    return merged  # type: ignore[return-value]


def hardware_of(saved: Mapping[str, Any]) -> str:
    """The option of ours that a run's engine and device stand for."""
    if saved["trainer"]["device"] != "cpu":
        return "gpu"
    return "cpu_vllm" if saved["actor_rollout_ref"]["rollout"]["name"] == "vllm" else "cpu"


def answers_alone(config: DictConfig) -> None:
    """Leave out what only training needs: trainers, critics, references, the ledger, trackers, episode workers."""
    config.answers_only = True
    for agent in config.agents.values():
        agent.trainable = False
    config.algorithm.adv_estimator, config.algorithm.use_kl_in_reward = None, False
    config.actor_rollout_ref.actor.use_kl_loss = False
    config.actor_rollout_ref.rollout.n = max(2, config.actor_rollout_ref.rollout.n)
    config.trainer.critic_warmup, config.trainer.ref_update_freq = 0, 0
    config.critic.enable, config.baseline = None, []
    config.controller.ledger, config.controller.num_workers, config.trainer.logger = False, 0, []
    config.judge.overlong_buffer = 0
    config.trainer.rollout_data_dir = config.trainer.validation_data_dir = config.trainer.resume_from_path = None
    config.trainer.resume_mode = "disable"
    for pool in config.resources.pools.values():
        pool.critics = []


def take_weights(config: DictConfig, source: Source) -> dict[str, str]:
    """Let every policy that the run trained be served from the checkpoint's whole model, adapters merged into it; returns these
    models by policy."""
    trained, served = saved_state(source.path)["policies"], {}
    hosted = hosted_policies(config)
    for name in hosted:
        if name not in trained or not (source.path / name).exists():  # nobody trained it
            continue
        own = config.policies.get(name) or {}
        path = str(saved_weights(source.path, name))
        weights = {"path": path, "lora_rank": 0, "lora_adapter_path": None}
        config.policies[name] = OmegaConf.merge(own, {"model": weights})
        served[name] = path
    if served and len(served) == len(hosted):  # the base that was trained need not be on this machine
        config.actor_rollout_ref.model.path, config.actor_rollout_ref.ref.model.path = next(iter(served.values())), None
    config.actor_rollout_ref.model.lora_rank, config.actor_rollout_ref.model.lora_adapter_path = 0, None
    config.sharing = None
    return served


def must_have_weights(config: DictConfig, source: Source, served: Collection[str], words: Sequence[str]) -> None:
    """Raise ConfigError for a policy that the checkpoint has no weights of: where else its run found its answers is not followed, for
    it would be a server that reads conversations and a key, or a model elsewhere."""
    for name in hosted_policies(config):
        key = f"policies.{name}.model.path"
        if name in served or saved_settings.is_named(key, words) or saved_settings.is_named(SHARED_MODEL, words):
            continue
        own = (source.saved.get("policies") or {}).get(name) or {}
        if own.get("endpoint"):
            raise ConfigError(
                f"{source.path}: a server elsewhere answers for policy {name!r}, which reads the conversations and the access key that it "
                f"asks for; it is asked only if you name it: add {saved_settings.word_of(f'policies.{name}.endpoint', own['endpoint'])}"
            )
        path = (own.get("model") or {}).get("path") or source.saved["actor_rollout_ref"]["model"]["path"]
        raise ConfigError(
            f"{source.path}: no weights of policy {name!r} in it, and a model elsewhere is loaded only if you name it: add "
            f"{saved_settings.word_of(key, path)}"
        )


def changed(config: DictConfig, words: Sequence[str]) -> None:
    """Apply the command line's ``key=value``. Raises for keys that there are not, unless a ``+`` adds them."""
    OmegaConf.set_struct(config, True)
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or not key.strip("+"):
            raise ConfigError(f"{word}: expected key=value")
        if key.startswith("+") or key.startswith("policies."):
            OmegaConf.set_struct(config, False)
        try:
            config.merge_with_dotlist([word.lstrip("+")])
        except yaml.YAMLError:
            raise ConfigError(f"{word}: cannot be read; expected key=value, as YAML has values") from None
        OmegaConf.set_struct(config, True)


def fit_context(config: DictConfig, words: Sequence[str]) -> None:
    """Let a prompt and its answer fit a plain model: shorten the lengths that the command line leaves open. Raises ConfigError where
    those that it names leave no room."""
    lengths, model = {key: config.data[key] for key in LENGTHS}, config.actor_rollout_ref.model
    if config.actor_rollout_ref.rollout.max_model_len is not None or any(type(n) is not int for n in lengths.values()):
        return  # the rules judge them
    text = load_config(model, "actor_rollout_ref.model").get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is None or sum(lengths.values()) <= longest:
        return
    free = [key for key in LENGTHS if not saved_settings.is_named(f"data.{key}", words)]
    room = longest - sum(length for key, length in lengths.items() if key not in free)
    if not free or room < len(free):
        raise ConfigError(
            f"{' '.join(f'data.{key}={length}' for key, length in lengths.items())}: the context of {model.path} is {longest} tokens, "
            f"prompt and answer together; expected lengths that fit, such as data.{LENGTHS[0]}={longest - longest // 2} data.{LENGTHS[1]}={longest // 2}, "
            "or actor_rollout_ref.rollout.max_model_len=N if the model reads more"
        )
    for key in free:
        config.data[key] = room // len(free)
    fitting = " ".join(f"data.{key}={config.data[key]}" for key in LENGTHS)
    logger.warning("the context of %s is %d tokens, prompt and answer together: using %s", model.path, longest, fitting)


def fit_process(config: DictConfig) -> None:
    """Serve ``hf`` policies in this process; engines have processes of their own."""
    engines = {own_settings(config, name).rollout.name for name in hosted_policies(config)}
    config.resources.one_process = engines <= {"hf"}
    if config.resources.one_process:
        config.trainer.nnodes = config.trainer.n_gpus_per_node = 1
        config.resources.pools, config.resources.placement = {}, Placement.separate
