"""An OpenAI-compatible server on this machine, in a thread of its own, that answers as a test wants."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager

from aiohttp import web

KEY = "sk-very-secret-0123456789"


def completion(text="4", reason="stop", message=None, usage=None, **fields):
    choice = {"index": 0, "message": {"role": "assistant", "content": text} | (message or {}), "finish_reason": reason}
    body = {"object": "chat.completion", "choices": [choice | fields.pop("choice", {})], **fields}
    return body | {"usage": usage or {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}


class Judge:
    """Answers request number n with ``script(n, body)``: a body, (status, body) or (status, body, headers)."""

    def __init__(self, script=lambda number, body: completion()):
        self.script, self.bodies, self.headers, self.at = script, [], [], []
        self.inside, self.most_inside = 0, 0

    async def chat(self, request):
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            return await self.answer(request)
        finally:
            self.inside -= 1

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.at.append(time.monotonic())
        said = self.script(len(self.bodies), body)
        said = await said if asyncio.iscoroutine(said) else said
        status, content, headers = (*said, {})[:3] if isinstance(said, tuple) else (200, said, {})
        text = content if isinstance(content, str) else json.dumps(content)
        return web.Response(status=status, text=text, headers=headers, content_type="application/json")

    async def models(self, request):
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401, text=f"bad key {request.headers.get('Authorization')}")
        return web.json_response({"data": [{"id": "m-1"}, {"id": "m-2"}]})


async def start(judge):
    """The server's runner and its address."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.chat)
    app.router.add_get("/v1/models", judge.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


async def stop(runner):
    """End the server, and answers that nobody waits for any more."""
    await runner.cleanup()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@contextmanager
def serving(judge):
    """The address of a server that answers as long as the block lasts."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner, address = asyncio.run_coroutine_threadsafe(start(judge), loop).result(10)
    try:
        yield address
    finally:
        asyncio.run_coroutine_threadsafe(stop(runner), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
