"""Several policies and replicas on one cluster: who feeds whom, and who answers."""

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from marl.cluster.launch import start_groups
from marl.cluster.layout import policy_configs
from marl.cluster.policy_group import PolicyGroup
from marl.rollout import servers as rollout_servers, vllm_sglang
from marl.rollout.servers import CoalescingClient, DirectClient, PolicyServers
from tests.builders import same_for_all


def rollout_config(offset=0, tensor_parallel=1):
    return SimpleNamespace(
        custom={"policy": "p", "run_id": "r", "replica_offset": offset},
        tensor_model_parallel_size=tensor_parallel,
        data_parallel_size=1,
        pipeline_model_parallel_size=1,
    )


@pytest.mark.parametrize("name", ["hf", "vllm", "sglang"])
def test_every_backend_has_an_adapter_that_knows_the_policys_offset(name):
    import marl.rollout.hf  # noqa: F401 - registers hf

    assert _ROLLOUT_REGISTRY[(name, "async")].startswith("marl.rollout.")


@pytest.mark.parametrize("offset,tensor_parallel,rank,replica", [(0, 1, 1, 1), (1024, 1, 0, 1024), (2048, 2, 3, 2049)])
def test_a_training_rank_feeds_the_replica_of_its_own_policy(monkeypatch, offset, tensor_parallel, rank, replica):
    monkeypatch.setenv("RANK", str(rank))
    assert vllm_sglang.offset_rank(rollout_config(offset, tensor_parallel)) == replica


def test_a_replica_takes_the_workers_of_its_own_group():
    """verl slices by the replica's rank: without the offset taken off, the second policy's slice is empty."""
    cls = vllm_sglang.offset_replica_class("hf")
    replica = cls.__new__(cls)
    replica.config, replica.world_size, replica.replica_rank = rollout_config(1024, 2), 2, 1025
    launched = []

    async def launch():
        launched.append(replica.workers)

    replica.launch_servers = launch
    asyncio.run(replica.init_hybrid(SimpleNamespace(workers=["w0", "w1", "w2", "w3"])))
    assert launched == [["w2", "w3"]]


def test_a_replica_that_nobody_trains_has_weights_of_its_own():
    """verl's hybrid servers wait for a trainer's weights, and drop theirs when they sleep."""
    cls = vllm_sglang.offset_replica_class("hf")
    for frozen, mode in ((False, RolloutMode.HYBRID), (True, RolloutMode.COLOCATED)):
        replica = cls.__new__(cls)
        replica.config, replica.world_size, replica.replica_rank = rollout_config(), 1, 0
        replica.config.custom["frozen"] = frozen

        async def launch():
            return None

        replica.launch_servers = launch
        asyncio.run(replica.init_hybrid(SimpleNamespace(workers=["w0"])))
        assert replica.rollout_mode is mode


def test_servers_of_a_policy_that_nobody_trains_load_from_its_path(compose_config):
    adapters = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=true")
    config = compose_config("agents.carol.trainable=false", *adapters)
    configs = policy_configs(config, ["alice", "carol"], "r", 1)
    alice, carol = (own.actor_rollout_ref for own in configs.values())
    assert "frozen" not in alice.rollout.custom and carol.rollout.custom.frozen is True
    assert (alice.rollout.load_format, carol.rollout.load_format) == ("dummy", "auto")
    assert (alice.model.lora_rank, carol.model.lora_rank) == (4, 0)


class FakeReplica:
    """Stands for two ranks' workers too. ``heard`` is one list for all, in order."""

    def __init__(self, heard):
        self.heard = heard

    def empty_cache(self):
        return [self.hear("empty_cache"), self.hear("empty_cache")]

    async def hear(self, what):
        await asyncio.sleep(0)
        self.heard.append(what)

    async def sleep(self):
        await self.hear("sleep")

    async def wake_up(self):
        await self.hear("wake_up")


def frozen_group(free_cache_engine):
    rollout = SimpleNamespace(free_cache_engine=free_cache_engine)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    heard = []
    parts = config, FakeReplica(heard), "shared", same_for_all(5.0), asyncio.Lock()
    group = PolicyGroup("judge", *parts, takes_weights=False)
    group.servers = servers_of("vllm")
    group.servers.rollout_replicas = [FakeReplica(heard), FakeReplica(heard)]
    return group, heard


def test_servers_that_nobody_trains_sleep_while_others_train_and_are_sent_nothing():
    async def a_step(group):
        await group.start_workers()
        await group.free_servers()
        await group.sync_weights(3)

    for shared in (True, False):
        group, heard = frozen_group(shared)
        asyncio.run(a_step(group))
        assert (
            heard == [call for call in ("sleep", "empty_cache", "wake_up") for _ in range(2 * shared)]
            and group.version == 3
        )


class FakeServer:
    """Stands for the handle of a Ray actor."""

    def __init__(self, name):
        self.name, self.calls = name, []
        self.generate_many = SimpleNamespace(remote=self.answer)

    async def answer(self, requests):
        self.calls.append(len(requests))
        return [([ord(self.name)], [0.0], "completed", 7) for _ in requests]


def client_of(*servers, limit=100):
    rollout = SimpleNamespace(max_num_seqs=limit)
    return CoalescingClient(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), None, list(servers))


def ask(client, sessions):
    async def ask():
        return await asyncio.gather(
            *(client.generate(request_id=session, prompt_ids=[1], sampling_params={}) for session in sessions)
        )

    return asyncio.run(ask())


def test_requests_of_one_tick_travel_in_one_call_a_server():
    server = FakeServer("a")
    outputs = ask(client_of(server), map(str, range(30)))
    assert server.calls == [30]
    assert all(output.extra_fields["global_steps"] == 7 for output in outputs)


def test_a_call_holds_no_more_than_a_server_decodes_at_once():
    server = FakeServer("a")
    ask(client_of(server, limit=12), map(str, range(30)))
    assert server.calls == [12, 12, 6]


def test_a_conversation_stays_on_its_server_and_the_load_is_shared():
    servers = FakeServer("a"), FakeServer("b")
    sessions = [f"3/train/{i}/0/alice" for i in range(200)]
    first = [output.token_ids for output in ask(client_of(*servers), sessions)]
    second = [output.token_ids for output in ask(client_of(*servers), reversed(sessions))]
    assert first == second[::-1]
    assert min(first.count([ord("a")]), first.count([ord("b")])) > 60


class GeneratesAlone:
    """Stands for the handle of an engine's server, which takes one request a call."""

    def __init__(self, name):
        self.name, self.asked = name, []
        self.generate = SimpleNamespace(remote=self.answer)

    async def answer(self, request_id, prompt_ids, sampling_params, **_):
        self.asked.append(request_id)
        return TokenOutput(token_ids=[ord(self.name)], log_probs=[0.0], extra_fields={"global_steps": 7})


def test_an_engines_conversation_goes_straight_to_its_server():
    """No actor stands between them: ``load_balancer_handle`` is None, and verl's client would ask it twice a request."""
    servers = [GeneratesAlone("a"), GeneratesAlone("b")]
    rollout = SimpleNamespace(name="vllm", full_determinism=True)
    client = DirectClient(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), None, servers)
    sessions = [f"3/train/{i}/0/alice" for i in range(200)]
    first = [output.token_ids for output in ask(client, sessions)]
    assert first == [output.token_ids for output in ask(client, reversed(sessions))][::-1]
    assert min(len(server.asked) for server in servers) > 120
    hf = [output.token_ids for output in ask(client_of(FakeServer("a"), FakeServer("b")), sessions)]
    assert hf == first, "one rule for all engines"


def servers_of(name, router=None):
    servers = PolicyServers.__new__(PolicyServers)
    servers.rollout_config = OmegaConf.create({"name": name, "router_config_path": router, "max_num_seqs": 4})
    servers.config = OmegaConf.create({"actor_rollout_ref": {"rollout": servers.rollout_config}})
    servers.server_handles, servers.global_load_balancer = ["handle"], "balancer"
    return servers


@pytest.mark.parametrize(
    "name,router,kind",
    [("hf", None, "Coalescing"), ("vllm", None, "Direct"), ("vllm", "r.yaml", "Naming"), ("sglang", None, "Direct")],
)
def test_only_a_router_of_the_users_stands_before_the_servers(name, router, kind):
    assert type(servers_of(name, router).client()).__name__ == f"{kind}Client"


def test_servers_on_all_nodes_are_ended_whatever_was_started():
    servers = servers_of("vllm")
    assert servers.all_handles() == []
    servers.rollout_replicas = [SimpleNamespace(servers=["a0", "a1"]), SimpleNamespace(servers=[])]
    assert servers.all_handles() == ["a0", "a1"]


def test_an_engine_is_ended_before_its_server_is_killed(monkeypatch):
    """A killed engine leaves its shared memory behind; one that does not end in time is killed all the same."""
    done = []
    monkeypatch.setattr(
        rollout_servers,
        "ray",
        SimpleNamespace(
            wait=lambda refs, num_returns, timeout: done.append((list(refs), num_returns, timeout)), kill=done.append
        ),
    )
    server = SimpleNamespace(shutdown=SimpleNamespace(remote=lambda: "ending"))
    servers = servers_of("vllm")
    servers.rollout_replicas = [SimpleNamespace(servers=[server])]
    servers.stop()
    assert done == [(["ending"], 1, rollout_servers.SHUTDOWN_S + rollout_servers.ANSWER_S), server]


def test_every_policys_servers_know_the_runs_limit(compose_config):
    config = compose_config("resources.timeout_s=77")
    own = policy_configs(config, ["alice"], "r", 1)["alice"]
    assert own.actor_rollout_ref.rollout.custom["timeout_s"] == 77


@pytest.mark.parametrize(
    ("engine", "device", "sleeps", "together"),
    [
        ("vllm", "cuda", False, False),
        ("vllm", "cuda", True, False),
        ("hf", "cpu", True, False),
        ("hf", "cuda", False, True),
    ],
)
def test_engines_that_share_a_gpu_start_one_after_another(engine, device, sleeps, together):
    """Each measures how much memory is free."""
    heard = []

    class Group(SimpleNamespace):
        async def start_workers(self): ...

        async def start_servers(self):
            heard.append(f"{self.name} starts")
            await asyncio.sleep(0)
            heard.append(f"{self.name} is there")

    config = SimpleNamespace(trainer=SimpleNamespace(device=device))
    rollout = SimpleNamespace(name=engine, free_cache_engine=sleeps)
    asyncio.run(start_groups({n: Group(name=n, pool="shared", rollout=rollout, config=config) for n in "ab"}, {}))
    assert (heard[:2] == ["a starts", "b starts"]) is together and len(heard) == 4
