"""A request from its body to its answer, with admission, deadline and failures."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from marl.cluster.failures import GroupFailed
from marl.serving import chat_reply
from marl.serving.chat_reply import Head
from marl.serving.chat_request import ChatRequest, must_be_readable, read_request
from marl.serving.gate import Gate
from marl.serving.host import Host
from marl.serving.measures import Measures
from marl.serving.player import Player
from marl.serving.refusals import Refused
from marl.types import Episode, Turn
from marl.utils.secret_masking import masked_text

logger = logging.getLogger(__name__)
OTHER = "(none)"
"""Label of requests whose model is not known."""
Event = dict[str, Any] | None
"""A turn of a sample, or None at the end."""


@dataclass(frozen=True)
class Limits:
    concurrent: int = 8
    """Episodes that are played at the same time."""
    queue: int = 64
    """Episodes that wait."""
    timeout_s: float = 300.0
    """Deadline of a request, its wait included."""


class Service:
    def __init__(self, player: Player, host: Host, limits: Limits) -> None:
        self.player, self.host, self.limits = player, host, limits
        self.gate = Gate(limits.concurrent, limits.queue)
        self.measures = Measures(self.gate)
        self.failed: str | None = None
        """Reason why no request can be answered any more."""

    def read(self, body: Any) -> ChatRequest:
        request = read_request(body, self.player.longest)
        if self.player.max_prompt_length is not None:
            must_be_readable(request.messages, self.player.max_prompt_length)
        return request

    async def complete(self, request: ChatRequest) -> dict[str, Any]:
        """The whole answer. Raises Refused."""
        with self.timed(request.model):
            episodes = await self.episodes(request)
        return chat_reply.completion(Head(request.model), episodes, request.sampling.get("stop", ()))

    async def stream(self, request: ChatRequest) -> AsyncIterator[str]:
        """Events: each turn as it ends, then the answers. Raises Refused before the first event; later, an event says it."""
        head, queue, loop = Head(request.model), asyncio.Queue[Event](), asyncio.get_running_loop()

        def heard(turn: Turn, episode: Episode) -> None:  # on the team's loop
            said = {"sample": episode.sample, **chat_reply.heard(turn)}
            loop.call_soon_threadsafe(queue.put_nowait, said)

        work = asyncio.create_task(self._timed_episodes(request, heard))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            said, begun = await queue.get(), False
            while said is not None:
                yield chat_reply.turn_chunk(head, said.pop("sample"), said)
                said, begun = await queue.get(), True
            for text in self._end(request, head, work, begun):
                yield text
        finally:
            work.cancel()

    def _end(self, request: ChatRequest, head: Head, work: asyncio.Task[list[Episode]], begun: bool) -> list[str]:
        try:
            episodes, stops = work.result(), request.sampling.get("stop", ())
        except Refused as error:
            if not begun:
                raise
            return [chat_reply.event(error.body()), chat_reply.DONE]
        return list(chat_reply.final_chunks(head, episodes, stops, request.include_usage))

    async def _timed_episodes(self, request: ChatRequest, heard: Callable[[Turn, Episode], None]) -> list[Episode]:
        with self.timed(request.model):
            return await self.episodes(request, heard)

    async def episodes(
        self, request: ChatRequest, heard: Callable[[Turn, Episode], None] = lambda turn, episode: None
    ) -> list[Episode]:
        """The request's n episodes. Raises Refused."""
        if self.failed:
            raise Refused(503, self.failed, "team_failed")
        seed = secrets.randbits(62) if request.seed is None else request.seed
        with self.gate.admit(request.n):
            try:
                async with asyncio.timeout(self.limits.timeout_s), asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._episode(request, seed, i, heard)) for i in range(request.n)]
            except TimeoutError:
                raise Refused(
                    504,
                    f"no answer within {self.limits.timeout_s:g} s; ask for less, or serve with a larger --timeout",
                    "timeout",
                ) from None
            except ExceptionGroup as failures:
                raise self.refusal(failures.exceptions[0]) from None
        episodes = [task.result() for task in tasks]
        self.measures.used(chat_reply.usage_of(episodes))
        for turn in (turn for episode in episodes for turn in episode.turns):
            self.measures.turns.labels(turn.agent).inc()
        return episodes

    async def _episode(
        self, request: ChatRequest, seed: int, sample: int, heard: Callable[[Turn, Episode], None]
    ) -> Episode:
        async with self.gate.place():
            work = self.player.play(request.model, request.messages, request.sampling, seed, sample, heard)
            return await self.host.run(work)

    def refusal(self, error: Exception) -> Refused:
        if isinstance(error, Refused):
            return error
        said = masked_text(f"{type(error).__name__}: {error}")
        if isinstance(error, GroupFailed):
            self.failed = f"the team's servers have failed, start marl serve again: {said}"
            return Refused(503, self.failed, "team_failed")
        if isinstance(error, TemplateError):
            logger.warning("a chat template refused a request's messages: %s", said)
            return Refused(
                400, f"messages: the chat template of an agent refuses them: {error}", "invalid_value", "messages"
            )
        logger.error("a request failed: %s", said)
        return Refused(500, f"the episode failed: {said}", "episode_failed")

    @contextmanager
    def timed(self, model: str) -> Iterator[None]:
        """Count a request with its status and seconds; 499 for a client that has gone."""
        started, status = time.monotonic(), 499
        try:
            yield
            status = 200
        except Refused as error:
            status = error.status
            raise
        finally:
            self.measures.ended(model, status, time.monotonic() - started)
