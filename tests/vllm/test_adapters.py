"""Two adapters on one base (``sharing=lora``), held by one vLLM server: each request is answered with its own policy's."""

import pytest
import ray

from marl.batch.build import to_rows
from marl.cluster.failures import GroupFailed, WeightsNotArrived
from marl.cluster.weight_probe import turn_of
from tests.vllm.builders import (
    CLOSE,
    POLICIES,
    abandoned,
    answers_follow_a_policys_own_weights,
    ask,
    learn,
    matrix,
    servers_compute_what_trainers_compute,
    sync,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

ADAPTED = (
    "sharing=lora",
    "actor_rollout_ref.actor.optim.lr=0.02",
    "+policies.alice.model.lora_rank=12",
    "+policies.carol.model.lora_rank=4",
    "+policies.carol.model.target_modules=[q_proj,down_proj]",
)


@pytest.fixture(scope="module")
def live(start):
    before = abandoned()
    with start(*ADAPTED, first_sync=False) as live:
        with pytest.raises(Exception, match="adapter 'alice': expected one that was sent, and none was"):
            ask(live, "alice")
        live.wait(live.trainer.sync_weights())
        yield live
    assert len(abandoned() - before) <= 1, "an engine may leave one segment"


def server_of(live):
    (server,) = live.trainer.policies["alice"].servers.server_handles
    assert live.trainer.policies["carol"].servers.server_handles == [server]
    return server


def on_server(live, work):
    return ray.get(server_of(live).__ray_call__.remote(work))


def test_the_server_computes_what_the_trainer_computes_after_each_sync(live, record_property):
    servers_compute_what_trainers_compute(live, 4, record_property)


def test_an_adapters_answers_are_its_own_policys_alone(live):
    answers_follow_a_policys_own_weights(live)


def record_syncs(server):
    """Remember which adapters the engine is sent."""
    send, server.heard = server.engine.collective_rpc, []

    async def recorded(*args, **settings):
        server.heard.append((settings.get("kwargs") or {}).get("adapter"))
        return await send(*args, **settings)

    server.engine.collective_rpc = recorded


def test_an_adapter_is_sent_if_it_has_stepped(live):
    live.wait(live.trainer.sync_weights())
    learn(live, "carol")
    on_server(live, record_syncs)
    live.trainer.step_number += 1
    live.wait(live.trainer.sync_weights())
    assert on_server(live, lambda server: server.heard) == [("carol", 2)]
    assert on_server(live, lambda server: server.versions) == dict.fromkeys(POLICIES, live.trainer.step_number)


REQUEST = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 12, "ignore_eos": True, "logprobs": True}


def test_rows_of_the_base_are_right_beside_every_adapter(live):
    """With all of vLLM's slots taken, they would be computed with an adapter."""
    prompt, server = list(range(5, 25)), server_of(live)
    asked = [(name, seed) for seed in range(8) for name in (None, *POLICIES)]
    params = [REQUEST | {"seed": seed} | ({"adapter": name} if name else {}) for name, seed in asked]
    outputs = ray.get([server.generate.remote(prompt, own, f"r{i}") for i, own in enumerate(params)])
    alice = live.trainer.policies["alice"]
    for (name, _), output in zip(asked, outputs, strict=True):
        group = live.trainer.policies[name or "alice"]
        rows = to_rows([[(turn_of(group.name, prompt, output), 0)]], {group.name: 1.0})
        work = group.compute_log_prob(rows) if name else alice.compute_ref_log_prob(rows)
        gaps = (live.wait(work)["log_probs"].values() - rows["rollout_log_probs"].values()).abs()
        assert float(gaps.max()) <= CLOSE, name or "base"


def test_adapters_do_not_share_a_prefix_cache(live):
    prompt = list(range(30, 94))
    found = [ask(live, name, prompt=prompt).extra_fields["num_cached_tokens"] for name in (*POLICIES, *POLICIES)]
    assert found == [0, 0, 32, 32]


def renumber(server):
    """From now on the server takes the one adapter for the other."""
    server.config.custom["adapters"] = dict(reversed(server.config.custom["adapters"].items()))


def test_a_server_that_confuses_adapters_ends_the_run_at_the_next_sync(live):
    on_server(live, renumber)
    try:
        found = matrix(live)
        assert min(found["alice", "alice"], found["carol", "carol"]) > 1e-2
        assert max(found["alice", "carol"], found["carol", "alice"]) <= CLOSE
        with pytest.raises(WeightsNotArrived, match=r"policy '(alice|carol)'.*server 0 .*log-probs"):
            live.wait(live.trainer.sync_weights())
    finally:
        on_server(live, renumber)
    live.wait(live.trainer.sync_weights())


def test_an_adapter_that_the_engine_has_lost_ends_the_next_sync(live):
    number = 1
    ray.get(server_of(live).collective_rpc.remote("remove_lora", args=(number,)))
    with pytest.raises(GroupFailed, match=r"policy 'alice'.*syncing the weights.*the engine does not hold it"):
        sync(live, "alice")
    live.trainer.policies["alice"].stepped = True
    sync(live, "alice")
    assert matrix(live)["alice", "alice"] <= CLOSE
