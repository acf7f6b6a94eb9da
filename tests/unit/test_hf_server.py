"""The hf server without Ray: requests come and go between tokens, weights and sleep come in between."""

import asyncio
import os
import pickle
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BartConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from marl.cluster import local
from marl.cluster.local import LocalServer
from marl.config.errors import ConfigError
from marl.preflight.checks import check_decodable
from marl.preflight.prepare import prepare
from marl.rollout import hf_server
from marl.rollout.attention import NEAR_ATTENTION
from marl.rollout.hf_model import check_attention, inexact_on_cpu
from marl.rollout.hf_server import HFServer, Pending
from marl.rollout.masks import window_of
from marl.rollout.requests import Request
from marl.rollout.servers import CoalescingClient
from tests.tiny_model import answers, make_model


@pytest.fixture
def server(tmp_path, bpe_tokenizer):
    return served(tmp_path, bpe_tokenizer, {})


def served(tmp_path, bpe_tokenizer, custom, kind=HFServer):
    make_model().save_pretrained(tmp_path / "model")
    bpe_tokenizer.save_pretrained(tmp_path / "words")
    rollout = SimpleNamespace(
        custom=custom,
        dtype="float32",
        enable_prefix_caching=True,
        max_num_seqs=64,
        response_length=40,
        max_model_len=200,
    )
    model = {
        "path": str(tmp_path / "model"), "tokenizer_path": str(tmp_path / "words"), "trust_remote_code": False,
        "override_config": {},
    }  # fmt: skip
    made = kind(rollout, model, "cpu")
    made.eos_ids, made.reader.pad_id = frozenset(), 0
    made.model.load_state_dict(make_model().state_dict())
    made.model.tie_weights()
    return made


def ask(tokens, seed, prompt=(20, 21, 22)):
    return [*prompt], {"max_tokens": tokens, "seed": seed}


def expected(tokens, seed, prompt=(20, 21, 22)):
    ids, log_probs, reason = answers(make_model(), [Request(tuple(prompt), tokens, seed)])[0]
    return ids, log_probs, reason, None


class Handle:
    """The server as the handle of an actor."""

    def __init__(self, server):
        self.calls = []
        for name in ("generate_many", "collect"):
            setattr(self, name, SimpleNamespace(remote=self.counted(name, getattr(server, name))))
        self.cancel = SimpleNamespace(remote=self.cancelling(server))

    def counted(self, name, method):
        async def call(*args):
            self.calls.append(name)
            return pickle.loads(pickle.dumps(await method(*args)))  # as through Ray

        return call

    def cancelling(self, server):
        def cancel(names):
            self.calls.append("cancel")
            server.cancel(names)

        return cancel


def client_of(server):
    rollout = SimpleNamespace(max_num_seqs=100)
    handle = Handle(server)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return CoalescingClient(config, None, [handle]), handle


def test_a_short_answer_does_not_wait_for_a_long_one_of_its_call(server):
    async def run():
        server.handover = 0.0
        first = await server.generate_many([ask(40, 1), ask(1, 2)])
        assert isinstance(first[0], Pending) and first[1] == expected(1, 2)
        ((ticket, answer),) = await server.collect([first[0].ticket])
        assert ticket == first[0].ticket and answer == expected(40, 1) and not server.tickets

    asyncio.run(run())


def test_the_client_hands_answers_out_as_they_come(server):
    server.handover = 0.0
    client, handle = client_of(server)
    ended = []

    async def one(tokens, seed):
        sampling = {"max_tokens": tokens, "seed": seed}
        output = await client.generate("s", prompt_ids=[20, 21, 22], sampling_params=sampling)
        ended.append(tokens)
        assert output.token_ids == expected(tokens, seed)[0]

    async def run():
        await asyncio.gather(one(150, 1), one(2, 2), one(40, 3))

    asyncio.run(run())
    assert (
        ended[0] == 2
        and sorted(ended) == [2, 40, 150]
        and handle.calls[0] == "generate_many"
        and set(handle.calls[1:]) == {"collect"}
    )


def test_a_bad_request_fails_alone(server):
    async def run():
        answered = await server.generate_many([ask(300, 1), ask(2, 2)])
        assert isinstance(answered[0], ValueError) and "max_model_len" in str(answered[0])
        left = answered[1]
        if isinstance(left, Pending):
            ((_, left),) = await server.collect([left.ticket])
        assert left == expected(2, 2)

    asyncio.run(run())


@pytest.mark.parametrize("prompt, parameters, said", [
    ([5, 120], {}, "token ids 5 to 120; expected at least one, from 0 to 119"),
    ([-1, 5], {}, "token ids -1 to 5"),
    ([], {}, "token ids none"),
    ([5], {"temperature": -1.0}, r"\{'temperature': -1.0\}: expected temperature >= 0"),
    ([5], {"temperature": "1"}, "temperature"),
    ([5], {"top_p": None}, "top_p"),
    ([5], {"top_k": 1.5}, "top_k"),
    ([5], {"max_tokens": 0}, "max_tokens=0; expected a whole number of at least 1"),
])  # fmt: skip
def test_what_the_engine_cannot_compute_fails_alone(server, prompt, parameters, said):
    async def run():
        beside = asyncio.ensure_future(server.generate([2, 3], {"max_tokens": 30, "seed": 1}, "a"))
        await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match=said):
            await server.generate(prompt, {"max_tokens": 3, **parameters}, "b")
        assert len((await beside).token_ids) == 30

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-6])
def test_a_tiny_temperature_is_greedy(server, temperature):
    async def answer(**parameters):
        return (await server.generate([2, 3], {"max_tokens": 9, "seed": 1, **parameters}, "a")).token_ids

    async def both():
        return await answer(temperature=temperature), await answer(temperature=0.0)

    one, other = asyncio.run(both())
    assert one == other


def test_an_answer_that_began_with_older_weights_is_of_their_step(server):
    async def run():
        server.global_steps = 1
        began = asyncio.ensure_future(server.generate([2, 3], {"max_tokens": 150, "seed": 1}, "a"))
        await asyncio.sleep(0.02)
        await server.load_weights({name: tensor.detach() for name, tensor in make_model().named_parameters()})
        await server.finish_weights(2)
        later = await server.generate([2, 3], {"max_tokens": 5, "seed": 1}, "b")
        assert (await began).extra_fields["min_global_steps"] == 1 and later.extra_fields["min_global_steps"] == 2

    asyncio.run(run())


def test_why_answers_may_depend_on_others_is_said(tmp_path, bpe_tokenizer, monkeypatch, caplog):
    served(tmp_path, bpe_tokenizer, {})
    assert "last bits" not in caplog.text
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    try:
        served(tmp_path, bpe_tokenizer, {"exact": False})
        assert "last bits" not in caplog.text, "nobody asked"
        served(tmp_path, bpe_tokenizer, {})
    finally:
        torch.set_num_threads(1)
    assert (
        "3 threads share" in caplog.text
        and "OMP_NUM_THREADS=2" in caplog.text
        and "intermediate_size" not in caplog.text
    )
    assert [why.split(":")[0] for why in inexact_on_cpu(LlamaConfig(intermediate_size=100), 1)] == [
        "intermediate_size=100"
    ]


def test_a_real_model_in_one_process_has_all_cores(tmp_path, bpe_tokenizer, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    found = []
    try:
        for limit, kind in ((10**9, LocalServer), (10, LocalServer), (10, HFServer)):
            monkeypatch.setattr(local, "REAL_MODEL", limit)
            served(tmp_path, bpe_tokenizer, {}, kind)
            found.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(1)
    assert found == [1, 3, 1]


def test_what_a_broken_weight_sync_brought_does_not_count_for_the_next(server):
    async def run():
        weights = {name: tensor.detach() for name, tensor in make_model().named_parameters()}
        names = list(weights)
        await server.load_weights({name: weights[name] for name in names[:5]})
        with pytest.raises(KeyError, match="the trainer sent no"):
            await server.finish_weights(8)
        await server.load_weights({name: weights[name] for name in names[5:]})
        with pytest.raises(KeyError, match="the trainer sent no"):
            await server.finish_weights(9)

    asyncio.run(run())


def test_weights_that_come_between_tokens_are_never_mixed_with_what_was_read_under_others(server):
    async def run():
        request = asyncio.ensure_future(server.generate_many([ask(2, 5, (30, 31, 32, 33))]))
        await request
        new = {name: 1.05 * tensor for name, tensor in make_model().named_parameters()}
        asked = asyncio.ensure_future(server.generate_many([ask(150, 1)]))
        await asyncio.sleep(0.02)
        await server.load_weights({name: tensor.detach() for name, tensor in new.items()})
        await server.finish_weights(3)
        await asked
        (again,) = await server.generate_many([ask(6, 5, (30, 31, 32, 33))])
        other = make_model()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.05)
        ids, log_probs, _ = answers(other, [Request((30, 31, 32, 33), 6, 5)])[0]
        assert again[:2] == (ids, log_probs) and again[3] == 3

    asyncio.run(run())


def test_nothing_that_was_read_outlives_a_part_of_the_weights(server):
    """Weights come in several parts; after the last one, an answer is the new model's, whatever was asked between them."""
    other, prompt = make_model(), (30, 31, 32, 33)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    new = {name: tensor.detach() for name, tensor in other.named_parameters()}
    parts = [dict(list(new.items())[:3]), dict(list(new.items())[3:])]

    async def run():
        for part in parts:
            await server.generate_many([ask(6, 5, prompt)])
            await server.load_weights(part)
        ((ids, log_probs, _, _),) = await server.generate_many([ask(6, 5, prompt)])
        assert (ids, log_probs) == answers(other, [Request(prompt, 6, 5)])[0][:2]

    asyncio.run(run())


def test_a_cache_that_outlives_a_weight_sync_is_caught(server, monkeypatch):
    """The test above sees the fault on purpose."""
    monkeypatch.setattr(server.engine, "forget", lambda: None)
    with pytest.raises(AssertionError):
        test_weights_that_come_between_tokens_are_never_mixed_with_what_was_read_under_others(server)


def test_aborted_requests_are_cancelled_and_the_server_goes_on(server):
    async def run():
        asked = asyncio.ensure_future(server.generate_many([ask(150, 1), ask(150, 2)]))
        await asyncio.sleep(0.02)
        await server.abort_all_requests()
        assert all(isinstance(answer, asyncio.CancelledError) for answer in await asked)
        assert (await server.generate_many([ask(3, 4)])) == [expected(3, 4)]
        assert not server.engine.rows and not server.futures

    asyncio.run(run())


def test_memory_lacking_while_cancelled_requests_are_removed_costs_the_others_nothing(server, monkeypatch):
    """Keeping what they have read takes memory."""

    async def run():
        insert, failed = server.reader.prefixes.insert, []

        def fails_once(*arguments):
            if not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("no memory left")
            return insert(*arguments)

        gone = asyncio.ensure_future(server.generate_many([(*ask(150, 1), 77)]))
        other = asyncio.ensure_future(server.generate_many([(*ask(150, 2), 78)]))
        await asyncio.sleep(0.02)
        monkeypatch.setattr(server.reader.prefixes, "insert", fails_once)
        server.cancel([77])
        async with asyncio.timeout(30):
            (answer,) = await other
        assert answer == expected(150, 2) and failed
        assert (await server.generate_many([ask(3, 4)])) == [expected(3, 4)]
        assert not server.engine.rows and not server.futures
        gone.cancel()

    asyncio.run(run())


def asking(client, tokens, seed):
    sampling = {"max_tokens": tokens, "seed": seed}
    return asyncio.ensure_future(client.generate("s", prompt_ids=[20, 21, 22], sampling_params=sampling))


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def slowed(server):
    """The server, with time to cancel something."""
    step = server.engine.step

    def slow_step():
        time.sleep(0.003)
        return step()

    server.engine.step = slow_step
    return server


def is_empty(server):
    return not (server.futures or server.named or server.tickets or server.engine.rows or server.engine.waiting)


@pytest.mark.parametrize("kind", [HFServer, LocalServer])
@pytest.mark.parametrize("at_once", [64, 3])
def test_requests_whose_callers_have_gone_are_given_up(tmp_path, bpe_tokenizer, kind, at_once):
    """Those that are decoded and those that wait; between two tokens, and not when the next answer ends."""
    server = slowed(served(tmp_path, bpe_tokenizer, {}, kind))
    server.engine.limit = at_once
    client, handle = client_of(server)

    async def run():
        asked = [asking(client, 190, seed) for seed in range(8)]
        await until(lambda: server.engine.rows and len(server.engine.rows[0].answer.token_ids) > 2)
        for one in asked:
            one.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*asked, return_exceptions=True))
        await until(lambda: is_empty(server) and not client.sending)
        assert server.stats == {"requests": 0, "tokens": 0} and handle.calls.count("cancel") == 1
        assert (await asking(client, 6, 3)).token_ids == expected(6, 3)[0]
        await until(lambda: is_empty(server))

    asyncio.run(run())


@pytest.mark.parametrize("handover", [0.0, pytest.param(0.01, marks=pytest.mark.slow)])
def test_the_others_of_its_call_keep_their_answers(server, handover):
    server.handover = handover
    client, handle = client_of(slowed(server))

    async def run():
        asked = [asking(client, tokens, seed) for seed, tokens in enumerate((190, 190, 100, 2, 190, 30))]
        await asked[3]  # the others have tickets now
        asked[0].cancel()
        await until(lambda: len(server.futures) < 5)
        asked[4].cancel()
        left = [await asked[i] for i in (1, 2, 3, 5)]
        for output, (tokens, seed) in zip(left, ((190, 1), (100, 2), (2, 3), (30, 5)), strict=True):
            assert (output.token_ids, output.log_probs) == expected(tokens, seed)[:2]
        await until(lambda: is_empty(server) and not client.sending)
        assert server.stats == {"requests": 4, "tokens": 322} and set(handle.calls) == {
            "generate_many",
            "collect",
            "cancel",
        }

    asyncio.run(run())


@pytest.mark.parametrize("kind", [HFServer, LocalServer])
def test_what_is_read_stays_though_all_requests_are_given_up(tmp_path, bpe_tokenizer, kind):
    """Nothing is decoded after the last one, which would fail and forget."""
    server = slowed(served(tmp_path, bpe_tokenizer, {}, kind))
    client, _ = client_of(server)

    async def run():
        await asking(client, 3, 1)
        read = server.reader.prefixes.bytes
        asked = asking(client, 190, 2)
        await until(lambda: server.engine.rows)
        asked.cancel()
        await until(lambda: is_empty(server) and server.loop_task.done())
        assert server.reader.prefixes.bytes >= read > 0

    asyncio.run(run())


def test_a_request_that_is_given_up_before_it_is_sent_is_not_sent(server):
    client, _ = client_of(server)

    async def run():
        asked = [asking(client, 4, seed) for seed in range(2)]
        asyncio.get_running_loop().call_soon(asked[0].cancel)
        assert (await asked[1]).token_ids == expected(4, 1)[0]
        assert server.stats["requests"] == 1 and asked[0].cancelled()

    asyncio.run(run())


def test_a_client_that_goes_gives_up_its_own_requests_alone(server):
    """Each episode worker has a copy of the client."""
    client, handle = client_of(slowed(server))
    client.servers = []
    copy = pickle.loads(pickle.dumps(client))
    client.servers = copy.servers = [handle]

    async def run():
        asked = [asking(one, 40, seed) for seed in range(2) for one in (client, copy)]
        await until(lambda: len(server.engine.rows) == 4)
        asked[0].cancel()
        asked[2].cancel()
        left = [(await asked[i]).token_ids for i in (1, 3)]
        assert left == [expected(40, seed)[0] for seed in range(2)]
        await until(lambda: is_empty(server))
        assert server.stats == {"requests": 2, "tokens": 80}

    asyncio.run(run())


def test_word_that_overtakes_the_request_is_sent_again(server):
    """Ray keeps no order among calls."""
    client, handle = client_of(slowed(server))
    server.handover = 0.0
    generate_many = handle.generate_many.remote

    async def late(requests):
        await until(lambda: "cancel" in handle.calls)
        return await generate_many(requests)

    handle.generate_many = SimpleNamespace(remote=late)

    async def run():
        asked = [asking(client, 190, 1), asking(client, 2, 2)]
        await until(lambda: client.sending)
        asked[0].cancel()
        assert (await asked[1]).token_ids == expected(2, 2)[0]
        await until(lambda: is_empty(server) and not client.sending)
        assert handle.calls.count("cancel") == 2 and server.stats["requests"] == 1

    asyncio.run(run())


def test_a_server_that_is_dead_need_not_hear_of_it(server, caplog):
    client, handle = client_of(slowed(server))

    def dead(_):
        raise ConnectionError("the server has died")

    handle.cancel = SimpleNamespace(remote=dead)

    async def run():
        asked = [asking(client, 190, 1), asking(client, 20, 2)]
        await until(lambda: server.engine.rows)
        asked[0].cancel()
        assert (await asked[1]).token_ids == expected(20, 2)[0]
        await until(lambda: not client.sending)
        assert is_empty(server)

    asyncio.run(run())
    assert not caplog.records


def test_a_model_that_fails_fails_its_requests_and_no_later_one(server, monkeypatch):
    async def run():
        monkeypatch.setattr(server.reader, "forward", lambda *_: 1 / 0)
        answered = await server.generate_many([ask(4, 1), ask(4, 2)])
        assert all(isinstance(answer, ZeroDivisionError) for answer in answered)
        monkeypatch.undo()
        assert (await server.generate_many([ask(3, 4)])) == [expected(3, 4)]

    asyncio.run(run())


def test_a_request_cancelled_while_the_model_fails_does_not_stop_the_server(server, monkeypatch):
    async def run():
        async def fail():
            server.engine.step()
            asked.cancel()
            raise ZeroDivisionError

        monkeypatch.setattr(server, "_decode", fail)
        asked = server._submit(*ask(4, 1))
        await asyncio.wait([asked], timeout=30)
        monkeypatch.undo()
        await asyncio.sleep(0)
        assert server.loop_task.done() and server.loop_task.exception() is None
        assert (await server.generate_many([ask(3, 4)])) == [expected(3, 4)]

    asyncio.run(run())


def test_a_server_asleep_gives_its_gpu_memory_to_the_trainer_beside_it(server, monkeypatch):
    """The trainer is another process: what this one's allocator keeps is no use to it."""
    emptied = []
    memory = SimpleNamespace(
        empty_cache=lambda: emptied.append((server.model.device.type, server.reader.prefixes.bytes))
    )
    monkeypatch.setattr(hf_server, "get_torch_device", lambda: memory)

    async def run():
        await server.generate_many([ask(3, 4)])
        await server.sleep()

    asyncio.run(run())
    assert emptied == [("cpu", 0)], "after the model and what it read have gone"


def test_sleep_forgets_and_waking_goes_on(server):
    async def run():
        await server.generate_many([ask(3, 4)])
        assert server.reader.prefixes.bytes > 0
        await server.sleep()
        assert server.reader.prefixes.bytes == 0
        await server.wake_up()
        assert (await server.generate_many([ask(3, 4)])) == [expected(3, 4)]

    asyncio.run(run())


def test_without_the_exact_form_answers_are_near(tmp_path, bpe_tokenizer):
    server = served(tmp_path, bpe_tokenizer, {"exact": False})
    assert server.model.config._attn_implementation == NEAR_ATTENTION

    async def run():
        (answer,) = await server.generate_many([ask(20, 4)])
        ids, log_probs, *_ = expected(20, 4)
        assert answer[0] == ids
        torch.testing.assert_close(torch.tensor(answer[1]), torch.tensor(log_probs), atol=1e-5, rtol=0)

    asyncio.run(run())


def test_the_exact_form_is_on_or_off(tmp_path, bpe_tokenizer):
    with pytest.raises(ConfigError, match=r"rollout\.custom\.exact='no'; expected true or false"):
        served(tmp_path, bpe_tokenizer, {"exact": "no"})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Llama4TextConfig(), "chunked_attention layers"),
        (Gemma2Config(), "attn_logit_softcapping=50"),
        (Gemma3nTextConfig(), "layers that share keys and values"),
        (GptOssConfig(), r"an attention of its own \(model_type=gpt_oss\)"),
        (BartConfig(), r"positions of its own \(model_type=bart\)"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_attention_that_ours_does_not_compute_is_refused(config, said):
    with pytest.raises(
        ValueError, match=rf"rollout.name=hf computes full .* /some/where has {said}: use vllm or sglang"
    ):
        check_attention(config, "/some/where")
    with pytest.raises(ConfigError, match=rf"^policies.a.model.path=/some/where: rollout.name=hf .* has {said}"):
        check_decodable(config, "/some/where", "policies.a.model", SimpleNamespace(max_model_len=None))


@pytest.mark.slow
def test_such_a_model_is_refused_before_a_run_starts(compose_config, cold_assets, tmp_path):
    shutil.copytree(cold_assets / "model", tmp_path / "capped")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    Gemma2ForCausalLM(Gemma2Config(vocab_size=200, intermediate_size=32, **sizes)).save_pretrained(tmp_path / "capped")
    config = compose_config(f"assets={cold_assets}", f"+policies.carol.model.path={tmp_path}/capped")
    with pytest.raises(ConfigError, match=r"policies.carol.model.path=.*attn_logit_softcapping=50: use vllm"):
        prepare(config)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (MistralConfig(sliding_window=16), 16),
        (MistralConfig(sliding_window=None), None),
        (Qwen2Config(use_sliding_window=True, sliding_window=16, max_window_layers=0), 16),
        (Qwen2Config(), None),
        (Gemma3TextConfig(sliding_window=16), 16),
        (LlamaConfig(), None),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_the_window_is_the_layers_that_have_one(config, window):
    """The layers' kinds tell it or, as in Mistral, one number for all of them."""
    check_attention(config, "/some/where")
    assert window_of(config) == window


def test_a_window_that_the_model_ignores_is_refused():
    """The trainer would attend to all tokens, and the server to the latest alone."""
    with pytest.raises(ValueError, match=r"/some/where has sliding_window=16, .*override_config.sliding_window=null"):
        check_attention(LlamaConfig(sliding_window=16), "/some/where")
    check_attention(LlamaConfig(sliding_window=None), "/some/where")
