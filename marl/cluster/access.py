"""Access to the Ray cluster that a run starts, whose token whoever connects needs, and to the one that it joins."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

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


def connect(arguments: dict[str, Any]) -> None:
    """``ray.init``. Raises Unreachable where a cluster cannot be joined."""
    try:
        ray.init(log_to_driver=False, **arguments)
    except ConnectionError as error:
        if arguments["address"] == "local":
            raise
        token = f"{TOKEN} is set" if TOKEN in os.environ else f"{PATH}={os.environ.get(PATH, '~/.ray/auth_token')}"
        raise Unreachable(
            f"RAY_ADDRESS={arguments['address']}: {first_line(error)}; expected a cluster that runs, a Ray node of it on this machine, and "
            f"its token ({MODE}={os.environ.get(MODE)}, {token}). Start Ray here (ray start, docs/clusters.md), copy the token "
            "of the head, or unset RAY_ADDRESS to train on this machine alone"
        ) from error


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
