"""Policies that are adapters on one base (``sharing=lora``): each is updated, served, referred to and saved as if it were alone."""

import threading

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from marl.cluster.workers.shard_files import THREAD
from marl.evaluation.source import saved_weights
from marl.utils.marks import marks_of, wait_for
from tests.builders import slow_but
from tests.stack.builders import (
    ADAPTED,
    adapter_engine,
    adapter_weights,
    merged_weights,
    same_weights,
    trainable,
    updated,
)


@pytest.mark.slow
def test_servers_play_with_every_adapter_bit_for_bit(alone):
    live = alone(*ADAPTED)
    assert live.trainer.policies["alice"].workers is live.trainer.policies["carol"].workers
    for _ in range(2):
        metrics = live.step()
        for agent in ("alice", "carol"):
            assert metrics[f"agent/{agent}/log_prob_gap_max"] <= 1e-5
            assert metrics[f"agent/{agent}/grad_norm"] > 0
    assert not same_weights(adapter_weights(live, "alice"), adapter_weights(live, "carol"))


APART = ("resources.pools={left:{policies:[alice]},right:{policies:[carol]}}",)
"""Every adapter alone on a base of its own."""


OF_THEIR_OWN = (
    "+policies.alice.actor.optim.lr=0.02", "+policies.carol.actor.optim.clip_grad=0.1",
    "+policies.carol.model.lora_rank=2", "+policies.carol.actor.entropy_coeff=0.1",
)  # fmt: skip


@pytest.mark.parametrize("own", [OF_THEIR_OWN, pytest.param((), marks=pytest.mark.slow)], ids=["of their own", "alike"])
def test_an_adapter_is_updated_as_if_it_were_alone(alone, own):
    """The same rows, interleaved on one base and apart on two: weights, gradient norms and log-probs to the last bit."""
    together, apart = alone(*ADAPTED, *own), alone(*ADAPTED, *APART, *own)
    assert apart.trainer.policies["alice"].workers is not apart.trainer.policies["carol"].workers
    rows = trainable(together, 0)
    for name in ("alice", "carol", "alice", "alice", "carol"):
        one, other = updated(together, name, rows[name]), updated(apart, name, rows[name])
        assert one["grad_norm"] == other["grad_norm"] > 0 and one["loss"] == other["loss"] and one["lr"] == other["lr"]
    for name in ("alice", "carol"):
        assert same_weights(adapter_weights(together, name), adapter_weights(apart, name))
        said, alone_said = (
            live.wait(live.trainer.policies[name].compute_log_prob(rows[name])) for live in (together, apart)
        )
        assert torch.equal(said["log_probs"].values(), alone_said["log_probs"].values())
    assert updated(together, "alice", rows["alice"])["lr"] == (0.02 if own else 0.01)


@pytest.mark.slow
def test_gathered_parameters_do_not_hide_the_switch(alone):
    """``reshard_after_forward=false`` keeps parameters gathered after a forward pass: adapters learn all the same."""
    fsdp = "actor_rollout_ref.actor.fsdp_config.reshard_after_forward"
    epochs = "actor_rollout_ref.actor.ppo_epochs=2"  # a switch that was hidden is lost after the first backward pass
    usual, gathered = alone(*ADAPTED, epochs), alone(*ADAPTED, epochs, f"{fsdp}=false")
    rows = trainable(usual, 6)
    for name, other_name in (("alice", "carol"), ("carol", "alice"), ("alice", "carol")):
        for live in (usual, gathered):
            live.wait(live.trainer.policies[name].compute_ref_log_prob(rows[name]))
            live.wait(live.trainer.policies[other_name].compute_log_prob(rows[other_name]))
        one, other = updated(usual, name, rows[name]), updated(gathered, name, rows[name])
        assert one["grad_norm"] == other["grad_norm"] > 0
    assert same_weights(adapter_weights(usual, "alice"), adapter_weights(gathered, "alice"))


def test_an_update_leaves_base_and_other_adapters_alone(alone):
    live = alone(*ADAPTED)
    rows, engine = trainable(live, 1), adapter_engine(live)
    assert all(update.optimizer.param_groups[0]["fused"] for update in engine.updates.values())
    updated(live, "carol", rows["carol"])
    base, carol, moments = (
        dict(engine.base_weights()),
        adapter_weights(live, "carol"),
        engine.adapter_state("carol")["optimizer"],
    )
    before = adapter_weights(live, "alice")
    updated(live, "alice", rows["alice"])
    assert not same_weights(adapter_weights(live, "alice"), before)
    assert same_weights(adapter_weights(live, "carol"), carol) and same_weights(dict(engine.base_weights()), base)
    after = engine.adapter_state("carol")["optimizer"]["state"]
    assert all(same_weights(after[index], state) for index, state in moments["state"].items())


@pytest.mark.slow
def test_the_clip_is_of_the_adapters_own_gradients(alone):
    """A gradient that another adapter left behind does not count."""
    live = alone(*ADAPTED)
    rows, engine = trainable(live, 2), adapter_engine(live)
    updated(live, "carol", rows["carol"])
    engine.use("carol")
    for key, parameter in engine.module.named_parameters():
        if ".alice." in key:
            parameter.grad = torch.full_like(parameter, 1e3)
    assert updated(live, "carol", rows["carol"])["grad_norm"] < 1e3
    assert all(float(p.detach().abs().max()) < 1e2 for _, p in engine.module.named_parameters())


@pytest.mark.slow
def test_the_reference_is_the_base(alone):
    kl = ("actor_rollout_ref.actor.use_kl_loss=true", "+policies.alice.actor.kl_loss_coef=0.5")
    live = alone(*ADAPTED, *kl)
    rows, group = trainable(live, 3), live.trainer.policies["alice"]
    untrained = live.wait(group.compute_log_prob(rows["alice"]))["log_probs"].values()
    for name in ("alice", "carol"):
        rows[name]["ref_log_prob"] = live.wait(live.trainer.policies[name].compute_ref_log_prob(rows[name]))[
            "log_probs"
        ]
        assert updated(live, name, rows[name])["grad_norm"] > 0
    reference = live.wait(group.compute_ref_log_prob(rows["alice"]))["log_probs"].values()
    assert torch.equal(reference, untrained), "a fresh adapter adds nothing, and the base stays"
    trained = live.wait(group.compute_log_prob(rows["alice"]))["log_probs"].values()
    assert not torch.equal(trained, untrained), "the adapter is back after its reference"


@pytest.mark.slow
def test_a_sync_sends_what_has_stepped_and_no_more(alone, monkeypatch):
    live = alone(*ADAPTED)
    server = live.trainer.policies["alice"].servers.server_handles[0]._target
    sent, put = [], server.adapters.put
    monkeypatch.setattr(server.adapters, "put", lambda name, *rest: (sent.append(name), put(name, *rest)))
    monkeypatch.setattr(server, "load_weights", None)  # the base is there
    rows = trainable(live, 4)
    updated(live, "alice", rows["alice"])
    live.trainer.step_number = 7
    live.wait(live.trainer.sync_weights())
    assert sent == ["alice"] and server.versions == {"alice": 7, "carol": 7}
    turns = [turn for episode in live.episodes() for turn in episode.turns]
    assert {turn.version for turn in turns} == {7}


@pytest.mark.slow
def test_a_checkpoint_continues_every_adapter_to_the_last_bit(alone, tmp_path):
    live = alone(*ADAPTED, "+policies.carol.model.lora_rank=2")
    live.step()
    live.wait(live.trainer.save())
    again = alone(*ADAPTED, "+policies.carol.model.lora_rank=2", "trainer.resume_mode=auto")
    again.wait(again.trainer.resume())
    rows = trainable(live, 5)
    for name in ("alice", "carol"):
        assert same_weights(adapter_weights(live, name), adapter_weights(again, name))
        one, other = updated(live, name, rows[name]), updated(again, name, rows[name])
        assert one["grad_norm"] == other["grad_norm"] and same_weights(
            adapter_weights(live, name), adapter_weights(again, name)
        )
    saved = load_file(tmp_path / "global_step_1" / "carol" / "actor" / "lora_adapter" / "adapter_model.safetensors")
    assert {tensor.shape[0] for key, tensor in saved.items() if "lora_A" in key} == {2}


@pytest.mark.slow
def test_what_is_saved_is_loaded_by_others(alone, cold_assets, tmp_path):
    """PEFT's folder on the base, and the merged model, give the trainer's logits."""
    live = alone(*ADAPTED)
    live.step()
    live.wait(live.trainer.save())
    actor, ids = tmp_path / "global_step_1" / "carol" / "actor", torch.arange(1, 25).view(2, 12)
    base = AutoModelForCausalLM.from_pretrained(cold_assets / "model", dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(
        saved_weights(tmp_path / "global_step_1", "carol"), dtype=torch.float32
    ).eval()
    engine = adapter_engine(live)
    engine.use("carol")
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, actor / "lora_adapter").eval()(ids).logits
        torch.testing.assert_close(merged(ids).logits, adapted, atol=1e-5, rtol=0)
        torch.testing.assert_close(engine.module.eval()(ids).logits, adapted, atol=1e-5, rtol=0)
    assert float((adapted - before).abs().max()) > 1e-3, "it has learned"
    assert AutoTokenizer.from_pretrained(actor / "huggingface").eos_token_id is not None


@pytest.mark.slow
def test_saves_that_wait_share_one_copy_of_the_base(alone, tmp_path, monkeypatch):
    """However slow the disk: only adapters wait to be written."""
    live, copies, disk = alone(*ADAPTED), [], threading.Event()
    engine, worker = adapter_engine(live), live.trainer.policies["alice"].workers.worker
    base_weights = engine.base_weights
    monkeypatch.setattr(engine, "base_weights", lambda: copies.append(1) or base_weights())
    names = ("alice-1", "carol-1", "alice-2")
    THREAD.submit(disk.wait, 60)
    try:
        for name in names:
            worker.save_adapter(name.split("-")[0], str(tmp_path / name))
    finally:
        disk.set()
    wait_for([mark for name in names for mark in marks_of(tmp_path / name, 1)], 60, "")
    assert len(copies) == 1
    for name in names:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name / "huggingface", dtype=torch.float32).state_dict()
        wanted = merged_weights(live, name.split("-")[0])
        assert all(torch.equal(saved[key], weight) for key, weight in wanted.items())


@pytest.mark.slow
def test_a_checkpoint_of_another_rank_is_refused(alone):
    live = alone(*ADAPTED)
    state = adapter_engine(live).adapter_state("alice")
    other = alone(*ADAPTED, "+policies.alice.model.lora_rank=2")
    with pytest.raises(ValueError, match=r"'alice'.*lora_rank"):
        adapter_engine(other).load_adapter_state("alice", state)


@pytest.mark.slow
def test_adapters_that_other_ranks_saved_are_refused(alone, tmp_path):
    """Shards of two ranks: a rank that found none would have gone on with adapters of its own."""
    live = alone(*ADAPTED)
    worker = live.trainer.policies["alice"].workers.worker
    worker.save_adapter("alice", str(tmp_path / "saved"), beside=False)
    (file,) = (tmp_path / "saved").glob("adapter_world_size_1_rank_0.safetensors")
    file.rename(file.with_name("adapter_world_size_2_rank_0.safetensors"))
    with pytest.raises(
        ValueError, match=r"saved by another number of ranks, and this run has 1; resume with as many ranks"
    ):
        worker.load_adapter("alice", str(tmp_path / "saved"))


def test_an_unknown_adapter_is_an_error_that_names_the_known(alone):
    live = alone(*ADAPTED)
    with pytest.raises(KeyError, match="bob.*alice, carol"):
        adapter_engine(live).use("bob")
    server = live.trainer.policies["alice"].servers.server_handles[0]._target
    with pytest.raises(ValueError, match="bob.*alice.*carol"):
        live.wait(server.generate([1, 2], {"adapter": "bob", "max_tokens": 2}, "x"))
    live.wait(server.loop_task)
    with pytest.raises(KeyError, match="bob"):
        live.wait(server.finish_adapter("bob", 1.0, 3))


LEARNERS = (("learner=happo",), ("learner=mappo",), ("learner=qmix", "credit=team"))


@pytest.mark.parametrize("learner", slow_but(LEARNERS, ("learner=mappo",)), ids=str)
def test_learners_see_policies_whatever_they_share(alone, learner):
    live = alone(*ADAPTED, *learner)
    before = {name: adapter_weights(live, name) for name in ("alice", "carol")}
    metrics = live.step()
    for name in before:
        assert metrics[f"agent/{name}/log_prob_gap_max"] <= 1e-5
        assert not same_weights(adapter_weights(live, name), before[name])
