"""Access to the Ray cluster that a run starts: whoever connects needs its token."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


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
