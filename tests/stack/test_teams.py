"""Teams that mix adapters, policies that nobody trains and endpoints: who has a trainer, who a server alone, and whose weights are
proved."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from marl.cluster.failures import WeightsNotArrived
from marl.cluster.workers.policy_worker import SeatWorker
from marl.config.policies import own_settings
from tests.builders import slow_but
from tests.judge import Judge, serving
from tests.stack.builders import ADAPTED

FROZEN = ("agents.carol.trainable=false", "credit=own")


def server_of(live, policy="alice"):
    return live.trainer.policies[policy].servers.server_handles[0]._target


def skip(live):
    """alice's adapter is never sent, and nobody says so."""

    async def skipped(step):
        server_of(live).versions["alice"] = step

    live.trainer.policies["alice"].sync_weights = skipped


def swap(live):
    """The server takes each adapter for the other one."""
    bank, put, other = server_of(live).adapters, server_of(live).adapters.put, {"alice": "carol", "carol": "alice"}
    bank.put = lambda name, *rest: put(other[name], *rest)


def lose_half(live):
    """Matrices B stay what they were."""
    bank, put = server_of(live).adapters, server_of(live).adapters.put

    def half(name, weights, scaling):
        put(name, weights | {key: old for key, old in bank.weights(name) if ".lora_B." in key}, scaling)

    bank.put = half


def change_the_base(live):
    with torch.no_grad():
        server_of(live).model.get_input_embeddings().weight[0] += 1


FAULTS = {
    skip: ("alice", r"\d+ of \d+ tensors differ \(.*lora_A.*\), and are still those of step 1"),
    swap: ("alice", r"lora_.*and are those of policy 'carol': its weights went to this server"),
    lose_half: ("alice", r"lora_B.*, and are still those of step 1"),
    change_the_base: ("alice", r"1 of \d+ tensors differ \(model.embed_tokens.weight\)|2 of \d+ tensors .*lm_head"),
}
"""The policy whose sync the error names, and the cause it gives, by fault."""


@pytest.mark.parametrize("fault", slow_but(FAULTS, swap), ids=lambda fault: fault.__name__)
def test_an_adapter_that_did_not_arrive_stops_the_run(alone, fault):
    live = alone(*ADAPTED)
    live.step()
    fault(live)
    with pytest.raises(WeightsNotArrived) as caught:
        live.step()
    policy, said = FAULTS[fault]
    assert str(caught.value).startswith(f"policy '{policy}', step 2") and re.search(said, str(caught.value)), (
        caught.value
    )


@pytest.mark.slow
def test_a_probe_asks_for_the_adapter_it_is_about(alone):
    live = alone(*ADAPTED, "resources.weight_check=probe")
    for _ in range(2):
        live.step()
    skip(live)
    with pytest.raises(
        WeightsNotArrived, match=r"policy 'alice', step 3.*(repeats its answer|differ from the trainer's)"
    ):
        live.step()


@pytest.mark.slow
def test_an_adapter_that_nobody_trains_stays_the_base(alone):
    """Beside a trained one it costs no server; its weights are proved as the others' are."""
    live = alone(*ADAPTED, *FROZEN)
    group = live.trainer.policies["carol"]
    assert group.base and group.workers is live.trainer.policies["alice"].workers
    for _ in range(2):
        live.step()
    held = dict(server_of(live, "carol").adapters.weights("carol"))
    assert held and not any(tensor.any() for key, tensor in held.items() if ".lora_B." in key)
    assert live.trainer.weights.proofs[0].policies.keys() == {"alice", "carol"}


@pytest.mark.slow
def test_in_a_pool_without_training_it_is_a_server_alone(alone):
    """It has no base to train, may have another model, and there is no sync of it to prove."""
    live = alone(*ADAPTED, *FROZEN, "resources.pools={mine:{policies:[carol]}}")
    group, path = live.trainer.policies["carol"], own_settings(live.trainer.config, "carol").model.path
    assert not group.takes_weights and type(group.workers.worker) is SeatWorker
    live.step()
    (proof,) = live.trainer.weights.proofs
    assert proof.policies.keys() == {"alice"}
    first = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    served = server_of(live, "carol").model.state_dict()
    assert all(torch.equal(served[name], first[name]) for name in first)


@pytest.mark.parametrize("check", ["digest", "probe"])
def test_servers_that_load_their_own_weights_have_no_sync_to_prove(alone, check):
    live = alone(*FROZEN, f"resources.weight_check={check}")
    live.step()
    (proof,) = live.trainer.weights.proofs
    assert proof.policies.keys() == {"alice"}


@pytest.mark.slow
def test_adapters_play_with_a_server_elsewhere(alone):
    with serving(Judge()) as address:
        live = alone(*ADAPTED, *FROZEN, f"+policies.carol.endpoint={{base_url: '{address}', model: m-1}}")
        assert "agent/alice/grad_norm" in live.step()
    assert list(live.trainer.policies) == ["alice"]
    assert live.trainer.weights.proofs[0].policies.keys() == {"alice"}
