"""Access to the Ray cluster that a run starts, whose token whoever connects needs, and to the one that it joins."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from marl.cluster.failures import StartFailed
from marl.config.errors import ConfigError

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


class Unreachable(ConfigError, ConnectionError):
    """The cluster that is to be joined does not answer: its address is wrong, or it is not back yet."""


@contextmanager
def token_required() -> Iterator[None]:
    """Have a cluster that starts meanwhile ask for the user's token, or for one made for it alone: the one that Ray itself
    would make lies in the home folder, where all users of the machine may read it. ``RAY_AUTH_MODE=disabled`` stands."""
    if os.environ.get(MODE, "token").lower() != "token":
        yield
        return
    wanted = {MODE: "token"} | ({} if PATH in os.environ else {TOKEN: secrets.token_hex(32)})
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    read_again()
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        read_again()


def read_again() -> None:
    """Have Ray, which keeps what it once read, read both variables anew."""
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


@contextmanager
def on_loopback() -> Iterator[None]:
    """Have a cluster that starts meanwhile listen on 127.0.0.1 alone, as Ray does on macOS; on Linux it takes another address of
    this machine, whose metrics anyone on the network may read. ``ray_init._node_ip_address`` stands."""
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def connect(arguments: dict[str, Any]) -> None:
    """``ray.init``. Raises Unreachable where a cluster cannot be joined, ConfigError where a new one has no folder to write
    into, and StartFailed where it does not start."""
    if arguments["address"] == "local":
        start(arguments)
        return
    try:
        ray.init(log_to_driver=False, **arguments)
    except ConnectionError as error:
        token = f"{TOKEN} is set" if TOKEN in os.environ else f"{PATH}={os.environ.get(PATH, '~/.ray/auth_token')}"
        raise Unreachable(
            f"RAY_ADDRESS={arguments['address']}: {first_line(error)}; expected a cluster that runs, a Ray node of it on this machine, and "
            f"its token ({MODE}={os.environ.get(MODE)}, {token}). Start Ray here (ray start, docs/clusters.md), copy the token "
            "of the head, or unset RAY_ADDRESS to train on this machine alone"
        ) from error


def start(arguments: dict[str, Any]) -> None:
    try:
        with on_loopback():
            ray.init(log_to_driver=False, **arguments)
    except Exception as error:
        folder = arguments.get("_temp_dir") or os.environ.get("RAY_TMPDIR", "/tmp/ray")
        if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
            raise ConfigError(
                f"RAY_TMPDIR={folder}: {first_line(error)}; expected a folder that can be written, with a path of at most 40 "
                "characters, for Ray's logs and sockets; set RAY_TMPDIR to one"
            ) from error
        raise StartFailed(
            f"Ray did not start on this machine: {type(error).__name__}: {first_line(error)}; its logs are in {folder}. "
            "Ray waits 30 s for its own processes: where the machine is busy, try again when it is not; marl doctor looks at its limits"
        ) from error


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
