"""``python -m marl.main key=value …``: compose and check the configuration, start the cluster's parts, train.

The only file that decides what Ray resources a run takes.
"""

import asyncio
import os
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import marl.platform.cpu  # isort: skip - registers the platform before anything of verl asks for one

import hydra
import ray
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from verl.plugin.platform import PlatformRegistry, get_platform, set_platform

import marl.config.schema  # noqa: F401 - registers our groups
from marl.config.checks import check, policy_names
from marl.config.data import check_files, file_list
from marl.config.errors import ConfigError, explain, resolve
from marl.config.overrides import find_verl, new_agents, options_are_words
from marl.config.policies import changes_of
from marl.learners import CREDITS, LEARNERS
from marl.runners import RUNNERS
from marl.utils.memory import settle


def main(argv: list[str] | None = None) -> int:
    """Run, and return the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as they are; we print them
    sys.argv[1:] = find_verl(new_agents(sys.argv[1:] if argv is None else argv))
    return exit_code(_compose_and_run)


def exit_code(work: Callable[[], Any]) -> int:
    """Do some work, print what goes wrong: 0, 1 for a failure, 2 for a wrong configuration, 130 for Ctrl-C."""
    try:
        work()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        print(f"configuration error: {explain(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: workers and servers are stopped", file=sys.stderr)
        return 130
    except Exception as error:
        traceback.print_exc()
        print(f"run failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _compose_and_run() -> None:
    options_are_words(sys.argv[1:])
    _hydra_main()


@hydra.main(config_path="pkg://marl.configs", config_name="marl", version_base="1.3")
def _hydra_main(config: DictConfig) -> None:
    run(config)


def run(config: DictConfig, progress: Any = None) -> Any:
    """Check, start, train, stop. Returns the trainer, whose workers are gone by then."""
    config = prepare(config)
    from marl.preflight import plan_text

    print(plan_text(config, {name: pool_of(config, name) for name in policy_names(config)}), flush=True)
    with ray_session(config):
        return asyncio.run(_train(config, progress))


async def _train(config: DictConfig, progress: Any) -> Any:
    with ExitStack() as cleanup:
        trainer = await build(config, cleanup, progress)
        settle()
        await trainer.fit()
        return trainer


def prepare(config: DictConfig) -> DictConfig:
    """Resolve, make paths absolute (workers have other working directories), and check every rule. Raises ConfigError."""
    config = OmegaConf.create(config)
    resolve(config)
    check(config)
    learner, credit = LEARNERS.get(config.learner.name), CREDITS.get(config.credit.name)
    if learner.compares_samples and credit.kind != "advantage" and config.actor_rollout_ref.rollout.n < 2:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n}: learner={config.learner.name} compares a "
            "task's samples, and a group of one teaches nothing; set it to at least 2"
        )
    with open_dict(config):
        absolutise(config)
    rows = {
        key: check_files(config.data[key], config.data.prompt_key, list(config.agents))
        for key in ("train_files", "val_files")
    }
    if rows["train_files"] < config.data.train_batch_size or not rows["val_files"]:
        raise ConfigError(
            f"data.train_batch_size={config.data.train_batch_size}: data.train_files hold {rows['train_files']} rows and "
            f"data.val_files {rows['val_files']}; expected at least one batch and one row, use a smaller batch or more data"
        )
    fitting_platform(config.trainer.device)
    from marl.preflight import preflight  # heavy: imported once the rules hold

    custom_reward(config)
    preflight(config)
    return config


def absolutise(config: DictConfig) -> None:
    def absolute(path: str) -> str:
        expanded = Path(path).expanduser()
        return str(expanded.resolve()) if expanded.exists() else path

    models = [
        config.actor_rollout_ref.model,
        *(changes.model for changes in config.policies.values() if changes and "model" in changes),
    ]
    for model in models:
        for key in ("path", "tokenizer_path"):
            if model.get(key):
                model[key] = absolute(model[key])
    for key in ("train_files", "val_files"):
        config.data[key] = [absolute(file) for file in file_list(config.data[key])]
    for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir", "resume_from_path"):
        if config.trainer[key]:
            config.trainer[key] = str(Path(config.trainer[key]).expanduser().resolve())


@contextmanager
def ray_session(config: DictConfig) -> Iterator[None]:
    """Join the cluster of ``RAY_ADDRESS``, or start one on this machine; what was started here is stopped at the end."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_LOGGING_LEVEL": os.environ.get("VERL_LOGGING_LEVEL", "WARN"),
    }
    environment["MARL_PROCESS_GROUP_TIMEOUT"] = str(config.resources.process_group_timeout_s)
    environment["VERL_PLATFORM"] = use_platform(config.trainer.device)
    if config.trainer.device == "cpu":
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    modules = [name for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
    environment["VERL_USE_EXTERNAL_MODULES"] = ",".join(dict.fromkeys(["marl.platform.cpu", *modules]))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, **ray_arguments(config, environment))
    try:
        yield
    finally:
        if started:
            ray.shutdown()


def use_platform(device: str) -> str:
    """Tell verl in this process which platform the run is for, and return its name for the others.

    The driver may sit on a node without the accelerator that the workers have.
    """
    platform = fitting_platform(device)
    if get_platform().device_name != device:
        set_platform(platform())
    return next(name for name, known in platforms().items() if type(get_platform()) is known)


def platforms() -> dict[str, Any]:
    return {name: PlatformRegistry.get(name) for name in PlatformRegistry.registered_names()}


def fitting_platform(device: str) -> Any:
    fitting = {platform().device_name: platform for platform in reversed(platforms().values())}
    if device not in fitting:
        raise ConfigError(
            f"trainer.device={device}: verl knows no such device; expected one of {', '.join(sorted(fitting))}, of its "
            f"platforms {', '.join(platforms())}"
        )
    return fitting[device]


def ray_arguments(config: DictConfig, environment: dict[str, str]) -> dict[str, Any]:
    """``ray_kwargs.ray_init`` with our defaults and our environment for all processes."""
    given: Any = OmegaConf.to_container(config.ray_kwargs.ray_init)
    runtime_env = {key: value for key, value in (given.pop("runtime_env", None) or {}).items() if value is not None}
    given["runtime_env"] = runtime_env | {"env_vars": (runtime_env.get("env_vars") or {}) | environment}
    cpus = given.pop("num_cpus", None)
    if os.environ.get("RAY_ADDRESS"):
        return {"address": os.environ["RAY_ADDRESS"]} | given
    arguments: dict[str, Any] = {"address": "local", "include_dashboard": False} | given
    if cpus is None and config.trainer.device == "cpu":
        # Ray's CPUs are a count, not cores: a laptop may run more ranks than it has cores, if more slowly
        cpus = max(os.cpu_count() or 1, sum(pool_ranks(config).values()))
    return arguments | ({"num_cpus": cpus} if cpus is not None else {})


def pool_of(config: DictConfig, policy: str) -> str:
    named = (config.policies.get(policy) or {}).get("pool")
    return named or ("shared" if config.resources.placement.name == "colocated" else policy)


def pool_ranks(config: DictConfig) -> dict[str, int]:
    """Ranks of every pool."""
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    return {pool_of(config, name): ranks for name in policy_names(config)}


def check_cluster(config: DictConfig) -> None:
    """Raise ConfigError if the cluster could never give the pools what they ask for."""
    resource = get_platform().ray_resource_name()
    pools = pool_ranks(config)
    needed, there = sum(pools.values()), int(ray.cluster_resources().get(resource, 0))
    if needed > there:
        listed = ", ".join(f"{name}: {ranks}" for name, ranks in pools.items())
        raise ConfigError(
            f"the pools ask for {needed} {resource} ({listed}; each trainer.nnodes={config.trainer.nnodes} x "
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}), the whole cluster has {there}. "
            "Set resources.placement=colocated, use fewer ranks, or a larger cluster"
        )
    ranks = config.trainer.n_gpus_per_node
    largest = max((int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]), default=0)
    if ranks > largest:
        raise ConfigError(
            f"trainer.n_gpus_per_node={ranks}: the ranks of a pool's node are placed on one machine, and the largest has "
            f"{largest} {resource}. Use fewer ranks a node and more trainer.nnodes"
        )


def policy_config(config: DictConfig, name: str, index: int, run_id: str, total_steps: int) -> Any:
    """The whole configuration with one policy's ``actor_rollout_ref``: a copy, since verl's workers change theirs."""
    own = OmegaConf.create(OmegaConf.to_container(config, resolve=True, enum_to_str=True))
    from marl.rollout.offsets import OFFSET

    custom = {"policy": name, "run_id": run_id, "replica_offset": index * OFFSET}
    with open_dict(own):
        own.actor_rollout_ref = OmegaConf.merge(own.actor_rollout_ref, changes_of(own.policies, name))
        own.actor_rollout_ref.rollout.custom = (own.actor_rollout_ref.rollout.get("custom") or {}) | custom
        own.actor_rollout_ref.actor.optim.total_training_steps = total_steps
    return own


async def build(config: DictConfig, cleanup: ExitStack, progress: Any = None) -> Any:
    """Start every policy's pool, workers and servers, and put the trainer together; ``cleanup`` learns how to end them."""
    # heavy: imported once the configuration is known to be right
    from verl.utils import hf_tokenizer

    from marl.controller.chat import ChatEncoder, check_round_trip
    from marl.controller.client import PolicyClient
    from marl.controller.controller import Controller
    from marl.controller.policy_group import RayPolicyGroup
    from marl.controller.tasks import train_loader, validation_tasks
    from marl.marl_trainer import MARLTrainer
    from marl.modules.models import load_config
    from marl.rewards import Reward, builtin_compute_score

    check_cluster(config)
    set_tracker_folders(config, cleanup)
    run_id, names = uuid.uuid4().hex[:8], policy_names(config)

    def tokenizer_of(own: DictConfig) -> Any:
        model = own.actor_rollout_ref.model
        tokenizer = hf_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        if model.custom_chat_template:
            tokenizer.chat_template = model.custom_chat_template
        return tokenizer

    first = tokenizer_of(policy_config(config, names[0], 0, run_id, 0))
    loader, validation = train_loader(config, first), validation_tasks(config, first)
    if not len(loader):
        raise ConfigError(f"data.train_files hold fewer rows than data.train_batch_size={config.data.train_batch_size}")
    if not validation:
        raise ConfigError(
            f"data.val_files={list(config.data.val_files)} hold no row, or data.val_max_samples leaves none"
        )
    total_steps = config.trainer.total_training_steps
    total_steps = config.trainer.total_epochs * len(loader) if total_steps is None else total_steps
    configs = {name: policy_config(config, name, index, run_id, total_steps) for index, name in enumerate(names)}
    tokenizers = {name: tokenizer_of(own) for name, own in configs.items()}
    samples = {task.observation(agent)[-1]["content"] for task in validation[:20] for agent in config.agents}
    for tokenizer in tokenizers.values():
        try:
            check_round_trip(tokenizer, sorted(samples))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    groups = {}
    for name, workers in start_workers(config, configs, cleanup):
        groups[name] = RayPolicyGroup(name, configs[name], workers, pool_of(config, name), config.resources.timeout_s)
        cleanup.callback(groups[name].stop)
    await start_groups(groups)
    clients = {
        name: PolicyClient(
            name,
            configs[name].actor_rollout_ref.rollout,
            group.servers.client(),
            tokenizers[name],
            ChatEncoder(tokenizers[name], config.data.apply_chat_template_kwargs),
            load_config(configs[name].actor_rollout_ref.model, name).get_text_config().vocab_size,
        )
        for name, group in groups.items()
    }
    controller = Controller(
        RUNNERS.build(config.runner),
        config.agents,
        clients,
        Reward(custom_reward(config) or builtin_compute_score, config.controller.episode_timeout_s),
        seed=config.seed,
        max_prompt_length=config.data.max_prompt_length,
        episode_timeout=config.controller.episode_timeout_s,
        max_error_rate=config.controller.max_error_rate,
    )
    learner = LEARNERS.build(config.learner, credit=CREDITS.build(config.credit))
    return MARLTrainer(config, groups, controller, learner, loader, validation, total_steps, progress)


async def start_groups(groups: dict[str, Any]) -> None:
    """Pools start at the same time; servers of one pool that share an accelerator one after another, each asleep before the
    next asks for memory."""

    async def one_after_another(members: list[Any]) -> None:
        for group in members:
            await group.start_servers()

    await asyncio.gather(*(group.start_workers() for group in groups.values()))
    pools: dict[str, list[Any]] = {}
    for group in groups.values():
        pools.setdefault(group.pool if group.rollout.free_cache_engine else group.name, []).append(group)
    await asyncio.gather(*(one_after_another(members) for members in pools.values()))


def custom_reward(config: DictConfig) -> Any:
    if not config.reward.custom_reward_function.path:
        return None
    from verl.trainer.ppo.reward import get_custom_reward_fn

    function = config.reward.custom_reward_function
    try:
        return get_custom_reward_fn(config)
    except Exception as error:  # the user's file is run
        raise ConfigError(
            f"reward.custom_reward_function.path={function.path}, name={function.name}: {type(error).__name__}: {error}; "
            "expected a Python file with a function of that name"
        ) from error


def start_workers(config: DictConfig, configs: dict[str, DictConfig], cleanup: ExitStack) -> Iterator[tuple[str, Any]]:
    """A worker group for every policy: processes of its own, or of its pool's if that holds several policies."""
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls

    from marl.controller.pools import Pool
    from marl.modules.workers.policy_worker import PolicyWorker

    device = config.trainer.device
    members: dict[str, list[str]] = {}
    for name in configs:
        members.setdefault(pool_of(config, name), []).append(name)
    for pool_name, names in members.items():
        pool = Pool(
            [config.trainer.n_gpus_per_node] * config.trainer.nnodes,
            use_gpu=device != "cpu",
            max_colocate_count=1,
            name_prefix=pool_name,
            timeout=config.resources.placement_timeout_s,
        )
        cleanup.callback(pool.release)
        classes = {
            name: RayClassWithInitArgs(
                ray.remote(PolicyWorker), config=configs[name].actor_rollout_ref, role="actor_rollout"
            )
            for name in names
        }
        if len(names) == 1:
            yield names[0], RayWorkerGroup(pool, classes[names[0]], name_prefix=names[0], device_name=device)
        else:
            together = RayWorkerGroup(
                pool, create_colocated_worker_cls(classes), name_prefix=pool_name, device_name=device
            )
            yield from together.spawn(classes.keys()).items()


def set_tracker_folders(config: DictConfig, cleanup: ExitStack) -> None:
    """verl's trackers read their folders from the environment; the run's own folder unless the user says otherwise."""
    folder = Path(config.trainer.default_local_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for key, value in {
        "VERL_FILE_LOGGER_PATH": "metrics.jsonl",
        "TENSORBOARD_DIR": "tensorboard",
        "WANDB_DIR": "",
    }.items():
        if key not in os.environ:
            os.environ[key] = str(folder / value)
            cleanup.callback(os.environ.pop, key)
    if "WANDB_API_KEY" not in os.environ:
        os.environ.setdefault("WANDB_MODE", "offline")


if __name__ == "__main__":
    sys.exit(main())
