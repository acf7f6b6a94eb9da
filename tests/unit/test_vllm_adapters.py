"""Adapters on one vLLM server (``sharing=lora``): what trainer, server and worker tell one another, with stand-ins for the engine."""

import asyncio
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from marl.cluster.layout import policy_configs
from marl.rollout import vllm_sglang
from marl.rollout.adapter_ids import adapter_ids, adapter_ranks
from marl.rollout.servers import DirectClient
from tests.engines import engines_importable

RANKS = {"alice": 12, "carol": 4}


@pytest.fixture(scope="module")
def vllm_adapters():
    """The module, imported over stand-ins; the package may still have an earlier import as its attribute."""
    with engines_importable():
        yield import_module("marl.rollout.vllm_adapters")


def rollout(adapters=RANKS):
    return SimpleNamespace(custom={"run_id": "r1", "policy": "alice", "timeout_s": 1.0, "adapters": adapters})


def test_servers_are_told_of_every_adapter_of_their_pool(compose_config):
    own = ("+policies.alice.model.lora_rank=12", "+policies.carol.model.lora_rank=4")
    vllm = ("hardware=cpu_vllm", *own)
    for pools, expected in (
        ((), [RANKS, RANKS]),
        (("resources.pools={mine:{policies:[carol]}}",), [{"alice": 12}, {"carol": 4}]),
    ):
        config = compose_config("sharing=lora", *vllm, *pools)
        configs = policy_configs(config, ["alice", "carol"], "r", 1)
        rollouts = [own.actor_rollout_ref.rollout for own in configs.values()]
        assert [adapter_ranks(rollout) for rollout in rollouts] == expected
        assert {rollout.load_format for rollout in rollouts} == {"auto"}, "nobody sends the base"
    config.sharing = None
    alone = policy_configs(config, ["alice"], "r", 1)["alice"].actor_rollout_ref.rollout
    assert adapter_ids(alone) == {} and alone.load_format == "dummy"
    assert adapter_ids(rollouts[0]) == {"alice": 1}


def test_an_engine_has_a_slot_more_than_adapters_and_takes_the_largest_rank(vllm_adapters, monkeypatch):
    monkeypatch.setattr(vllm_adapters, "get_vllm_max_lora_rank", lambda rank: {12: 16}[rank])
    args = vllm_adapters.with_room(SimpleNamespace(max_loras=1, max_lora_rank=8), rollout())
    assert (args.max_loras, args.max_cpu_loras, args.max_lora_rank) == (3, 3, 16)


@pytest.fixture
def server(vllm_adapters, monkeypatch):
    """Ours, whose engine holds alice's adapter; verl's ``generate`` asks it as it does, for its own adapter."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    def start(self, config):
        self.config = config

    async def generate(self, prompt_ids, sampling_params, request_id):
        self.asked.append((prompt_ids, sampling_params, request_id))
        assert 123 not in await self.engine.list_loras()
        lora = self.engine.generate(prompt=prompt_ids, lora_request=None)
        return SimpleNamespace(lora=lora, extra_fields={"global_steps": 0})

    class Engine:
        def generate(self, *, prompt, lora_request):
            return lora_request

        async def list_loras(self):
            return {1}

    async def run_server(self, args):
        self.engine, self.args = Engine(), args

    monkeypatch.setenv("VERL_RAY_JOB_ID", "")
    monkeypatch.setattr(vLLMHttpServer, "__init__", start)
    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    monkeypatch.setattr(vLLMHttpServer, "run_server", run_server)
    monkeypatch.setattr(vllm_adapters, "LoRARequest", lambda **settings: settings)
    monkeypatch.setattr(vllm_adapters.request_of, "__defaults__", (vllm_adapters.LoRARequest,))
    monkeypatch.setattr(vllm_adapters, "get_vllm_max_lora_rank", lambda rank: rank)
    made = vllm_sglang.vllm_server_class(rollout())(rollout())
    made.asked = []
    asyncio.run(made.run_server(SimpleNamespace()))
    return made


def test_a_request_is_computed_with_the_adapter_that_it_names(server):
    async def ask():
        await server.finish_adapter("alice", 7)
        named = {"temperature": 1.0, "adapter": "alice"}
        both = await asyncio.gather(server.generate([5], named, "a"), server.generate([5], {"temperature": 1.0}, "b"))
        with pytest.raises(KeyError, match="'carol'.*expected one that was sent, alice"):
            await server.generate([5], {"adapter": "carol"}, "c")
        with pytest.raises(KeyError, match="'carol'.*engine does not hold it.*step 7"):
            await server.finish_adapter("carol", 7)
        return both

    alice, base = asyncio.run(ask())
    assert (alice.lora["lora_name"], alice.lora["lora_int_id"], base.lora) == ("alice", 1, None)
    assert alice.extra_fields == {"global_steps": 7} and base.extra_fields == {"global_steps": 0}
    assert [sampling for _, sampling, _ in server.asked] == [{"temperature": 1.0}] * 2, "vLLM refuses unknown keys"


def test_servers_of_whole_models_stay_as_they_are(vllm_adapters):
    assert not issubclass(vllm_sglang.vllm_server_class(rollout(None)), vllm_adapters.AdapterServing)
    assert issubclass(vllm_sglang.vllm_server_class(rollout()), vllm_adapters.AdapterServing)


class Handle:
    """Stands for a server's: remembers what it was told."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        async def done():
            return None

        return SimpleNamespace(remote=lambda *args, **settings: (self.told.append((name, args)), done())[1])


@pytest.fixture
def trainer(vllm_adapters, monkeypatch):
    """verl's adapter of the trainer's only rank, as ours extends it, without a socket."""
    made = object.__new__(vllm_sglang.vllm_adapter_class())
    made.config, made._has_server, made.use_shm, made.server_handle = rollout(), True, True, Handle()
    made._pd_role, made.sent, made.calls = None, [], []

    async def execute(method, non_block, kwargs):
        made.calls.append((method, kwargs))

    async def send(weights):
        made.sent += weights

    made._execute_method = execute
    made._sender = lambda *_: SimpleNamespace(async_send_weights=send)
    return made


def test_a_sync_ships_an_adapter_under_its_own_number(trainer):
    weights = [("model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(4, 2))]
    asyncio.run(trainer.update_adapter("carol", weights, 2.0, 9))
    assert [key for key, _ in trainer.sent] == ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    ((method, settings),) = trainer.calls
    assert method == "update_weights_from_ipc" and settings["adapter"] == ("carol", 2) and settings["base_sync_done"]
    assert settings["peft_config"] == {"r": 4, "lora_alpha": 8.0, "target_modules": "all-linear"}
    assert [name for name, _ in trainer.server_handle.told] == ["clear_kv_cache", "finish_adapter"]
    assert trainer.server_handle.told[-1] == ("finish_adapter", ("carol", 9))


def test_an_adapter_that_has_not_changed_is_not_shipped(trainer):
    asyncio.run(trainer.update_adapter("carol", None, 2.0, 10))
    assert trainer.calls == trainer.sent == []
    assert trainer.server_handle.told == [("finish_adapter", ("carol", 10))]


def test_a_worker_replaces_an_adapter_under_its_number_and_no_other(vllm_adapters, monkeypatch):
    class Request(SimpleNamespace):
        pass

    monkeypatch.setattr(vllm_adapters, "TensorLoRARequest", Request)
    worker, base = object.__new__(vllm_adapters.AdapterExtension), []
    worker.done = []
    worker.remove_lora = lambda number: worker.done.append(("removed", number))
    worker.add_lora = lambda request: worker.done.append((request.lora_name, request.lora_int_id, request))

    def receive(self, **settings):
        self._update_weights([("w", bucket)], settings["peft_config"], settings["base_sync_done"])

    verls = vllm_adapters.AdapterExtension.__mro__[1]
    monkeypatch.setattr(verls, "update_weights_from_ipc", receive)
    monkeypatch.setattr(verls, "_update_weights", lambda self, weights, *_: base.append(weights))
    bucket = torch.ones(2)
    worker.update_weights_from_ipc(adapter=("carol", 2), peft_config={"r": 4}, base_sync_done=True)
    bucket.zero_()
    assert worker.done[0] == ("removed", 2) and worker.done[1][:2] == ("carol", 2) and len(worker.done) == 2
    assert worker.done[1][2].lora_tensors["w"].tolist() == [1.0, 1.0], "the receiver uses its bucket again"
    worker.update_weights_from_ipc(peft_config=None, base_sync_done=False)
    assert len(worker.done) == 2 and len(base) == 1


def test_a_client_names_its_adapter_in_every_request():
    heard = []

    class Server:
        generate = SimpleNamespace(remote=lambda **settings: Server.answer(settings))

        @staticmethod
        async def answer(settings):
            heard.append(settings["sampling_params"])
            return SimpleNamespace(extra_fields={}, token_ids=[], stop_reason="completed")

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
    for adapter in ("carol", None):
        client = DirectClient(config, None, servers=[Server], adapter=adapter)
        asyncio.run(client.generate("s", prompt_ids=[1], sampling_params={"temperature": 1.0}))
    assert heard == [{"temperature": 1.0, "adapter": "carol"}, {"temperature": 1.0}]
