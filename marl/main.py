"""``python -m marl.main key=value …``: compose and check the configuration, start the cluster's parts, train.

The only file that decides what Ray resources a run takes.
"""

import asyncio
import os
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from marl.config.external import find_own_modules
from marl.utils.quiet import quiet, quiet_imports

if __name__ == "__main__":
    quiet_imports(sys.argv)
    find_own_modules()  # before verl imports them

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
from marl.config.run_folder import claimed
from marl.facts import check_facts, choose_credit, make_learner
from marl.parts import Part, critic_names, critic_pool, model_config, parts_of, policy_config, pool_of, pool_ranks
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
    with quiet(bool(config.verbose)):
        return _run(config, progress)


def _run(config: DictConfig, progress: Any) -> Any:
    config = prepare(config)
    from marl.preflight import plan_text

    pools = {name: pool_of(config, name) for name in policy_names(config)}
    critics = {name: critic_pool(config, name) for name in critic_names(config)}
    print(plan_text(config, pools, critics), flush=True)
    with claimed(config) as folder:
        print(f"results: {folder}", flush=True)
        with session(config):
            return asyncio.run(_train(config, progress))


async def _train(config: DictConfig, progress: Any) -> Any:
    from marl.baselines import run_baselines

    with ExitStack() as cleanup:
        trainer = await build(config, cleanup, progress)
        settle()
        await trainer.fit()
    if config.baseline and not config.trainer.val_only:
        await run_baselines(config, trainer, build)
    return trainer


def prepare(config: DictConfig) -> DictConfig:
    """Resolve, make paths absolute (workers have other working directories), and check every rule. Raises ConfigError."""
    config = OmegaConf.create(config)
    resolve(config)
    check(config)
    choose_credit(config)
    check_facts(config)
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
    # heavy: imported once the rules hold
    from marl.preflight import preflight
    from marl.rewards.custom import checked_function
    from marl.rewards.extractors import check_extractors

    checked_function(config)
    check_extractors(config)
    preflight(config)
    return config


def absolutise(config: DictConfig) -> None:
    def absolute(path: str) -> str:
        expanded = Path(path).expanduser()
        return str(expanded.resolve()) if expanded.exists() else path

    models = [
        config.actor_rollout_ref.model,
        config.critic.model,
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


def session(config: DictConfig) -> AbstractContextManager[None]:
    """Where workers and servers live while the run lasts: a Ray cluster, or this process alone."""
    return local_session(config) if config.resources.one_process else ray_session(config)


@contextmanager
def local_session(config: DictConfig) -> Iterator[None]:
    """This process alone (``resources.one_process``)."""
    use_platform(config.trainer.device)
    os.environ.setdefault("MARL_PROCESS_GROUP_TIMEOUT", str(config.resources.process_group_timeout_s))
    from marl.controller.local import one_process

    with one_process():
        yield


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


def check_cluster(config: DictConfig) -> None:
    """Raise ConfigError if the cluster could never give the pools what they ask for."""
    resource = get_platform().ray_resource_name()
    pools = pool_ranks(config)
    needed, there = sum(pools.values()), int(ray.cluster_resources().get(resource, 0))
    if needed > there:
        listed = ", ".join(f"{name}: {ranks}" for name, ranks in pools.items())
        separate = config.resources.placement.name != "colocated"
        remedy = (
            "Set resources.placement=colocated, use" if separate else "They share a pool already where they can; use"
        )
        raise ConfigError(
            f"the pools ask for {needed} {resource} ({listed}; each trainer.nnodes={config.trainer.nnodes} x "
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}), the whole cluster has {there}. "
            f"{remedy} fewer ranks, or a larger cluster"
        )
    ranks = config.trainer.n_gpus_per_node
    largest = max((int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]), default=0)
    if ranks > largest:
        raise ConfigError(
            f"trainer.n_gpus_per_node={ranks}: the ranks of a pool's node are placed on one machine, and the largest has "
            f"{largest} {resource}. Use fewer ranks a node and more trainer.nnodes"
        )


async def build(config: DictConfig, cleanup: ExitStack, progress: Any = None) -> Any:
    """Start every policy's pool, workers and servers, and put the trainer together; ``cleanup`` learns how to end them."""
    # heavy: imported once the configuration is known to be right
    from marl.assembly import critic_reader, joint_states, load_tasks, start_controller, tokenizer_of
    from marl.controller.critics import Critics
    from marl.marl_trainer import MARLTrainer

    if not config.resources.one_process:
        check_cluster(config)
    names, run_id = policy_names(config), uuid.uuid4().hex[:8]
    tokenizers = {name: tokenizer_of(model_config(config, name)) for name in names}
    loader, validation, total_steps = load_tasks(config, tokenizers)
    configs = {name: policy_config(config, name, index, run_id, total_steps) for index, name in enumerate(names)}
    groups, critics = make_groups(config, configs, cleanup)
    await start_groups(groups, critics)
    controller = await start_controller(config, groups, tokenizers, run_id, cleanup)
    learner = make_learner(config)
    reading = critic_reader(config, learner.critic, names) if critics else None
    states = joint_states(config) if learner.reads_joint else None
    values = Critics(critics, reading, states)
    return MARLTrainer(config, groups, controller, learner, values, loader, validation, total_steps, progress)


def make_groups(
    config: DictConfig, configs: dict[str, DictConfig], cleanup: ExitStack
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The worker groups of the policies and of the critics, by name; their models are not loaded yet."""
    from marl.controller.critic_group import CriticGroup
    from marl.controller.local import LocalPolicyGroup
    from marl.controller.policy_group import RayPolicyGroup

    policy_group = LocalPolicyGroup if config.resources.one_process else RayPolicyGroup
    groups: dict[str, Any] = {}
    critics: dict[str, Any] = {}
    locks: dict[str, asyncio.Lock] = {}
    for part, workers in start_workers(config, parts_of(config, configs), cleanup):
        kind, members = (CriticGroup, critics) if part.is_critic else (policy_group, groups)
        own = next(iter(configs.values())) if part.is_critic else configs[part.name]
        members[part.name] = group = kind(
            part.name, own, workers, part.pool, config.resources.timeout_s, locks.setdefault(part.pool, asyncio.Lock())
        )
        cleanup.callback(group.stop)
    return groups, critics


async def start_groups(groups: dict[str, Any], critics: dict[str, Any]) -> None:
    """Pools start at the same time; servers of one pool that share an accelerator one after another, each asleep before the
    next asks for memory."""

    async def one_after_another(members: list[Any]) -> None:
        for group in members:
            await group.start_servers()

    await asyncio.gather(*(group.start_workers() for group in [*groups.values(), *critics.values()]))
    pools: dict[str, list[Any]] = {}
    for group in groups.values():
        pools.setdefault(group.pool if group.rollout.free_cache_engine else group.name, []).append(group)
    await asyncio.gather(*(one_after_another(members) for members in pools.values()))


def start_workers(config: DictConfig, parts: list[Part], cleanup: ExitStack) -> Iterator[tuple[Part, Any]]:
    """A worker group for every part: processes of its own, or of its pool's if that holds several parts."""
    if config.resources.one_process:
        from marl.controller.local import LocalWorkers

        for part in parts:
            yield part, LocalWorkers(part.worker(**part.arguments))
        return
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls

    from marl.controller.pools import Pool

    device, start = config.trainer.device, uuid.uuid4().hex[:8]  # a baseline starts while the team's actors still end
    members: dict[str, list[Part]] = {}
    for part in parts:
        members.setdefault(part.pool, []).append(part)
    for pool_name, within in members.items():
        pool = Pool(
            [config.trainer.n_gpus_per_node] * config.trainer.nnodes,
            use_gpu=device != "cpu",
            max_colocate_count=1,
            name_prefix=pool_name,
            timeout=config.resources.placement_timeout_s,
        )
        cleanup.callback(pool.release)
        classes = {part.key: RayClassWithInitArgs(ray.remote(part.worker), **part.arguments) for part in within}
        if len(within) == 1:
            (part,) = within
            yield part, RayWorkerGroup(pool, classes[part.key], name_prefix=f"{part.key}_{start}", device_name=device)
        else:
            together = RayWorkerGroup(
                pool, create_colocated_worker_cls(classes), name_prefix=f"{pool_name}_{start}", device_name=device
            )
            spawned = together.spawn(classes.keys())
            yield from ((part, spawned[part.key]) for part in within)


if __name__ == "__main__":
    sys.exit(main())
