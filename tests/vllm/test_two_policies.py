"""Two policies on vLLM's servers: each server has its own policy's weights after every sync, and answers as it is asked."""

import asyncio
import time

import pytest
import ray

from marl.cluster.failures import GroupFailed, WeightsNotArrived
from tests.vllm.builders import (
    CLOSE,
    POLICIES,
    abandoned,
    answer,
    answers_follow_a_policys_own_weights,
    ask,
    ask_together,
    differences,
    engine_of,
    learn,
    matrix,
    servers_compute_what_trainers_compute,
    sync,
)
from tests.vllm.misdirected import misdirected

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
EXTENSION = "tests.vllm.refuses_weights.RefusesWhenTold"
REFUSES = f"actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls={EXTENSION}"


@pytest.fixture(scope="module")
def live(start):
    before = abandoned()
    # alice's servers are put to sleep and woken, carol's are not
    with start("+policies.carol.rollout.free_cache_engine=false", REFUSES) as live:
        yield live
    # the engine that a test kills leaves its own; verl's buffers are always freed
    left = abandoned() - before
    assert not [path for path in left if "verl_weights" in path] and len(left) <= 2, left


def cached(output):
    return output.extra_fields["num_cached_tokens"]


def test_servers_compute_what_trainers_compute_after_each_of_ten_syncs(live, record_property):
    servers_compute_what_trainers_compute(live, 10, record_property)


def test_a_server_has_its_own_policys_weights_alone(live):
    answers_follow_a_policys_own_weights(live)


def all_arrived(live):
    """Both policies hold their own weights, which differ."""
    for policy in POLICIES:
        learn(live, policy)
    live.wait(live.trainer.sync_weights())


def ranks_of(live):
    return {name: int(live.trainer.policies[name].rollout.custom.replica_offset) for name in POLICIES}


def test_half_an_offset_writes_into_the_other_policys_server_without_an_error(live):
    """The negative control: replicas with an offset, carol's adapter without. Log-probs alone show it."""
    all_arrived(live)
    assert ranks_of(live) == {"alice": 0, "carol": 1024}
    with misdirected(live, {"carol": 0}):
        learn(live, "carol")
        sync(live, "carol")
    found = matrix(live)
    assert found["alice", "carol"] <= CLOSE, "carol's weights are in alice's server"
    assert found["alice", "alice"] > 1e-2 and found["carol", "carol"] > 1e-3
    with pytest.raises(WeightsNotArrived, match=r"policy '(alice|carol)'.*server 0 .*log-probs"):
        live.wait(proved(live))
    live.wait(live.trainer.sync_weights())


async def proved(live):
    for proof in live.trainer.weights.proofs:
        await proof.prove(live.trainer.step_number)


def test_weights_of_two_policies_that_are_swapped_end_the_run_at_that_sync(live):
    all_arrived(live)
    ranks = ranks_of(live)
    with misdirected(live, dict(zip(ranks, reversed(ranks.values()), strict=True))):
        with pytest.raises(WeightsNotArrived, match=r"policy '(alice|carol)'.*server 0 .*log-probs"):
            live.wait(live.trainer.sync_weights())
        found = matrix(live)
    assert max(found["alice", "carol"], found["carol", "alice"]) <= CLOSE
    assert min(found["alice", "alice"], found["carol", "carol"]) > 1e-2
    live.wait(live.trainer.sync_weights())
    assert max(differences(live, name, name).max() for name in POLICIES) <= CLOSE


def test_a_seed_gives_the_same_answer_alone_and_in_company(live):
    hot = {"temperature": 2.0, "ignore_eos": True}
    alone = ask(live, seed=2**63 - 1, **hot)
    together = ask_together(live, [{"seed": seed, **hot} for seed in (*range(31), 2**63 - 1)])
    assert alone.token_ids == together[-1].token_ids
    assert alone.log_probs == pytest.approx(together[-1].log_probs, abs=CLOSE)
    assert len({tuple(output.token_ids) for output in together}) > 16
    assert ask(live, temperature=0.0).token_ids == ask(live, top_k=1, seed=1).token_ids


def test_stop_strings_end_an_answer(live):
    client, asked = live.trainer.controller.clients["alice"], {"seed": 5, "temperature": 2.0, "ignore_eos": True}
    full = ask(live, **asked)
    words = client.tokenizer.convert_ids_to_tokens(full.token_ids)
    shown = client.tokenizer.decode(full.token_ids, skip_special_tokens=True).split()
    stop = next(word for i, word in enumerate(words) if i > 1 and word in shown and word not in words[:i])
    size = words.index(stop) + 1
    stopped = ask(live, **asked, stop=[stop])
    assert stopped.token_ids == full.token_ids[:size] and size < len(full.token_ids)
    last = {"max_tokens": size, "stop": [stop]}
    assert client.stop_reason(ask(live, **asked | last), last) == "completed", "ended by its last token"


def test_an_answer_that_was_cut_off_is_marked(live):
    controller = live.trainer.controller
    sampling, controller.sampling = controller.sampling, lambda *of: {**sampling(*of), "max_tokens": 1}
    try:
        turns = [turn for episode in live.episodes() for turn in episode.turns]
    finally:
        controller.sampling = sampling
    assert turns and all(turn.truncated for turn in turns)


def test_a_refused_request_leaves_the_server_alive(live):
    with pytest.raises(Exception, match="no room to generate|headroom"):
        ask(live, prompt=[5] * 300)
    assert ask(live).token_ids


def unfinished(server):
    return len(server.engine.output_processor.request_states)


def test_requests_whose_callers_have_gone_are_given_up(live):
    (server,) = live.trainer.policies["alice"].servers.server_handles
    long = {"max_tokens": 180, "ignore_eos": True}

    async def until(condition):
        async with asyncio.timeout(60):
            while not condition(await server.__ray_call__.remote(unfinished)):
                await asyncio.sleep(0.01)

    async def asked_and_left():
        asked = [asyncio.ensure_future(answer(live, "alice", seed=seed, **long)) for seed in range(64)]
        await until(lambda count: count == 64)
        left = time.monotonic()
        for one in asked[1:]:
            one.cancel()
        await until(lambda count: count <= 1)
        seconds, kept = time.monotonic() - left, await asked[0]
        await until(lambda count: count == 0)
        return seconds, kept

    alone, began = ask(live, seed=0, **long), time.monotonic()
    ask_together(live, [{"seed": seed} | long for seed in range(64)])
    whole = time.monotonic() - began
    seconds, kept = live.wait(asked_and_left())
    assert seconds < whole / 2, (seconds, whole)
    assert kept.token_ids == alone.token_ids and len(kept.token_ids) == 180


@pytest.mark.parametrize("agent", ["alice", "carol"])
def test_a_conversations_prefix_is_cached_until_the_next_sync(live, agent):
    prompt = list(range(5, 69))
    first = ask(live, agent, prompt=prompt, temperature=0.0)
    longer = [*prompt, *first.token_ids, 7, 8]
    assert cached(ask(live, agent, prompt=longer)) == 64, "two blocks of 32"
    sync(live, agent)
    assert cached(ask(live, agent, prompt=longer)) == 0, "computed with the old weights"


def test_servers_say_when_they_worked(live):
    metrics = live.step()
    assert 0 < metrics["perf/overhead_share"] < 0.6


def test_an_engine_that_refuses_weights_ends_the_sync_at_once_with_the_cause(live):
    (server,) = live.trainer.policies["alice"].servers.server_handles
    ray.get(server.collective_rpc.remote("refuse_next"))
    began = time.monotonic()
    with pytest.raises(GroupFailed, match=r"policy 'alice'.*syncing the weights.*failed to take the weights") as failed:
        sync(live, "alice")
    assert time.monotonic() - began < 10
    assert "no parameter of this name" in str(failed.value)
    sync(live, "alice")
    assert differences(live, "alice", "alice").max() <= CLOSE


def test_a_dead_engine_ends_a_step_and_a_sync_within_seconds(live):
    """Last: carol has no server afterwards."""
    engine_of(live, "carol").kill()
    began = time.monotonic()
    with pytest.raises(GroupFailed, match="policy 'carol' failed while generating.*EngineDeadError"):
        live.step()
    assert time.monotonic() - began < 60
    began = time.monotonic()
    with pytest.raises(GroupFailed, match="policy 'carol'.*syncing"):
        sync(live, "carol")
    assert time.monotonic() - began < 20
