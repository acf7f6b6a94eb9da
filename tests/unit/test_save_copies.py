"""Copies that a save in the background holds, against bytes counted by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from marl.config.placement import size_of
from marl.methods.sft import SFT
from marl.preflight import save_copies
from marl.preflight.memory_plan import Memory
from marl.preflight.plan_report import plan_text, pool_members
from marl.preflight.prepare import prepare


@pytest.fixture
def planned(compose_config, cold_assets):
    def plan(*options):
        setup = prepare(compose_config(f"assets={cold_assets}", *options))
        members, _ = pool_members(setup, 80e9)
        return setup, members

    return plan


@pytest.mark.parametrize("options", [(), ("hardware=gpu", "trainer.n_gpus_per_node=1")])
def test_weights_and_two_moments_of_every_trained_parameter_are_copied(planned, options):
    setup, members = planned("agents.carol.trainable=false", *options)
    assert save_copies.copies_of(setup, members) == 12 * setup.sizes["alice"].parameters, "in full precision"


def test_a_whole_model_that_several_ranks_gather_is_one_copy_more(planned):
    options = "agents.carol.trainable=false", "trainer.n_gpus_per_node=2"
    setup, members = planned(*options)
    assert save_copies.copies_of(setup, members) == 16 * setup.sizes["alice"].parameters
    setup, members = planned(*options, "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]")
    assert save_copies.copies_of(setup, members) == 12 * setup.sizes["alice"].parameters


@pytest.mark.slow
def test_a_critic_is_copied_with_its_target_and_its_whole_model(planned):
    def critic_of(*options):
        setup, members = planned("agents.carol.trainable=false", *options)
        ((pool, memory),) = (
            (pool, memory) for pool, own in members.items() for name, memory in own if "critic" in name
        )
        alice = 12 * setup.sizes["alice"].parameters
        return (save_copies.copies_of(setup, members) - alice) / memory.weights, size_of(setup.config, pool).ranks

    whole = "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    assert critic_of("learner=mappo") == critic_of("learner=mappo", whole) == (3, 1), "alone"
    assert critic_of("learner=qmix", "credit=team") == (4, 1), "a target"


def test_of_adapters_on_one_base_their_own_parameters_and_a_merged_model_are_copied(planned):
    shared = ("sharing=lora", "actor_rollout_ref.model.lora_rank=8")
    setup, members = planned(*shared, "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]")
    size = setup.sizes["alice"]
    adapter = 8 * size.linear_width * 4
    assert save_copies.copies_of(setup, members) == 3 * adapter * len(setup.sizes)
    setup, members = planned(*shared)
    base = size.parameters * 4
    assert save_copies.copies_of(setup, members) == 3 * adapter * len(setup.sizes) + 2 * (base + adapter)


def test_the_merged_model_of_a_policy_with_its_own_adapter_is_a_copy(planned):
    setup, members = planned(
        "agents.carol.trainable=false", "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=true"
    )
    (memory,) = (memory for own in members.values() for name, memory in own if name == "alice")
    assert save_copies.copies_of(setup, members) == 2 * memory.weights + memory.moments


def test_a_renewed_reference_is_copied(planned):
    renewed = ("actor_rollout_ref.actor.use_kl_loss=true", "trainer.ref_update_freq=2")
    setup, members = planned("agents.carol.trainable=false", *renewed)
    assert save_copies.copies_of(setup, members) == 16 * setup.sizes["alice"].parameters


@pytest.mark.parametrize(
    ("contents", "each"), [("model", 4), ("hf_model", 4), ("model,hf_model", 4), ("hf_model,optimizer", 12)]
)
def test_what_is_not_saved_is_not_copied(planned, contents, each):
    saved = f"actor_rollout_ref.actor.checkpoint.save_contents=[{contents}]"
    setup, members = planned("agents.carol.trainable=false", saved)
    assert save_copies.copies_of(setup, members) == each * setup.sizes["alice"].parameters


@pytest.mark.parametrize(
    "options",
    [
        ("trainer.save_in_background=false",),
        ("trainer.save_freq=-1", "trainer.save_final=false"),
        ("trainer.val_only=true",),
        ("actor_rollout_ref.actor.strategy=fsdp", "hardware=gpu"),
    ],
)
def test_without_a_save_in_the_background_nothing_is_copied(planned, options):
    setup, members = planned(*options)
    assert save_copies.copies_of(setup, members) == 0.0 and "copies" not in plan_text(setup)


def test_policies_that_nobody_trains_are_not_copied_where_nothing_is_played(planned):
    setup, _ = planned("agents.carol.trainable=false")
    members, _ = pool_members(replace(setup, method=SFT(SFT.Config("sft"))), None)
    assert save_copies.copies_of(setup, members) == 12 * setup.sizes["alice"].parameters


@pytest.mark.parametrize("options", [("hardware=gpu",), ("trainer.nnodes=2",)])
def test_of_other_machines_nothing_is_known(planned, monkeypatch, options):
    setup, members = planned(*options)
    monkeypatch.setattr(save_copies.psutil, "virtual_memory", lambda: SimpleNamespace(available=1))
    assert len(save_copies.lines_of(setup, members, dict.fromkeys(members, 0.0))) == 1


@pytest.mark.parametrize("free,warns", [(40e9, False), (25e9, True), (15e9, False)])
def test_a_machine_with_room_for_the_ranks_and_not_for_the_copies_is_named(planned, monkeypatch, free, warns):
    """One that is too small for the ranks has a warning of its own."""
    setup, _ = planned("agents.carol.trainable=false")
    pool = setup.pool_by_policy["alice"]
    monkeypatch.setattr(save_copies.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    lines = save_copies.lines_of(setup, {pool: [("alice", Memory(weights=3e9, moments=7e9))]}, {pool: 20e9})
    assert lines[0] == "copies on the hosts while a checkpoint is written (trainer.save_in_background): 10 GB in all"
    assert len(lines) == 1 + warns
    assert (
        not warns
        or "needs some 30.0 GB, and this machine has 25.0 GB; set trainer.save_in_background=false" in lines[1]
    )
