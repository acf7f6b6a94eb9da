"""Two policies on vLLM's servers: each server has its own policy's weights after every sync, and answers as it is asked."""

import time

import pytest

from marl.cluster.failures import GroupFailed
from tests.vllm.builders import (
    CLOSE,
    CLOSE_ON_AVERAGE,
    ask,
    engine_of,
    learn,
    matrix,
    shared_memory,
    sync,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def live(start):
    before = shared_memory()
    with start() as live:
        yield live
    # the engine that a test kills leaves its own; verl's buffers are always freed
    left = shared_memory() - before
    assert not [path for path in left if "verl_weights" in path] and len(left) <= 2, left


def test_servers_compute_what_trainers_compute_after_each_of_ten_syncs(live):
    for _ in range(10):
        metrics = live.step()
        largest = [value for key, value in metrics.items() if key.endswith("log_prob_gap_max")]
        mean = [value for key, value in metrics.items() if key.endswith("log_prob_gap_mean")]
        assert len(largest) == len(mean) == 2
        assert max(largest) <= CLOSE and max(mean) <= CLOSE_ON_AVERAGE
    versions = {turn.version for episode in live.episodes() for turn in episode.turns}
    assert versions == {live.trainer.step_number}


def test_a_server_has_its_own_policys_weights_alone(live):
    for _ in range(2):
        learn(live, "alice")
    behind = matrix(live)
    assert behind["alice", "alice"] > 1e-3, "alice's server has her old weights"
    assert behind["carol", "carol"] <= CLOSE
    sync(live, "alice")
    found = matrix(live)
    assert max(found["alice", "alice"], found["carol", "carol"]) <= CLOSE
    assert min(found["alice", "carol"], found["carol", "alice"]) > 1e-2


def test_a_seed_gives_the_same_answer_alone_and_in_company(live):
    first, again = (ask(live, seed=2**63 - 1, ignore_eos=True) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert first.log_probs == pytest.approx(again.log_probs, abs=CLOSE)
    assert len({tuple(ask(live, seed=seed, ignore_eos=True).token_ids) for seed in range(8)}) > 4
    assert ask(live, temperature=0.0).token_ids == ask(live, top_k=1, seed=1).token_ids


def test_stop_strings_end_an_answer(live):
    full = ask(live, seed=5, ignore_eos=True)
    word = live.trainer.controller.clients["alice"].tokenizer.convert_ids_to_tokens(full.token_ids[3])
    stopped = ask(live, seed=5, ignore_eos=True, stop=[word])
    assert stopped.token_ids == full.token_ids[: len(stopped.token_ids)] and len(stopped.token_ids) <= 4


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


def test_a_conversations_prefix_is_cached_until_the_next_sync(live):
    prompt = list(range(5, 69))
    first = ask(live, prompt=prompt, temperature=0.0)
    longer = [*prompt, *first.token_ids, 7, 8]
    assert ask(live, prompt=longer).extra_fields["num_cached_tokens"] == 64, "two blocks of 32"
    sync(live, "alice")
    assert ask(live, prompt=longer).extra_fields["num_cached_tokens"] == 0, "computed with the old weights"


def test_servers_say_when_they_worked(live):
    metrics = live.step()
    assert 0 < metrics["perf/overhead_share"] < 0.6


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
