"""An OpenAI-compatible server over HTTP: requests with deadlines, retries, a rate limit and a token budget, and their counts.

The access key is read from its environment variable for every request: no object, error or log holds it.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies, proxy_bypass

from yarl import URL

from marl.config.endpoints import Endpoint
from marl.rollout.chat_completion import QUOTA, TOO_LONG, NonsenseAnswer, Reply, listed_models, read_reply, shown
from marl.types import Metrics

if TYPE_CHECKING:
    import aiohttp  # heavy: imported where a request is made, for most runs make none

JITTER = random.Random()
"""Draws pauses alone: it moves no generator that results are drawn from."""
LARGEST_BODY = 32 << 20
"""Bytes of an answer that are read."""
CHECK_SECONDS = 10.0
"""Deadline of the check before a run."""
TRY_AGAIN = frozenset({408, 409, 425, 429})
"""Statuses, beside 5xx, after which the same request may succeed."""

KINDS = ("requests", "retries", "tokens", "seconds")
"""``seconds`` is their sum over the requests."""
Counts = dict[str, float]


class EndpointError(RuntimeError):
    """Raised where a request got no usable answer; others may."""


class PromptTooLong(EndpointError):
    """Raised where the server's model cannot read so long a conversation."""


class EndpointFailed(RuntimeError):
    """Raised where no request can succeed: access, address, model or budget."""


class TryAgain(Exception):
    """A failed attempt, and the seconds after which the server wants to be asked again."""

    def __init__(self, cause: str, after: float | None = None) -> None:
        super().__init__(cause)
        self.after = after


class Pace:
    """Spaces requests evenly: at most so many a minute."""

    def __init__(self, per_minute: float | None) -> None:
        self.interval, self.free_at = 60 / per_minute if per_minute else 0.0, -math.inf

    async def wait(self) -> None:
        now = asyncio.get_running_loop().time()
        start = max(now, self.free_at)
        self.free_at = start + self.interval
        if start > now:
            await asyncio.sleep(start - now)


class Usage:
    """Counts since they were last taken, and the tokens of the whole run, which :meth:`go_on_from` tells a process.

    Each of ``processes`` may use an equal share of what is left of the budget then.
    """

    def __init__(self, budget: int | None = None, processes: int = 1) -> None:
        self.budget, self.processes = budget, processes
        self.counts: Counts = dict.fromkeys(KINDS, 0.0)
        self.before, self.own = 0, 0
        """Tokens that the run had used when this process was last told, and those of this process since."""

    @property
    def spent(self) -> int:
        """Tokens of the run, as far as this process knows."""
        return self.before + self.own

    @property
    def is_spent(self) -> bool:
        """True if this process has used its share of the budget."""
        if self.budget is None:
            return False
        left = self.budget - self.before
        return left <= 0 or self.own >= max(1, left // self.processes)

    def answered(self, tokens: int) -> None:
        self.counts["tokens"] += tokens
        self.own += tokens

    def asked(self, seconds: float, retries: bool) -> None:
        self.counts["requests"] += 1
        self.counts["retries"] += retries
        self.counts["seconds"] += seconds

    def go_on_from(self, spent: int) -> None:
        """Begin a share anew if the run has used more tokens than this process knew. It may be told twice."""
        if spent > self.before:
            self.before, self.own = spent, 0

    def add(self, counts: Mapping[str, float]) -> None:
        """Count what another process has used."""
        self.counts = {kind: self.counts[kind] + counts[kind] for kind in KINDS}
        self.go_on_from(self.spent + int(counts["tokens"]))

    def take(self) -> Counts:
        """Counts since the last call."""
        taken, self.counts = self.counts, dict.fromkeys(KINDS, 0.0)
        return taken


class Sessions:
    """One HTTP session for all requests in flight. The last of them closes it, so that nothing stays open between steps."""

    def __init__(self) -> None:
        self.users = 0
        self.session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[aiohttp.ClientSession]:
        import aiohttp

        if self.session is None:
            unlimited = aiohttp.ClientTimeout(total=None)
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=unlimited)
        session = self.session
        self.users += 1
        try:
            yield session
        finally:
            self.users -= 1
            if not self.users:
                self.session = None
                await session.close()


class EndpointServer:
    def __init__(self, policy: str, endpoint: Endpoint, processes: int = 1) -> None:
        """``processes``: number of processes that ask this server; each has its share of the limits."""
        self.key, self.endpoint = f"policies.{policy}.endpoint", endpoint
        self.who = f"the endpoint of policy {policy!r} ({endpoint.base_url}, model {endpoint.model})"
        self.url = f"{endpoint.base_url.rstrip('/')}/chat/completions"
        rate = endpoint.requests_per_minute
        self.pace = Pace(rate and rate / processes)
        self.usage = Usage(endpoint.token_budget, processes)
        self.gate = asyncio.Semaphore(max(1, endpoint.max_concurrent // processes))
        self.sessions = Sessions()

    async def complete(self, body: Mapping[str, Any]) -> Reply:
        """The completion of a request. Raises EndpointError where there is none within the attempts and the deadline,
        PromptTooLong where there can be none, EndpointFailed where no request can succeed."""
        loop, left, last = asyncio.get_running_loop(), self.endpoint.deadline_s, TryAgain("nothing was asked")
        attempt = 0
        while attempt < self.endpoint.max_attempts and left > 0:
            async with self._turn():
                started = loop.time()
                try:
                    return await self._attempt(body, min(left, self.endpoint.timeout_s))
                except TryAgain as failed:
                    last = failed
                finally:
                    seconds = loop.time() - started
                    self.usage.asked(seconds, retries=attempt > 0)
            attempt += 1
            left -= seconds
            wait = self._wait(attempt, last)
            if attempt == self.endpoint.max_attempts or wait >= left:
                break
            left -= wait
            await asyncio.sleep(wait)
        raise EndpointError(self._gave_up(attempt, last))

    async def models(self) -> list[str]:
        """Names of the models that the server lists; none where it lists none. Raises EndpointFailed where it cannot be reached,
        fails or denies access."""
        import aiohttp

        seconds, url = min(CHECK_SECONDS, self.endpoint.timeout_s), f"{self.endpoint.base_url.rstrip('/')}/models"
        try:
            async with asyncio.timeout(seconds), self.sessions.lease() as session:
                status, _, text = await self._ask(session.get(url, **self._options()))
        except TimeoutError:
            cause = f"no answer within {seconds:.3g} s"
        except (aiohttp.ClientError, OSError) as error:
            cause = f"{type(error).__name__}: {self._clean(error)}"
        except TryAgain as error:
            cause = str(error)
        else:
            if status in (401, 403):
                raise self._refuses_all(status, text)
            if status < 500:
                return listed_models(text) if status == 200 else []
            cause = f"HTTP {status}: {self._clean(text)}"
        raise EndpointFailed(
            f"{self.who} cannot be reached: {cause}; start it, or set {self.key}.base_url to its address"
        )

    def _gave_up(self, attempts: int, last: TryAgain) -> str:
        asked = f"; the server asked to wait {last.after:g} s" if last.after is not None else ""
        tried = f"after {attempts} attempt{'s' if attempts != 1 else ''} within {self.endpoint.deadline_s:g} s"
        return (
            f"{self.who} gave no usable answer {tried}; the last one: {last}{asked}. Is it up, and does it answer at {self.url}? "
            f"Raise {self.key}.deadline_s, timeout_s or max_attempts if it only needs longer, or set requests_per_minute to its "
            "limit"
        )

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until the limits allow one more request. Raises EndpointFailed if the budget is spent."""
        async with self.gate:
            await self.pace.wait()
            if self.usage.is_spent:
                raise EndpointFailed(
                    f"{self.who} has spent {self.usage.spent} tokens of {self.key}.token_budget={self.endpoint.token_budget}"
                    f"{self._of_share()}; raise it and resume the run, or use fewer turns"
                )
            yield

    def _of_share(self) -> str:
        """An addition for a process that has used its share while others may not have."""
        if self.usage.spent >= (self.endpoint.token_budget or 0):
            return ""
        return f", and this process its share of what was left, one of {self.usage.processes}"

    def _wait(self, attempt: int, failed: TryAgain) -> float:
        """Seconds before the next attempt: twice as long each time, or up to about a second more than the server asks for, with
        jitter so that requests that failed together do not come back together."""
        own, jitter = float(self.endpoint.backoff_s * 2 ** (attempt - 1)), JITTER.uniform(0.5, 1.5)
        return own * jitter if failed.after is None else failed.after + min(own, 1.0) * jitter

    async def _attempt(self, body: Mapping[str, Any], seconds: float) -> Reply:
        import aiohttp

        try:
            async with asyncio.timeout(seconds), self.sessions.lease() as session:
                status, headers, text = await self._ask(session.post(self.url, json=body, **self._options()))
        except TimeoutError:
            raise TryAgain(f"no answer within {seconds:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise TryAgain(f"{type(error).__name__}: {self._clean(error)}") from None
        if status != 200:
            raise self._refusal(status, headers, text)
        try:
            reply = read_reply(text, sum(len(str(message)) for message in body["messages"]))
        except NonsenseAnswer as error:
            raise TryAgain(f"nonsense: {self._clean(error)}") from None
        self.usage.answered(reply.tokens)
        return reply

    def _options(self) -> dict[str, Any]:
        own = {"headers": self._headers(), "allow_redirects": False}  # one would carry the access key elsewhere
        return own | proxy_options(URL(self.url))

    async def _ask(self, request: AbstractAsyncContextManager[Any]) -> tuple[int, Mapping[str, str], str]:
        async with request as response:
            received = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                received += chunk
                if len(received) > LARGEST_BODY:
                    raise TryAgain(f"an answer of more than {LARGEST_BODY} bytes")
            return response.status, response.headers, received.decode(errors="replace")

    def _headers(self) -> dict[str, str]:
        name = self.endpoint.api_key_env
        if name is None:
            return {}
        if not os.environ.get(name):
            raise EndpointFailed(
                f"{self.key}.api_key_env={name}: this variable is not set in a process of the run; export it on every machine, or "
                "set controller.num_workers=0"
            )
        return {"Authorization": f"Bearer {os.environ[name].strip()}"}

    def _refusal(self, status: int, headers: Mapping[str, str], text: str) -> Exception:
        """The error of an HTTP status: worth another attempt, this request's own, or that of all requests."""
        said = f"HTTP {status}: {self._clean(text)}"
        if status in (401, 402, 404) or 300 <= status < 400 or (status == 429 and QUOTA.search(text)):
            return self._refuses_all(status, text)
        if status >= 500 or status in TRY_AGAIN:
            return TryAgain(said, seconds_of(headers.get("Retry-After")))
        if status in (400, 413, 422) and TOO_LONG.search(text):
            return PromptTooLong(f"{self.who} cannot read so long a conversation: {said}")
        if status == 403:  # some deny a single text so
            return EndpointError(
                f"{self.who} denied a request with {said}; may this account use model {self.endpoint.model}, and send such "
                f"texts? Check its rights, or set {self.key}.api_key_env to another"
            )
        return EndpointError(f"{self.who} refused a request with {said}; does it know every field that is sent? set "
                             f"{self.key}.extra_body={{<field>: null}} to leave one out")  # fmt: skip

    def _refuses_all(self, status: int, text: str) -> EndpointFailed:
        said = f"HTTP {status}: {self._clean(text)}"
        return EndpointFailed(f"{self.who} refuses every request with {said}; {self._remedy(status)}")

    def _remedy(self, status: int) -> str:
        if status in (401, 402, 403, 429):
            return f"set {self.key}.api_key_env to a variable with a valid key, and check its account"
        return f"set {self.key}.base_url and model to what the server has"

    def _clean(self, text: object) -> str:
        """A server's words, cut, without the access key: some repeat it."""
        key = os.environ.get(self.endpoint.api_key_env or "", "").strip()
        return shown(str(text).replace(key, "***") if key else text)


def usage_metrics(policy: str, counts: Mapping[str, float]) -> Metrics:
    """Sums, and the mean seconds of a request; 0 where there was none."""
    means = {**counts, "seconds": counts["seconds"] / max(1, counts["requests"])}
    return {f"endpoint/{policy}/{kind}": float(means[kind]) for kind in KINDS}


def proxy_options(url: URL) -> dict[str, Any]:
    """Options of a request for the environment's proxy. aiohttp's ``trust_env`` would send what ``~/.netrc`` holds, too."""
    proxy = getproxies().get(url.scheme)
    if not proxy or (url.host and proxy_bypass(url.host)):
        return {}
    import aiohttp

    found = URL(proxy if "://" in proxy else f"http://{proxy}")
    return {"proxy": found.with_user(None), "proxy_auth": aiohttp.BasicAuth.from_url(found)}  # errors show the address


def seconds_of(header: str | None) -> float | None:
    """Seconds of a ``Retry-After``, which is a number or a date; None for one that is neither."""
    if header is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", header.strip()):
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time())
    except (ValueError, TypeError):
        return None
