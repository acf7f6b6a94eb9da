"""Our adapters, replicas and servers against verl's own code for vLLM and SGLang; the engines themselves are stand-ins."""

import asyncio
import inspect
import os
from types import SimpleNamespace

import pytest
import torch

from marl.cluster.weight_arrival import check_of
from marl.config.schema import WeightCheck
from marl.rollout import hf, vllm_sglang
from marl.rollout.servers import PolicyServers
from marl.utils.spans import Stopwatch
from tests.engines import engines_importable


@pytest.fixture(scope="module")
def engines():
    with engines_importable():
        yield


def names_of(function):
    return [(name, parameter.kind) for name, parameter in inspect.signature(function).parameters.items()]


def rollout_config(offset=1024):
    return SimpleNamespace(
        name="vllm",
        custom={
            "policy": "p",
            "run_id": "r1",
            "replica_offset": offset,
            "timeout_s": 20.0,
            "timeout_key": "resources.timeout_s",
        },
        tensor_model_parallel_size=2,
        data_parallel_size=1,
        pipeline_model_parallel_size=1,
        disaggregation=None,
        layered_summon=False,
        checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1),
        get=lambda key, default=None: {"name": "vllm"}.get(key, default),
    )


@pytest.fixture
def adapter(engines, monkeypatch):
    """Ours, over verl's, in the trainer's rank 2 of 4: the first rank of the policy's second replica."""
    import verl.workers.rollout.base as base

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(base, "omega_conf_to_dataclass", lambda config: config)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    return vllm_sglang.VLLMServerAdapter(rollout_config(), None, None)


def test_a_weight_sync_takes_what_verls_takes(engines):
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    ours = vllm_sglang.vllm_adapter_class()
    assert names_of(ours.update_weights) == names_of(ServerAdapter.update_weights)
    defaults = [inspect.signature(cls.update_weights).parameters for cls in (ours, ServerAdapter)]
    assert [p.default for p in defaults[0].values()] == [p.default for p in defaults[1].values()]


def verls_server(ours):
    return next(kind for kind in ours.__mro__ if kind.__name__ in ("vLLMHttpServer", "SGLangHttpServer"))


@pytest.mark.parametrize("make_server", [vllm_sglang.vllm_server_class, vllm_sglang.sglang_server_class])
def test_a_probe_asks_as_verls_clients_do(engines, make_server):
    """``ask_servers`` gives the prompt, the sampling and a name, in this order."""
    verls = verls_server(make_server(rollout_config())).generate
    assert [name for name, _ in names_of(verls)][:4] == ["self", "prompt_ids", "sampling_params", "request_id"]
    assert check_of(WeightCheck.auto, "vllm") is check_of(WeightCheck.auto, "sglang") is WeightCheck.probe


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_replica_is_made_and_joined_as_verls(engines, name):
    from verl.workers.rollout.replica import get_rollout_replica_class

    ours, verls = vllm_sglang.offset_replica_class(name), get_rollout_replica_class(name)
    assert issubclass(ours, verls)
    assert names_of(ours.init_hybrid) == names_of(verls.init_hybrid)


def test_a_server_is_made_with_the_arguments_that_we_read(engines):
    """verl's replicas pass them by name: ``launch_servers``."""
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    parameters = inspect.signature(SGLangHttpServer.__init__).parameters
    launch = inspect.getsource(SGLangReplica.launch_servers)
    for name in ("workers", "cuda_visible_devices", "base_gpu_id"):
        assert name in parameters and f"{name}=" in launch
    assert inspect.iscoroutinefunction(vLLMHttpServer.generate) and inspect.iscoroutinefunction(
        SGLangHttpServer.generate
    )


def test_verls_manager_and_client_have_what_we_override():
    from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

    assert {"start_rank", "worker_group", "config"} <= set(inspect.signature(LLMServerManager.__init__).parameters)
    assert names_of(PolicyServers._init_global_load_balancer) == names_of(LLMServerManager._init_global_load_balancer)
    assert list(inspect.signature(LLMServerClient._release_server).parameters) == ["self", "server_id", "request_id"]


def test_trainer_and_engine_meet_at_the_same_socket_and_actor(adapter, monkeypatch):
    """verl's worker extension derives the socket from variables that the server sets; verl's adapter from its rank."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    engine = SimpleNamespace(model_runner=SimpleNamespace(vllm_config=None), local_rank=0)
    monkeypatch.setenv("VERL_REPLICA_RANK", "1025")
    monkeypatch.setenv("VERL_RAY_JOB_ID", "01000000-r1")
    assert adapter.zmq_handle == vLLMColocateWorkerExtension._get_zmq_handle(engine)
    asked = []
    monkeypatch.setattr("ray.get_actor", lambda name: asked.append(name) or "handle")
    assert adapter._ensure_server_handle() and asked == ["vllm_server_1025_0"]


class Recorder:
    """Stands for a server's handle: remembers the calls, and answers each with a future that is done."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        async def done():
            return None

        def remote(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return done()

        return SimpleNamespace(remote=remote)


class SendsNothing:
    sent = []

    def __init__(self, **settings):
        self.sent.append({key: settings[key] for key in ("zmq_handle", "bucket_size_mb", "use_shm")})

    async def async_send_weights(self, weights):
        list(weights)


def test_a_weight_sync_makes_verls_calls_in_verls_order(adapter, monkeypatch):
    from verl.workers.rollout.vllm_rollout import ServerAdapter, vllm_rollout

    SendsNothing.sent = []
    monkeypatch.setattr(vllm_rollout, "BucketedWeightSender", SendsNothing)
    monkeypatch.setattr("marl.rollout.watched_sender.WatchedSender", SendsNothing)
    ours = vllm_sglang.vllm_adapter_class()
    calls = []
    for update in (ServerAdapter.update_weights, ours.update_weights):
        adapter.server_handle = recorder = Recorder()
        adapter.__class__ = ours
        asyncio.run(
            update(adapter, iter([("w", torch.zeros(1))]), global_steps=7, peft_config=None, base_sync_done=True)
        )
        calls.append(recorder.calls)
    assert calls[0] == calls[1] and [name for name, *_ in calls[0]][-1] == "set_global_steps"
    assert SendsNothing.sent[0] == SendsNothing.sent[1]
    with pytest.raises(ValueError, match="wire_format='delta_flush'.*checkpoint_engine.backend=naive"):
        asyncio.run(ours.update_weights(adapter, iter(()), wire_format="delta_flush"))


@pytest.fixture
def server(engines, monkeypatch):
    """Ours, without verl's start of an engine."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    def start(self, config):
        os.environ["VERL_RAY_JOB_ID"] = "01000000"
        self.config, self.node_rank = config, 0

    monkeypatch.setenv("VERL_RAY_JOB_ID", "")
    monkeypatch.setattr(vLLMHttpServer, "__init__", start)
    return vllm_sglang.vllm_server_class(rollout_config())(rollout_config())


ASKED = ("sleep", "wake_up", "clear_kv_cache", "collective_rpc", "wait_for_requests_to_drain")


@pytest.mark.parametrize("name", ASKED)
def test_what_an_engine_was_asked_ends_when_it_dies(server, monkeypatch, name):
    """vLLM fails the requests alone; a sleep or new weights would be waited for for ever."""
    monkeypatch.setattr(vllm_sglang, "ENGINE_POLL_S", 0.01)
    given_up = []

    async def asked(self, *arguments):
        try:
            await asyncio.sleep(arguments[0])
        except asyncio.CancelledError:
            given_up.append(name)
            raise
        return "done"

    monkeypatch.setattr(verls_server(type(server)), name, asked)
    server.engine = SimpleNamespace(errored=False, dead_error=RuntimeError("the engine has died"))
    assert asyncio.run(getattr(server, name)(0.05)) == "done"
    server.engine.errored = True
    assert asyncio.run(getattr(server, name)(0)) == "done", "it answered before"
    with pytest.raises(RuntimeError, match="the engine has died"):
        asyncio.run(asyncio.wait_for(getattr(server, name)(60), 5))
    assert given_up == [name]


@pytest.mark.parametrize("name", ASKED)
def test_what_is_watched_is_verls(engines, name):
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    assert inspect.iscoroutinefunction(getattr(vLLMHttpServer, name))


def test_an_engine_inherits_the_runs_name_for_its_socket(server):
    assert os.environ["VERL_RAY_JOB_ID"] == "01000000-r1"


def test_the_server_that_has_the_engine_ends_it(server):
    ended = []
    server.engine = SimpleNamespace(shutdown=lambda timeout: ended.append(timeout))
    asyncio.run(server.shutdown())
    assert ended == [vllm_sglang.SHUTDOWN_S]
    server.node_rank = 1
    asyncio.run(server.shutdown())
    assert ended == [vllm_sglang.SHUTDOWN_S]


@pytest.mark.parametrize("make_server", [vllm_sglang.vllm_server_class, vllm_sglang.sglang_server_class])
def test_a_launched_engines_segments_are_noted(engines, monkeypatch, make_server):
    done = []
    ours = make_server(rollout_config())

    async def launch(self, master_address=None, master_port=None):
        done.append(("launched", master_port))

    monkeypatch.setattr(verls_server(ours), "launch_server", launch)
    monkeypatch.setattr(vllm_sglang.segments, "note_mapped", lambda: done.append("noted"))
    asyncio.run(ours.launch_server(ours.__new__(ours), master_port=7))
    assert done == [("launched", 7), "noted"]


def test_a_server_says_when_it_answered_even_where_it_failed(server, monkeypatch):
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    async def generate(self, seconds, fails=False):
        await asyncio.sleep(seconds)
        if fails:
            raise ValueError("no such prompt")

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)

    async def ask():
        await asyncio.gather(server.generate(0.02), server.generate(seconds=0.04))
        await asyncio.sleep(0.02)
        with pytest.raises(ValueError, match="no such prompt"):
            await server.generate(0.01, fails=True)
        return await server.take_spans(), await server.take_spans()

    (spans, now), (none, _) = asyncio.run(ask())
    assert len(spans) == 2 and none == []
    assert spans[0][1] - spans[0][0] >= 0.04 and spans[-1][1] <= now


def test_a_cancelled_request_is_given_up_by_sglang(engines, monkeypatch):
    """By the name that verl's server gives it; its own task says nothing to the engine."""
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    async def generate(self, prompt_ids, sampling_params, request_id, image_data=None):
        await asyncio.sleep(0 if request_id == "short" else 60)
        return request_id

    assert '"rid": request_id' in inspect.getsource(SGLangHttpServer.generate)
    monkeypatch.setattr(SGLangHttpServer, "generate", generate)
    ours, given_up = vllm_sglang.sglang_server_class(rollout_config()), []
    server = ours.__new__(ours)
    server.watch, server.tokenizer_manager = Stopwatch(), SimpleNamespace(abort_request=given_up.append)

    async def ask():
        long = asyncio.ensure_future(server.generate([1], {}, "long"))
        assert await server.generate(prompt_ids=[1], sampling_params={}, request_id="short", image_data=None) == "short"
        assert given_up == []
        long.cancel()
        await asyncio.wait([long])
        return long.cancelled()

    assert asyncio.run(ask()) and given_up == ["long"]


@pytest.mark.parametrize(
    "visible,own,first", [("3", ["3"], 0), ("0,1,2,3,4,5,6,7", ["6"], 6), ("0,1,2,3", ["3", "2"], 2), ("4,5", ["5"], 1)]
)
def test_a_server_begins_at_the_first_gpu_of_its_own_workers(visible, own, first):
    """With all GPUs left visible by Ray, the rank 1024 of a second pool would be GPU 0 of eight: that is the first pool's."""
    assert vllm_sglang.first_gpu(visible, own) == first


def test_an_engine_on_a_cpu_says_why_it_refused_weights(engines, monkeypatch):
    """verl's receiver then fails a second time: the refused tensors keep its shared memory from closing."""
    from marl.rollout.vllm_cpu import PlainLinearExtension

    def refuse(self):
        try:
            raise KeyError("model.embed")
        finally:
            raise BufferError("cannot close exported pointers exist")

    monkeypatch.setattr(PlainLinearExtension.__mro__[1], "update_weights_from_ipc", refuse)
    with pytest.raises(KeyError, match="model.embed"):
        PlainLinearExtension.update_weights_from_ipc(object.__new__(PlainLinearExtension))


def test_an_hf_server_is_on_the_gpu_that_ray_gave_its_worker(monkeypatch):
    """Where Ray leaves all GPUs visible, the worker's environment names none or all."""
    context = SimpleNamespace(get_node_id=lambda: "node", get_accelerator_ids=lambda: {"GPU": ["5"]})
    monkeypatch.setattr(hf.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr("verl.utils.device.get_resource_name", lambda: "GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    assert hf._placement(None) == ("node", ""), "on a CPU none"
    monkeypatch.setattr(hf, "get_device_name", lambda: "cuda")
    assert hf._placement(None) == ("node", "5")
