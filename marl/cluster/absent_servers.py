"""Stand-ins for the servers of a run that generates nothing, because all its turns are read from a ledger."""

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from marl.cluster.failures import GroupFailed
from marl.types import Metrics, PolicyName


class NotRecorded(GroupFailed):
    """A turn is neither in the ledger nor can it be generated."""


class AbsentServers:
    """No server of a policy, with the surface of :class:`marl.rollout.servers.PolicyServers` and of verl's weight sync."""

    server_handles: tuple = ()
    server_addresses: tuple = ()

    def __init__(self, policy: str) -> None:
        self.policy = policy

    def client(self, adapter: str | None = None) -> "AbsentClient":
        return AbsentClient(self.policy)

    async def each_replica(self, method: str) -> None:
        """None is awake."""

    def stop(self) -> None:
        """None was started."""


class AbsentClient:
    """Answers no request."""

    def __init__(self, policy: str) -> None:
        self.policy = policy

    async def generate(self, request_id: str, **_: Any) -> NoReturn:
        raise not_recorded(self.policy, f" ({request_id}: step, task, sample, agent)")


class AbsentEndpoint:
    """Stands for a server elsewhere that must not be asked."""

    def __init__(self, policy: str, server: Any) -> None:
        self.policy, self.endpoint, self.usage = policy, server.endpoint, server.usage

    async def complete(self, body: Any) -> NoReturn:
        raise not_recorded(self.policy, "")


def not_recorded(policy: str, where: str) -> NotRecorded:
    return NotRecorded(
        f"policy {policy!r} is asked for a turn that the ledger does not hold{where}: the runner, the prompts or the data are other "
        "than when it was recorded, or the run was killed before that turn; from=ROUND goes on live"
    )


class NoWeightSync:
    """Stands for the weight sync of a run without servers: recorded turns pass for those of the step's weights."""

    proven: ClassVar[dict[str, Any]] = {}

    def __init__(self, policies: Mapping[PolicyName, Any]) -> None:
        self.policies = policies

    async def to_step(self, step: int) -> Metrics:
        for group in self.policies.values():
            group.version = step
        return {}
