"""Clients that ask the judge of ``tests.judge``, as a run's episodes would."""

import asyncio
from types import SimpleNamespace

from marl.config.endpoints import Endpoint
from marl.controller.endpoint_client import EndpointClient
from marl.rollout.endpoint import EndpointServer
from marl.types import Task
from tests.judge import serving

TASK = Task("train/7", [], "4", "x", lambda text: None)
QUESTION = [{"role": "user", "content": "2+2?"}]
SAMPLING = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_tokens": 8}
QUICK = {"backoff_s": 0.01, "timeout_s": 2.0, "deadline_s": 5.0}


def serve(judge, work, **endpoint):
    """Run ``work(client)`` beside the server."""
    with serving(judge) as address:
        return asyncio.run(work(client_of(address, **endpoint)))


def client_of(base_url, processes=1, thinking="auto", **endpoint):
    own = Endpoint(base_url=base_url, **({"model": "m-1"} | QUICK | endpoint))
    return EndpointClient("judge", SimpleNamespace(), EndpointServer("judge", own, processes), thinking)


def act(client, observation=QUESTION, **sampling):
    return client.act(
        "critic", observation, 2, None, task=TASK, session="s", seed=2**40 + 3, sampling=SAMPLING | sampling,
        max_prompt_length=1,
    )  # fmt: skip


def one(judge, **endpoint):
    return serve(judge, act, **endpoint)


def many(count):
    async def work(client):
        return await asyncio.gather(*(act(client) for _ in range(count)))

    return work


def setup_of(client):
    endpoint = dict(vars(client.server.endpoint))
    config, method = SimpleNamespace(policies={"judge": {"endpoint": endpoint}}), SimpleNamespace(offline=False)
    return SimpleNamespace(config=config, endpoints=["judge"], method=method)
