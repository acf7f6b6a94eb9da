"""The session of a run: a Ray cluster, or one process."""

import marl.platform.cpu  # isort: skip - registers the platform before anything of verl asks for one

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from verl.plugin.platform import PlatformRegistry, get_platform, set_platform

import marl.config.schema  # noqa: F401 - registers our groups
from marl.cluster.access import connect, token_required
from marl.cluster.processes import end_left, end_orphans
from marl.cluster.stacks import LISTEN, listen
from marl.config.engines import is_strict, serves_vllm_on_cpu
from marl.config.errors import ConfigError
from marl.config.external import working_folder
from marl.platform.cpu import PlatformCPUEngines
from marl.platform.determinism import VARIABLE, environment_of, strict_operations
from marl.run_setup import Setup
from marl.utils import segments
from marl.utils.allocator import keep_freed_memory
from marl.utils.endings import ended_by_sigterm
from marl.utils.garbage import freeze_gc
from marl.utils.run_mark import MARK, marked

FOLLOWING = {
    "VERL_PLATFORM": "trainer.device",
    "MARL_PROCESS_GROUP_TIMEOUT": "resources.process_group_timeout_s",
}
"""Environment variables that follow a key of the configuration."""

LOOPBACK = "127.0.0.1"


def session(setup: Setup) -> AbstractContextManager[None]:
    """Context in which workers and servers live during a run: a Ray cluster, or this process alone."""
    config = setup.config
    if config.resources.one_process:
        return local_session(config)
    return ray_session(config, sum(setup.ranks_by_pool.values()))


@contextmanager
def local_session(config: DictConfig) -> Iterator[None]:
    """This process alone (``resources.one_process``)."""
    if use_platform(config.trainer.device) == "cpu":
        keep_freed_memory()
    os.environ.setdefault("MARL_PROCESS_GROUP_TIMEOUT", str(config.resources.process_group_timeout_s))
    from marl.cluster.local import one_process

    listen()
    freeze_gc(collect=False)  # before any models exist, which must be freed with their run
    end_orphans()
    with strict_operations(config), marked(), one_process(), ended_by_sigterm():
        yield


@contextmanager
def ray_session(config: DictConfig, ranks: int) -> Iterator[None]:
    """Join the cluster of ``RAY_ADDRESS``, or start one on this machine; what was started here is stopped at the end.

    ``ranks``: of all pools, for which this machine is to have CPUs.
    """
    environment = run_environment(config)
    listen()
    if ray.is_initialized():
        has_started_strict(config)
        yield
        return
    end_orphans()
    with strict_operations(config), marked() as mark:
        arguments = ray_arguments(config, environment | {MARK: mark}, ranks)
        with token_required() if arguments["address"] == "local" else nullcontext():
            try:
                connect(arguments)
                with ended_by_sigterm():
                    yield
            finally:
                sockets = own_sockets()
                ray.shutdown()
                end_left(mark)
                segments.remove(mark)
                if sockets is not None:
                    shutil.rmtree(sockets, ignore_errors=True)


def own_sockets() -> Path | None:
    """Folder of the sockets of the cluster that this process started; None if it started none."""
    node = ray._private.worker._global_node
    return Path(node.get_session_dir_path()) / "sockets" if node is not None and node.is_head() else None


def has_started_strict(config: DictConfig) -> None:
    """Raise ConfigError for a strict run in a Ray session that began without its environment."""
    if is_strict(config) and os.environ.get(VARIABLE) is None:
        raise ConfigError(
            "determinism=strict: Ray runs in this process already, and its workers lack the environment of a strict run; end it by "
            "ray.shutdown() before the run, or set determinism=null"
        )


def run_environment(config: DictConfig) -> dict[str, str]:
    """Environment variables of all processes: verl's own, and ours."""
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env  # asks the GPU what it is

    modules = [name for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
    environment: dict[str, str] = get_ppo_ray_runtime_env(config)["env_vars"] | {
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_LOGGING_LEVEL": os.environ.get("VERL_LOGGING_LEVEL", "WARN"),
        "MARL_PROCESS_GROUP_TIMEOUT": str(config.resources.process_group_timeout_s),
        "VERL_PLATFORM": use_platform(config.trainer.device, serves_vllm_on_cpu(config)),
        "VERL_USE_EXTERNAL_MODULES": ",".join(dict.fromkeys(["marl.platform.cpu", *modules])),
        "PYTHONPATH": os.pathsep.join(filter(None, [*working_folder(), os.environ.get("PYTHONPATH")])),
    }
    environment |= environment_of(config)
    if config.trainer.device == "cpu":
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return environment


def use_platform(device: str, logical_gpus: bool = False) -> str:
    """Tell verl in this process which platform the run is for, and return its name for the others.

    The driver may sit on a node without the accelerator that the workers have. ``logical_gpus``: a CPU's ranks are counted
    as Ray's GPUs, as verl wants it for its engines.
    """
    platform = PlatformCPUEngines if logical_gpus else fitting_platform(device)
    if get_platform().device_name != device or (device == "cpu" and type(get_platform()) is not platform):
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


def ray_arguments(config: DictConfig, environment: dict[str, str], ranks: int) -> dict[str, Any]:
    """``ray_kwargs.ray_init`` with our defaults and our environment for all processes."""
    given: Any = OmegaConf.to_container(config.ray_kwargs.ray_init)
    runtime_env = {key: value for key, value in (given.pop("runtime_env", None) or {}).items() if value is not None}
    given["runtime_env"] = (
        {"worker_process_setup_hook": LISTEN}
        | runtime_env
        | {"env_vars": with_users(environment, runtime_env.get("env_vars") or {})}
    )
    cpus = given.pop("num_cpus", None)
    if os.environ.get("RAY_ADDRESS"):
        return {"address": os.environ["RAY_ADDRESS"]} | given
    arguments: dict[str, Any] = {"address": "local", "include_dashboard": False, "dashboard_host": LOOPBACK} | given
    if cpus is None and config.trainer.device == "cpu":
        # Ray's CPUs are a count, not cores: a laptop may run more ranks than it has cores, if more slowly
        cpus = max(os.cpu_count() or 1, ranks)
        if serves_vllm_on_cpu(config):
            arguments.setdefault("num_gpus", ranks)
            cpus += ranks  # Ray wants a free one to create a server
    return arguments | ({"num_cpus": cpus} if cpus is not None else {})


def with_users(environment: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, str]:
    """Our environment with the user's variables, which take precedence; paths and modules are joined. Raises ConfigError for
    one that follows a key of the configuration."""
    users = {name: str(value) for name, value in given.items() if value is not None}
    for name, key in FOLLOWING.items():
        if users.get(name, environment[name]) != environment[name]:
            raise ConfigError(
                f"ray_kwargs.ray_init.runtime_env.env_vars.{name}={users[name]}: expected {environment[name]}, which follows "
                f"{key}; remove it, and set that key instead"
            )
    merged = {**environment, **users}
    if "PYTHONPATH" in users:
        merged["PYTHONPATH"] = os.pathsep.join([users["PYTHONPATH"], environment["PYTHONPATH"]])
    if "VERL_USE_EXTERNAL_MODULES" in users:  # ours first: it registers the platform
        merged["VERL_USE_EXTERNAL_MODULES"] = ",".join(
            [environment["VERL_USE_EXTERNAL_MODULES"], users["VERL_USE_EXTERNAL_MODULES"]]
        )
    return merged
