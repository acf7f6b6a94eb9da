"""A run stops where a server does not hold its trainer's weights after a sync. Each fault is made on purpose."""

import asyncio
import re
from types import SimpleNamespace

import pytest
import torch

from marl.cluster.failures import WeightsNotArrived
from marl.cluster.weight_probe import Answer, probe_of, problem_of
from marl.config.errors import ConfigError
from marl.config.rules.resources import digests_are_of_hf
from tests.builders import slow_but
from tests.stack.builders import ADAPTERS, VARIED

NO_WARM_UP = "actor_rollout_ref.actor.optim.lr_warmup_steps=0"


def group_of(live, policy="alice"):
    return live.trainer.policies[policy]


def server_of(live, policy="alice"):
    """The server itself, behind its handle."""
    return group_of(live, policy).servers.server_handles[0]._target


def adapter_of(live, policy="alice"):
    return group_of(live, policy).workers.worker.rollout


def skip(live):
    """The sync is never made, and nobody says so."""
    group = group_of(live)

    async def skipped(step):
        group.version = server_of(live).global_steps = step

    group.sync_weights = skipped


def lose(live):
    """The server reports that everything was loaded."""
    server = server_of(live)

    async def lost(weights):
        server.received |= set(weights)

    server.load_weights = lost


def lose_one_tensor(live):
    server, load = server_of(live), server_of(live).load_weights

    async def partial(weights):
        kept = {name: tensor for name, tensor in weights.items() if not name.endswith("0.mlp.up_proj.weight")}
        assert len(kept) == len(weights) - 1
        server.received |= set(weights)
        await load(kept)

    server.load_weights = partial


def lose_a_part_of_a_tensor(live):
    """A tenth of the embedding."""
    server, load = server_of(live), server_of(live).load_weights

    async def partial(weights):
        old = server.model.get_input_embeddings().weight.detach().clone()
        await load(weights)
        with torch.no_grad():
            own, rows = server.model.get_input_embeddings().weight, len(old) // 10
            own[-rows:] = old[-rows:]

    server.load_weights = partial


def swap(live):
    """Each policy's adapter finds the other one's server."""
    mine, other = adapter_of(live), adapter_of(live, "carol")
    mine.server, other.server = other._server(), mine._server()


def send_to_another(live):
    """carol's weights overwrite alice's server, after alice's own; carol's server is never fed."""
    first, second = group_of(live).sync_weights, group_of(live, "carol").sync_weights
    adapter_of(live, "carol").server = adapter_of(live)._server()

    async def in_turn(step):
        await first(step)
        await second(step)

    group_of(live).sync_weights, group_of(live, "carol").sync_weights = in_turn, lambda step: asyncio.sleep(0)


def send_former_weights(live):
    """The trainer's engine streams what it had before the update."""
    engine = group_of(live).workers.worker.actor.engine
    stream = engine.get_per_tensor_param
    former = [(name, tensor.clone()) for name, tensor in stream()[0]]
    engine.get_per_tensor_param = lambda **options: (iter(former), None)


FAULTS = {
    skip: "all tensors, and are still those of step 1",
    lose: "all tensors, and are still those of step 1",
    lose_one_tensor: r"1 of \d+ tensors differ \(model.layers.0.mlp.up_proj.weight\), and are still those of step 1",
    lose_a_part_of_a_tensor: r"tensors differ \(model.embed_tokens.weight.*\), and match no policy",
    swap: "and are those of policy 'carol': its weights went to this server",
    send_to_another: "and are those of policy 'carol': its weights went to this server",
    send_former_weights: "all tensors, and are still those of step 1",
}
"""The cause that the error gives, by fault."""


def stopped(live, fault):
    """The error of the step after a fault."""
    live.step()
    fault(live)
    with pytest.raises(WeightsNotArrived) as caught:
        live.step()
    assert live.trainer.step_number == 2
    text = str(caught.value)
    assert re.match(r"policy 'alice', step 2: server 0 \(hf-server_\w+\) does not hold", text), text
    assert "resources.weight_check=none" in text
    return text


@pytest.mark.parametrize("fault", slow_but(FAULTS, skip, swap), ids=lambda fault: fault.__name__)
def test_a_digest_stops_the_run_in_the_step_of_the_fault(alone, fault):
    text = stopped(alone(NO_WARM_UP, *VARIED), fault)
    told = re.sub(r"(\d+) of \1 tensors differ \(.*?\)", "all tensors", text)
    assert re.search(FAULTS[fault], told), text


@pytest.mark.parametrize(
    "fault", slow_but([skip, lose, swap, send_to_another, send_former_weights], swap), ids=lambda f: f.__name__
)
def test_a_probe_stops_the_run_in_the_step_of_the_fault(alone, fault):
    text = stopped(alone(NO_WARM_UP, *VARIED, "resources.weight_check=probe"), fault)
    assert "differ from the trainer's by up to" in text or "repeats its answer of step 1 to the last bit" in text


@pytest.mark.slow
def test_a_probe_that_compares_with_a_gap_of_any_size_still_sees_a_server_that_stays(alone):
    """In half precision a step is smaller than the gap of kernels: the server's own last answer gives it away."""
    live = alone(NO_WARM_UP, "resources.weight_check=probe", "controller.log_prob_gap_alarm=5")
    assert "repeats its answer of step 1 to the last bit" in stopped(live, skip)


def test_a_server_that_tells_another_step_stops_the_run(alone):
    """Frozen weights would be equal: the step that its turns carry is wrong."""
    live = alone()
    server_of(live).global_steps = 7
    with pytest.raises(WeightsNotArrived, match="it reports weights of step 7, expected 0"):
        live.wait(live.trainer.weights.proofs[0].prove(0))


SETTINGS = {
    "plain": (),
    "adapters": ADAPTERS,
    "half precision": ("precision=bf16",),
    "one policy": ("agents.alice.policy=alice", "agents.carol.policy=alice"),
}


@pytest.mark.parametrize("check", slow_but(["digest", "probe"], "digest"))
@pytest.mark.parametrize("case", slow_but(SETTINGS, "adapters"))
def test_sound_syncs_pass(alone, case, check):
    live = alone(*(NO_WARM_UP,) * (case != "adapters"), *SETTINGS[case], f"resources.weight_check={check}")
    metrics = [live.step() for _ in range(3)]
    assert all(0 < step["timing_s/weight_check"] < step["timing_s/sync_weights"] for step in metrics)


def test_without_the_check_a_lost_sync_goes_on(alone):
    live = alone(NO_WARM_UP, "resources.weight_check=none")
    skip(live)
    assert "timing_s/weight_check" not in live.step()


@pytest.mark.slow
def test_frozen_weights_that_are_synced_again_are_no_fault(alone):
    """Nothing moves in the first step of a warm-up: servers rightly repeat themselves."""
    live = alone("resources.weight_check=probe", "actor_rollout_ref.actor.optim.lr=0")
    for _ in range(2):
        live.step()


def test_a_digest_of_another_engine_is_refused(compose_config):
    digests_are_of_hf(compose_config("resources.weight_check=digest"))
    with pytest.raises(ConfigError, match=r"resources.weight_check=digest: rollout.name=vllm .*use probe, or auto"):
        digests_are_of_hf(compose_config("resources.weight_check=digest", "actor_rollout_ref.rollout.name=vllm"))
    judge = ("agents.carol.trainable=false", "+policies.carol.rollout.name=vllm")
    digests_are_of_hf(compose_config("resources.weight_check=digest", *judge))  # which is sent no weights


def answer(served, trained, step=1, version=1, ids=(5, 6)):
    return Answer(step, version, ids, served, trained)


PROBLEMS = {
    "agreement": (answer((-1.0, -2.0), (-1.0, -2.001)), None, None),
    "a large gap": (
        answer((-1.0, -2.0), (-1.0, -2.2)),
        None,
        "by up to 0.2 and by 0.1 on average; expected at most 0.1",
    ),
    "a mean gap": (answer((-1.0, -2.0), (-1.02, -2.02)), None, "by 0.02 on average"),
    "no number": (answer((-1.0, float("nan")), (-1.0, -2.0)), None, "by up to nan"),
    "no log-probs": (answer((), (-1.0, -2.0)), None, "gave 0 log-probs for 2 tokens"),
    "another step": (answer((-1.0,), (-1.0,), version=0), None, "weights of step 0"),
    "an engine that tells no step": (answer((-1.0,), (-1.0,), version=None), None, None),
    "a repetition of what stayed": (answer((-1.0,), (-1.0,), 2, 2), answer((-1.0,), (-1.00001,)), None),
    "a repetition of what moved": (answer((-1.0,), (-1.001,), 2, 2), answer((-1.0,), (-1.0,)), "answer of step 1"),
    "other numbers": (answer((-1.0,), (-1.001,), 2, 2), answer((-1.0001,), (-1.0,)), None),
    "other tokens": (answer((-1.0,), (-1.001,), 2, 2, (5,)), answer((-1.0,), (-1.0,), ids=(4,)), None),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_probe_judges_an_answer_by_the_trainers_numbers_and_the_last_answer(case):
    given, before, expected = PROBLEMS[case]
    said = problem_of(given, before, bound=0.1)
    assert said is None if expected is None else expected in said


def test_a_probe_draws_from_the_whole_distribution_whatever_the_policys_sampling():
    """verl's server takes what a request leaves out from ``rollout``: a penalty there would look like other weights."""
    rollout = SimpleNamespace(prompt_length=8, response_length=4, temperature=0.3, top_k=5, repetition_penalty=1.1)
    client = SimpleNamespace(rollout=rollout, encoder=SimpleNamespace(encode=lambda _: range(20)), seed_key="seed")
    sampling = probe_of(client, 3).sampling
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    assert {key: sampling[key] for key in neutral} == neutral and sampling["max_tokens"] == 4 and sampling["seed"] == 3
