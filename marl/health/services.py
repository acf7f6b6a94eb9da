"""The Ray cluster and its token, and the processes that rewards run in."""

import asyncio
import os
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from marl.health.finding import Finding, note, ok, problem
from marl.rewards.builtin import must_be_installed
from marl.rewards.processes import Processes, RewardError

PATIENCE_S = 5.0
LOCAL = Path("/tmp/ray/ray_current_cluster")
"""Ray's note of the cluster that was started on this machine, which ``auto`` names."""
DEADLINE_S = 0.5
REWARDS = "reward processes"
MEND = "look at the limits above and at free memory; judge.processes=0 scores in the driver, without a deadline"
MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def ray_cluster() -> Finding:
    """A run joins the cluster that RAY_ADDRESS names; without one, it starts its own."""
    given = os.environ.get("RAY_ADDRESS", "")
    if given in ("", "local"):
        return ok("Ray cluster", "RAY_ADDRESS names none: a run starts its own")
    address = LOCAL.read_text().strip() if given == "auto" and LOCAL.is_file() else given
    mend = "ray start --head on the first machine (docs/clusters.md), or unset RAY_ADDRESS"
    try:
        place = host_and_port(address)
        socket.create_connection(place, timeout=PATIENCE_S).close()
    except (OSError, ValueError) as error:
        return problem("Ray cluster", f"RAY_ADDRESS={given}: no answer ({error})", mend)
    return ok("Ray cluster", f"{place[0]}:{place[1]} answers")


def host_and_port(address: str) -> tuple[str, int]:
    """Raises ValueError where there are none."""
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    if not parts.hostname or not parts.port:
        raise ValueError("expected host:port, or an address with both")
    return parts.hostname, parts.port


def token() -> Finding:
    """A cluster that others can reach asks for a token; a run that joins one needs it."""
    joins = os.environ.get("RAY_ADDRESS", "") not in ("", "local")
    if os.environ.get(MODE, "token" if not joins else "").lower() != "token":
        said = f"{MODE}={os.environ.get(MODE, '')}: whoever reaches the cluster's ports can run code on it"
        mend = f"export {MODE}=token; ray get-auth-token --generate (SECURITY.md)"
        return problem("token", said, mend) if joins else note("token", said, mend)
    if not joins:
        return ok("token", "a run's own cluster gets a new one")
    file = Path(os.environ.get(PATH, "~/.ray/auth_token")).expanduser()
    if os.environ.get(TOKEN) or (file.is_file() and file.read_text().strip()):
        return ok("token", "there")
    return problem(
        "token",
        f"{MODE}=token, and there is none in {TOKEN} or {file}",
        "copy ~/.ray/auth_token from the first machine",
    )


def sandbox() -> list[Finding]:
    """A reward that answers must be heard, and one that hangs must be killed."""
    return asyncio.run(try_processes())


async def try_processes() -> list[Finding]:
    processes = Processes(1, DEADLINE_S, "its deadline")
    try:
        answer = await processes.run(four, {})
        if answer != 4:
            return [problem(REWARDS, f"answered {answer} in place of 4", MEND)]
        return [await hang(processes), mathematics()]
    except (RewardError, OSError) as error:
        return [problem(REWARDS, str(error), MEND)]
    finally:
        processes.stop()


async def hang(processes: Processes) -> Finding:
    started = time.monotonic()
    try:
        await processes.run(for_ever, {})
    except RewardError as error:
        if error.kind == "timeouts":
            return ok(REWARDS, f"one that hung was killed after {time.monotonic() - started:.1f} s")
        return problem(REWARDS, str(error), MEND)
    return problem(REWARDS, "one that hangs is not killed", MEND)


def four() -> int:
    return 4


def for_ever() -> None:
    time.sleep(60)


def mathematics() -> Finding:
    """Answers without a rule of their own are compared by math-verify."""
    try:
        must_be_installed()
    except Exception as error:
        return note("math-verify", str(error), "pip install 'marl[math]'")
    return ok("math-verify", "there")
