"""The environment that a run gives to Ray: its own variables and the user's."""

import faulthandler
import os

import pytest
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationMode, get_authentication_mode
from verl.plugin.platform import get_platform

from marl.cluster import session
from marl.cluster.access import Unreachable, connect, token_required
from marl.cluster.failures import StartFailed
from marl.cluster.session import ray_arguments, run_environment
from marl.cluster.stacks import SIGNAL, catches
from marl.config.errors import ConfigError

OURS = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "VERL_PLATFORM": "cpu",
    "MARL_PROCESS_GROUP_TIMEOUT": "600.0",
    "VERL_USE_EXTERNAL_MODULES": "marl.platform.cpu",
    "PYTHONPATH": "/work",
}


def env_vars(compose_config, **given):
    overrides = [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in given.items()]
    return ray_arguments(compose_config(*overrides), OURS, 1)["runtime_env"]["env_vars"]


def test_the_users_environment_wins(compose_config):
    given = env_vars(compose_config, OMP_NUM_THREADS="4", TOKENIZERS_PARALLELISM="true", HF_HOME="/models")
    assert given == OURS | {"OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "true", "HF_HOME": "/models"}
    assert env_vars(compose_config) == OURS


def test_paths_and_modules_are_joined(compose_config):
    given = env_vars(compose_config, PYTHONPATH="/mine", VERL_USE_EXTERNAL_MODULES="mine.platform")
    assert given["PYTHONPATH"] == f"/mine{os.pathsep}/work"
    assert given["VERL_USE_EXTERNAL_MODULES"] == "marl.platform.cpu,mine.platform"


@pytest.mark.parametrize(
    "name,key", [("VERL_PLATFORM", "trainer.device"), ("MARL_PROCESS_GROUP_TIMEOUT", "process_group_timeout_s")]
)
def test_a_variable_that_contradicts_its_key_is_refused(compose_config, name, key):
    assert env_vars(compose_config, **{name: OURS[name]}) == OURS
    with pytest.raises(ConfigError, match=rf"env_vars.{name}=other: expected {OURS[name]}, which follows .*{key}"):
        env_vars(compose_config, **{name: "other"})


def test_workers_have_verls_environment_and_ours(compose_config, monkeypatch):
    """verl's trainer sets these for its workers; vLLM's compile cache, for one, is known to be corrupted."""
    for name in ("NCCL_DEBUG", "VLLM_DISABLE_COMPILE_CACHE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine.platform")
    given = run_environment(compose_config())
    assert given["VLLM_DISABLE_COMPILE_CACHE"] == "1" and given["NCCL_DEBUG"] == "WARN"
    assert given["TOKENIZERS_PARALLELISM"] == "false", "ours, where both have it"
    assert given["VERL_USE_EXTERNAL_MODULES"] == "marl.platform.cpu,mine.platform"
    assert given["VERL_PLATFORM"] == "cpu" and all(isinstance(value, str) for value in given.values())


def test_vllm_on_a_cpu_is_placed_by_a_count_of_gpus(compose_config):
    config = compose_config("hardware=cpu_vllm")
    assert run_environment(config)["VERL_PLATFORM"] == "cpu_engines"
    assert get_platform().ray_resource_name() == "GPU" and get_platform().device_name == "cpu"
    assert get_platform().rollout_env_vars()["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    given = ray_arguments(config, OURS, 3)
    assert given["num_gpus"] == 3 and given["num_cpus"] == max(os.cpu_count(), 3) + 3, "one more for every server"
    assert run_environment(compose_config())["VERL_PLATFORM"] == "cpu", "the next run in this process is hf's"
    assert get_platform().ray_resource_name() == "CPU" and "num_gpus" not in ray_arguments(compose_config(), OURS, 3)


def test_the_dashboard_is_off_and_stays_on_this_machine(compose_config, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    given = ray_arguments(compose_config(), OURS, 1)
    assert given["address"] == "local" and given["include_dashboard"] is False
    assert given["dashboard_host"] == "127.0.0.1"
    shown = ray_arguments(compose_config("+ray_kwargs.ray_init.include_dashboard=true"), OURS, 1)
    assert shown["include_dashboard"] is True and shown["dashboard_host"] == "127.0.0.1"


@pytest.mark.parametrize("given", [{}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_TOKEN": "mine" * 8}])
def test_a_cluster_of_ones_own_has_a_token_while_it_lives(monkeypatch, tmp_path, given):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    tokens = []
    for _ in range(2):
        with token_required():
            assert os.environ["RAY_AUTH_MODE"] == "token" and get_authentication_mode() == AuthenticationMode.TOKEN
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
        assert {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN") if name in os.environ} == given
    assert all(len(token) >= 32 for token in tokens)
    assert (tokens[0] == tokens[1]) == ("RAY_AUTH_TOKEN" in given), "the user's, or a new one for each cluster"
    assert not (tmp_path / ".ray").exists(), "no token is left in the home folder"


def test_the_users_choice_stands(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with token_required():
        assert os.environ["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN" not in os.environ


def test_a_cluster_that_cannot_be_joined_is_named(monkeypatch):
    def refuse(**arguments):
        raise ConnectionError("Failed to connect\nto whatever")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "never shown")
    expected = r"^RAY_ADDRESS=10.0.0.9:6379: Failed to connect; expected .*RAY_AUTH_MODE=token, RAY_AUTH_TOKEN is set.*ray start"
    with pytest.raises(Unreachable, match=expected) as raised:
        connect({"address": "10.0.0.9:6379"})
    assert "never shown" not in str(raised.value) and isinstance(raised.value, ConfigError)


STARTS = {
    "a busy machine": (
        Exception("The current node timed out"),
        StartFailed,
        "^Ray did not start on this machine: Exception: The current.*logs are in /tmp/ray",
    ),
    "no answer": (ConnectionError("refused"), StartFailed, "ConnectionError: refused"),
    "a long path": (OSError("AF_UNIX path length cannot exceed 107"), ConfigError, "^RAY_TMPDIR=/tmp/ray: AF_UNIX.*at most 40"),
    "no permission": (PermissionError(13, "Permission denied", "/tmp/ray"), ConfigError, "^RAY_TMPDIR=/tmp/ray: .*set RAY_TMPDIR"),
}  # fmt: skip


@pytest.mark.parametrize("error,kind,said", STARTS.values(), ids=STARTS)
def test_a_cluster_that_does_not_start_says_why(monkeypatch, error, kind, said):
    """A StartFailed counts as an attempt where it follows a fault."""

    def fail(**arguments):
        assert ray_constants.ENABLE_RAY_CLUSTER is False, "on the loopback"
        raise error

    before = ray_constants.ENABLE_RAY_CLUSTER
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with pytest.raises(kind, match=said):
        connect({"address": "local"})
    assert ray_constants.ENABLE_RAY_CLUSTER is before


def test_the_driver_tells_its_stacks_too(compose_config, monkeypatch):
    """Without a handler the signal would end it."""
    heard = []

    def refuse(arguments):
        heard.append(catches(os.getpid(), SIGNAL))
        raise ConnectionError("no Ray here")

    faulthandler.unregister(SIGNAL)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(session, "connect", refuse)
    monkeypatch.setattr(session, "end_orphans", lambda: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(ConnectionError), session.ray_session(compose_config(), 1):
        pass
    assert heard == [True]
