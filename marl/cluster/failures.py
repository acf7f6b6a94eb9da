"""Error messages for a failed worker or server: its owner, its current call, its last log lines."""

import re
from pathlib import Path

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from marl.utils.deadlines import DeadlinePassed

PID = re.compile(r"\bpid[=:]\s*(\d+)")
NAME = re.compile(r"^\s*name: (\S+)", re.MULTILINE)
ERROR = re.compile(r"\b\w*(Error|Exception): ")
PEER_GONE = re.compile(r"gloo/|ProcessGroup\w*|Dist(Backend|Network|Store)Error|NCCL (error|communicator)")
"""Errors of a collective whose other side died or hangs."""
PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
"""Between the choice of a free port and its use another process took it: made anew, a group chooses another."""
ENGINE_FAILED = re.compile(r"EngineDeadError|Engine core initialization failed")
"""vLLM's errors of an engine that died, or did not start; the cause is in the engine's own output."""
TIMED_OUT = re.compile(r"[Tt]imed ?out|[Tt]imeout")
DEATHS = (RayActorError, NodeDiedError, WorkerCrashedError, ObjectLostError, OutOfMemoryError, LocalRayletDiedError)
"""Ray's errors of a process, or a node, that is gone; the machine's memory may have been short."""
LAST_LINES = 15
ENGINE_LINES = 8


class GroupFailed(RuntimeError):
    """A worker or a server of a policy or a critic died or raised; this attempt at the run cannot go on."""


class GroupLost(GroupFailed):
    """A process died, or lost another that it computes with: the run can be built anew and go on."""


class GroupHung(GroupLost):
    """A process gives no sign of life."""


class StartFailed(GroupLost):
    """A process raised while it was made: a mistake that the next one would make again, unless the run has worked before."""


class WeightsNotArrived(RuntimeError):
    """A server does not hold its trainer's weights after their sync: what it samples is another policy's."""

    def __init__(self, policy: str, server: str, step: int, problem: str) -> None:
        super().__init__(
            f"policy {policy!r}, step {step}: {server} does not hold the trainer's weights after their sync: {problem}. Look at "
            "the server's log and at the engine's version; resources.weight_check=none trains regardless"
        )


def group_failed(whose: str, what: str, error: RayError) -> GroupFailed:
    """Error naming the owner, the call and the cause; for a dead process, also its last log lines. GroupLost where the run can be
    built anew, GroupFailed for an error that would only be raised again."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, RayActorError):
        error = error.cause  # one of its processes tells of another's death
    if isinstance(error, RayTaskError):
        cause = error.cause
        told = f"{whose} failed while {what}: {type(cause).__name__}: {cause}{engine_errors(str(error))}"
        return kind_of(cause)(told)
    text = str(error)
    name, pid = NAME.search(text), PID.search(text)
    who = f"process {name[1] if name else '?'} (pid {pid[1] if pid else '?'})"
    kind = "died" if isinstance(error, RayActorError) else f"failed ({type(error).__name__})"
    here = f"ip: {ray.util.get_node_ip_address()}" in text
    said = said_last(int(pid[1])) if pid and here else " nothing" if here else " on another node: see Ray's logs there"
    raised = isinstance(error, RayActorError) and error.actor_init_failed
    lost = StartFailed if raised and not PORT_TAKEN.search(text) else GroupLost
    return lost(f"{whose} while {what}: {who} {kind}: {summary(text)}\n  its last lines:{said}")


def kind_of(raised: BaseException | None) -> type[GroupFailed]:
    """The kind of failure that an error raised inside a process stands for."""
    if isinstance(raised, TimeoutError):
        return GroupHung
    told = f"{type(raised).__name__}: {raised}"
    if isinstance(raised, RuntimeError) and PEER_GONE.search(told):
        return GroupHung if TIMED_OUT.search(told) else GroupLost
    return GroupLost if engine_is_dead(raised) else GroupFailed


def can_be_mended(error: BaseException) -> bool:
    """True if the run may go on once its processes are built anew; all else would only fail again."""
    if isinstance(error, RayTaskError):
        error = error.cause
        return isinstance(error, DEATHS) or issubclass(kind_of(error), GroupLost)
    return isinstance(error, (GroupLost, WeightsNotArrived, DeadlinePassed, *DEATHS))


def is_a_hang(error: BaseException) -> bool:
    """True if somebody did not answer in time: what all processes do at that moment tells why."""
    return isinstance(error, (GroupHung, DeadlinePassed))


def engine_is_dead(error: BaseException | None) -> bool:
    """True for vLLM's error of a server whose engine process is gone; this process need not have vLLM."""
    return type(error).__name__ == "EngineDeadError"


def engine_errors(text: str) -> str:
    """Error lines of an engine's processes, which write into the log of the server that failed with this traceback."""
    if not ENGINE_FAILED.search(text) or f"ip={ray.util.get_node_ip_address()}" not in text:
        return ""
    lines = (line for pid in dict.fromkeys(PID.findall(text)) for line in log_lines(int(pid)))
    found = dict.fromkeys(line.split("] ", 1)[-1].strip()[:300] for line in lines if ERROR.search(line))
    return "".join(f"\n    {line}" for line in list(found)[:ENGINE_LINES])


def summary(text: str) -> str:
    lines = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not re.match(r"\s*(class_name|actor_id|namespace|ip|pid|name):", line)
    ]
    return " ".join(lines)[:400]


def said_last(pid: int) -> str:
    return "".join(f"\n    {line}" for line in last_lines(pid)) or " nothing"


def last_lines(pid: int) -> list[str]:
    return log_lines(pid)[-LAST_LINES:]


def log_lines(pid: int) -> list[str]:
    """Log lines of a local process and its children, from Ray's session folder."""
    node = ray._private.worker._global_node
    if node is None:
        return []
    logs = Path(node.get_logs_dir_path())
    written = sorted(logs.glob(f"worker-*-{pid}.*"))
    return [
        line for path in written for line in path.read_text(errors="replace").splitlines() if not line.startswith(":")
    ]
