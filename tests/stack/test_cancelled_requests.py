"""Requests whose callers have gone, on a server of its own process."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from verl.workers.rollout.replica import TokenOutput

from marl.rollout.hf_server import HFServer
from marl.rollout.servers import CoalescingClient, DirectClient
from tests.tiny_model import make_model

LONG, ANSWER = 1900, 150


@pytest.fixture
def server(cluster, tmp_path, bpe_tokenizer):
    make_model().save_pretrained(tmp_path / "model")
    bpe_tokenizer.save_pretrained(tmp_path / "words")
    rollout = SimpleNamespace(
        custom={},
        dtype="float32",
        enable_prefix_caching=True,
        max_num_seqs=64,
        response_length=LONG,
        max_model_len=2000,
    )
    model = {
        "path": str(tmp_path / "model"), "tokenizer_path": str(tmp_path / "words"), "trust_remote_code": False,
        "override_config": {},
    }  # fmt: skip
    made = ray.remote(HFServer).options(num_cpus=0, max_concurrency=100).remote(rollout, model, "cpu")
    ray.get([made.ready.remote(), made.__ray_call__.remote(pad_within_the_vocabulary)], timeout=120)
    yield made
    ray.kill(made)


def pad_within_the_vocabulary(server):
    server.reader.pad_id = 0


def state(server):
    return (
        len(server.engine.rows) + len(server.engine.waiting),
        len(server.named) + len(server.tickets),
        server.stats["requests"],
    )


async def until(server, condition):
    async with asyncio.timeout(60):
        while not condition(await server.__ray_call__.remote(state)):
            await asyncio.sleep(0.002)


@pytest.mark.slow
def test_a_server_gives_up_requests_and_keeps_the_others_of_their_call(server):
    rollout = SimpleNamespace(rollout=SimpleNamespace(max_num_seqs=100))
    client = CoalescingClient(SimpleNamespace(actor_rollout_ref=rollout), None, [server])

    def asking(tokens, seed):
        sampling = {"max_tokens": tokens, "seed": seed, "ignore_eos": True}
        return asyncio.ensure_future(client.generate("s", prompt_ids=[20, 21, 22], sampling_params=sampling))

    async def run():
        alone = await asking(ANSWER, 9)
        asked = [asking(LONG, seed) for seed in range(8)]
        kept = asking(ANSWER, 9)
        await until(server, lambda seen: seen[0] == 9)
        for one in asked:
            one.cancel()
        await until(server, lambda seen: seen[0] <= 1)
        assert (await kept).token_ids == alone.token_ids and len(alone.token_ids) == ANSWER
        await until(server, lambda seen: seen == (0, 0, 2))
        assert all(one.cancelled() for one in asked)

    asyncio.run(run())


class Engine:
    """Stands for an engine's server: answers the prompt of one token, and any other never."""

    def __init__(self):
        self.asked, self.given_up = 0, []

    async def generate(self, request_id, prompt_ids, **_):
        self.asked += 1
        try:
            await asyncio.sleep(0 if len(prompt_ids) == 1 else 600)
        except asyncio.CancelledError:
            self.given_up.append(prompt_ids)
            raise
        return TokenOutput(token_ids=prompt_ids, log_probs=[0.0], extra_fields={})

    async def state(self):
        return self.asked, sorted(self.given_up)


@pytest.mark.slow
def test_an_engine_hears_which_callers_have_gone(cluster):
    engine = ray.remote(Engine).options(num_cpus=0).remote()
    rollout = SimpleNamespace(name="vllm", full_determinism=False)
    client = DirectClient(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), None, [engine])

    def asking(*prompt):
        return asyncio.ensure_future(client.generate("s", prompt_ids=list(prompt), sampling_params={}))

    async def until(expected):
        async with asyncio.timeout(60):
            while await engine.state.remote() != expected:
                await asyncio.sleep(0.01)

    async def run():
        one, two, kept = asking(1, 2), asking(3, 4), asking(5, 6)
        await until((3, []))
        one.cancel(), two.cancel()
        await until((3, [[1, 2], [3, 4]]))
        assert (await asking(7)).token_ids == [7] and not kept.done()
        kept.cancel()
        await until((4, [[1, 2], [3, 4], [5, 6]]))

    asyncio.run(run())
    ray.kill(engine)
