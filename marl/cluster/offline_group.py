"""Policies of a run that plays nothing (``method.source=rows`` or ``episodes``): workers without servers."""

from typing import Any, NoReturn

from marl.utils.spans import Span


class NoServer:
    """Placeholder for a policy's servers."""

    async def generate(self, *arguments: Any, **settings: Any) -> NoReturn:
        raise RuntimeError("nothing is played in this run, which has no servers: set method.source=play")


class WithoutServers:
    """Mixed into a policy group."""

    version: int

    def client(self) -> NoServer:
        return NoServer()

    async def start_servers(self) -> None:
        """There are none."""

    async def free_servers(self) -> None:
        """There are none."""

    async def sync_weights(self, step: int) -> None:
        self.version = step

    async def server_spans(self) -> list[Span]:
        return []


def without_servers(kind: type) -> Any:
    """This kind of policy group, without servers."""
    return type(f"Offline{kind.__name__}", (WithoutServers, kind), {})
