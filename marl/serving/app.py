"""The HTTP surface: OpenAI's paths, health and metrics."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from marl.config.command_options import KEY, LOOPBACK
from marl.serving.refusals import Refused, short
from marl.serving.service import OTHER, Service

LARGEST_BODY = 8 << 20
"""Bytes of a request that are read."""


def make_app(service: Service, api_key: str | None = None, hosts: Collection[str] = ()) -> FastAPI:
    """``api_key``: what requests must bring, health alone excepted; without one they must be for this machine, or one of ``hosts``."""

    app = FastAPI(
        title="marl serve",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(guard(api_key, hosts))],
    )
    started = int(time.time())

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return answer_of(error)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> JSONResponse:
        return answer_of(
            Refused(error.status_code, f"{request.method} {short(request.url.path)}: {error.detail}; expected {PATHS}")
        )

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": service.failed or "ok"}, 503 if service.failed else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.measures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [model_of(service, name, started) for name in service.player.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        if name not in service.player.models:
            known = ", ".join(service.player.models)
            raise Refused(
                404, f"model={short(repr(name))}: no such model; expected one of {known}", "model_not_found", "model"
            )
        return model_of(service, name, started)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await complete(service, request)

    return app


def guard(api_key: str | None, hosts: Collection[str]) -> Callable[[Request], Awaitable[None]]:
    """A check of every request to a path that there is. Raises Refused."""

    async def allowed(request: Request) -> None:
        if api_key is None:
            must_be_for_this_machine(request, {*LOOPBACK, *hosts})
        elif request.url.path != "/health":
            must_bring(request, api_key)

    return allowed


PATHS = "POST /v1/chat/completions, GET /v1/models, /health or /metrics"


def answer_of(error: Refused) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, headers=headers)


def must_be_for_this_machine(request: Request, names: Collection[str]) -> None:
    """Raise Refused for what a page of the web sends through the browser of whoever serves: the page's name stands in its headers,
    whatever address that name leads to."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    sent = {"Host": (host, host)} | ({} if origin is None else {"Origin": (origin, origin.partition("//")[2])})
    for header, (value, name) in sent.items():
        if name_of(name) not in names:
            raise Refused(
                403,
                f"{header}: {short(value)}: without an access key, requests are answered for "
                f"{', '.join(sorted(names))} alone; serve with --allow-host NAME, or with {KEY} set",
                "host_not_allowed",
            )


def name_of(host: str) -> str | None:
    """The name or address of a ``host:port``."""
    with suppress(ValueError):
        return urlsplit(f"//{host}").hostname
    return None


def must_bring(request: Request, api_key: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), api_key.encode()):
        raise Refused(401, "no valid access key; send Authorization: Bearer <key>", "invalid_api_key")


def model_of(service: Service, name: str, started: int) -> dict[str, Any]:
    own = {"agents": service.player.models[name], "max_tokens": service.player.longest[name]}
    return {"id": name, "object": "model", "created": started, "owned_by": "marl"} | own


async def complete(service: Service, request: Request) -> Response:
    try:
        asked = service.read(await body_of(request))
    except Refused as error:
        service.measures.ended(OTHER, error.status, 0.0)
        raise
    if asked.stream:
        events = service.stream(asked)
        first = await unless_gone(request, anext(events))  # what fails before it has a status of its own
        return StreamingResponse(following(first, events), media_type="text/event-stream")
    return JSONResponse(await unless_gone(request, service.complete(asked)))


async def following(first: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def body_of(request: Request) -> Any:
    try:
        body = json.loads((await bytes_of(request)).decode())
        json.dumps(body, ensure_ascii=False).encode()  # JSON can hold half characters, which no answer could repeat
        return body
    except (ValueError, RecursionError) as error:
        raise Refused(
            400, f"the body is not JSON: {error}; expected a chat completion's request", "invalid_body"
        ) from None


async def bytes_of(request: Request) -> bytes:
    read = bytearray()
    try:
        async for part in request.stream():
            read += part
            if len(read) > LARGEST_BODY:
                raise Refused(
                    413, f"the body has more than {LARGEST_BODY} bytes; expected a shorter conversation", "too_large"
                )
    except ClientDisconnect:
        raise gone() from None
    return bytes(read)


def gone() -> Refused:
    return Refused(499, "the client is gone", "client_closed_request")


async def unless_gone(request: Request, work: Any) -> Any:
    """The result of some work, which ends where the client is gone before it."""
    working, left = asyncio.create_task(work), asyncio.create_task(client_gone(request))
    try:
        await asyncio.wait({working, left}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise gone()
        return working.result()
    finally:
        for task in (working, left):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
