"""References, divergence in the loss and in the reward, and corrections for the distance of the servers."""

import json

import pytest
import torch
from omegaconf import OmegaConf

from marl.batch.kl import KLInReward, correct
from tests.stack.builders import VARIED, parameters

NO_WARM_UP = "actor_rollout_ref.actor.optim.lr_warmup_steps=0"
KL_LOSS = ("actor_rollout_ref.actor.use_kl_loss=true", NO_WARM_UP, *VARIED)


def ref_log_probs(live, rows, policy="alice"):
    return live.wait(live.trainer.policies[policy].compute_ref_log_prob(rows))["log_probs"].values()


def log_probs(live, rows, policy="alice"):
    return live.wait(live.trainer.policies[policy].compute_log_prob(rows))["log_probs"].values()


def rows_of(live, policy="alice"):
    return live.trainer.batch_of(live.episodes()).rows[policy]


def test_the_reference_is_the_policys_first_weights_and_stays_there(alone):
    live = alone(*KL_LOSS)
    rows = rows_of(live)
    first = log_probs(live, rows)
    assert torch.equal(ref_log_probs(live, rows), first)
    metrics = [live.step(), live.step()][-1]
    assert torch.equal(ref_log_probs(live, rows), first) and not torch.equal(log_probs(live, rows), first)
    assert metrics["agent/alice/kl_loss"] > 0 and metrics["agent/alice/kl_coef"] == pytest.approx(0.001)


@pytest.mark.slow
def test_it_is_renewed_every_so_many_steps(alone):
    live = alone(*KL_LOSS, "trainer.ref_update_freq=2")
    rows = rows_of(live)
    first = ref_log_probs(live, rows)
    live.step()
    assert torch.equal(ref_log_probs(live, rows), first), "not yet"
    live.step()
    assert torch.equal(ref_log_probs(live, rows), log_probs(live, rows)) and not torch.equal(
        first, log_probs(live, rows)
    )


@pytest.mark.slow
def test_a_renewed_reference_and_its_coefficient_are_in_the_checkpoint(alone, tmp_path):
    options = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=1e-4",
               "algorithm.kl_ctrl.horizon=50", NO_WARM_UP, "trainer.ref_update_freq=1", "learner=ippo")  # fmt: skip
    live = alone(*options)
    live.step(), live.step()
    live.wait(live.trainer.save())
    rows, saved = rows_of(live), live.trainer.references.state_dict()
    expected = ref_log_probs(live, rows), log_probs(live, rows)
    state = json.loads((tmp_path / "global_step_2" / "trainer.json").read_text())
    assert state["references"] == saved and saved["alice"]["coefficient"] != 0.001
    values = parameters(live, "critics")
    other = alone(*options, "trainer.resume_mode=auto")
    other.wait(other.trainer.resume())
    assert torch.equal(ref_log_probs(other, rows), expected[0]) and torch.equal(log_probs(other, rows), expected[1])
    assert other.trainer.references.state_dict() == saved
    assert all(torch.equal(a, b) for a, b in zip(values, parameters(other, "critics"), strict=True))


@pytest.mark.slow
def test_a_renewed_reference_is_kept_where_no_more_are_renewed(alone, tmp_path):
    renewing, resumed = "trainer.ref_update_freq=1", "trainer.resume_mode=auto"
    live = alone(*KL_LOSS, renewing)
    live.wait(live.trainer.references.save(tmp_path / "first"))
    assert not (tmp_path / "first").exists(), "the first weights are on disk"
    live.step()
    live.wait(live.trainer.save())
    rows = rows_of(live)
    expected = ref_log_probs(live, rows)
    for step in (2, 3):
        live = alone(*KL_LOSS, resumed, "trainer.ref_update_freq=0")
        live.wait(live.trainer.resume())
        assert torch.equal(ref_log_probs(live, rows), expected)
        live.trainer.step_number = step
        live.wait(live.trainer.save())
        assert (tmp_path / f"global_step_{step}" / "alice" / "ref").is_dir()


@pytest.mark.slow
def test_a_policy_may_have_another_models_weights_for_its_reference(alone, tmp_path):
    first = alone(*KL_LOSS)
    first.step(), first.step()
    first.wait(first.trainer.save())
    folder = tmp_path / "global_step_2" / "carol" / "actor" / "huggingface"
    live = alone(*KL_LOSS, f"+policies.alice.ref.model.path={folder}")
    rows = rows_of(live)
    torch.testing.assert_close(ref_log_probs(live, rows), log_probs(first, rows, "carol"), atol=1e-6, rtol=0)
    assert torch.equal(ref_log_probs(live, rows, "carol"), log_probs(live, rows, "carol"))


@pytest.mark.slow
def test_only_the_policies_that_ask_for_it_have_a_reference(alone):
    live = alone("+policies.alice.actor.use_kl_loss=true", NO_WARM_UP)
    metrics = live.step()
    assert list(live.trainer.references.groups) == ["alice"]
    assert "agent/alice/kl_loss" in metrics and "agent/carol/kl_loss" not in metrics


@pytest.mark.slow
def test_kl_is_subtracted_from_the_reward_and_its_coefficient_adapts(alone):
    """k1 of sampled tokens by hand; the coefficient follows arXiv:1909.08593."""
    live = alone(*KL_LOSS, "algorithm.use_kl_in_reward=true")
    live.step(), live.step()
    rows = rows_of(live)
    rows["old_log_probs"] = live.wait(live.trainer.policies["alice"].compute_log_prob(rows))["log_probs"]
    rows["ref_log_prob"] = live.wait(live.trainer.policies["alice"].compute_ref_log_prob(rows))["log_probs"]
    algorithm = live.trainer.config.algorithm.copy()
    algorithm.kl_ctrl = {"type": "adaptive", "kl_coef": 0.5, "target_kl": 1e-6, "horizon": 100}
    kl = KLInReward(algorithm)
    metrics = kl.penalise(rows)
    by_hand = 0.5 * (rows["old_log_probs"].values() - rows["ref_log_prob"].values()) * rows["response_mask"].values()
    torch.testing.assert_close(rows["kl_penalty"].values(), by_hand)
    index = rows["turn_index"].values()
    means = [float(by_hand[index == cell].mean()) / 0.5 for cell in index[index >= 0].unique()]
    assert by_hand.abs().max() > 0 and metrics["reward_kl_penalty_coeff"] == 0.5
    assert metrics["reward_kl_penalty"] == pytest.approx(sum(means) / len(means), abs=1e-7)
    error = 0.2 if metrics["reward_kl_penalty"] > 1e-6 else -0.2
    assert kl.controller.value == pytest.approx(0.5 * (1 + error * len(means) / 100)) and len(means) == 32


@pytest.mark.parametrize("saved,kind,expected", [
    ("adaptive", "adaptive", 0.7), ("fixed", "fixed", 0.1), ("fixed", "adaptive", 0.1), ("adaptive", "fixed", 0.1),
])  # fmt: skip
def test_a_resumed_run_keeps_an_adapted_coefficient_and_takes_a_new_fixed_one(saved, kind, expected):
    def kl(kind, coefficient):
        control = {"type": kind, "kl_coef": coefficient, "target_kl": 0.1, "horizon": 100}
        return KLInReward(OmegaConf.create({"kl_ctrl": control, "kl_penalty": "kl"}))

    resumed = kl(kind, 0.1)
    resumed.load_state_dict(kl(saved, 0.7).state_dict())
    assert resumed.controller.value == expected


@pytest.mark.slow
def test_a_server_that_lags_is_corrected_for(alone):
    """Weights are the ratio of trainer to server, cut at the threshold; tokens whose inverse ratio is out of bounds leave the mask."""
    live = alone()
    rows = rows_of(live)
    own = rows["response_mask"].values().bool()
    ratio = torch.linspace(0.1, 3.0, len(rows["responses"].values()))
    rows["old_log_probs"] = torch.nested.nested_tensor_from_jagged(
        rows["rollout_log_probs"].values() + ratio.log(), offsets=rows["responses"].offsets()
    )
    settings = live.trainer.config.algorithm.rollout_correction.copy()
    settings.rollout_is, settings.rollout_is_threshold = "token", 2.0
    settings.rollout_rs, settings.rollout_rs_threshold = "token_k1", "0.5_2.5"
    metrics = correct(rows, settings)
    weights = rows["rollout_is_weights"].values()[own]
    torch.testing.assert_close(weights, ratio.clamp(max=2.0)[own], atol=1e-4, rtol=1e-4)
    kept = rows["response_mask"].values().bool()
    assert torch.equal(kept, own & (1 / ratio >= 0.5) & (1 / ratio <= 2.5)) and torch.equal(
        rows["loss_mask"].values().bool(), kept
    )
    assert metrics["rollout_corr/rollout_is_mean"] > 0


def test_the_correction_reaches_the_loss(alone):
    live = alone("algorithm.rollout_correction.rollout_is=token", "controller.pack_turns=true")
    metrics = live.step()
    assert metrics["agent/alice/rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-5)
    trainer, rows = live.trainer, rows_of(live)
    rows["old_log_probs"] = live.wait(trainer.policies["alice"].compute_log_prob(rows))["log_probs"]
    offsets = rows["responses"].offsets()
    rows["advantages"] = torch.nested.nested_tensor_from_jagged(torch.ones(int(offsets[-1])), offsets=offsets)
    losses = []
    for weight in (1.0, 0.5):
        rows["rollout_is_weights"] = torch.nested.nested_tensor_from_jagged(
            torch.full((int(offsets[-1]),), weight), offsets=offsets
        )
        losses.append(live.wait(trainer.policies["alice"].update_actor(rows))["actor/pg_loss"])
    assert losses[0] == pytest.approx(-1.0, abs=1e-3) and losses[1] == pytest.approx(-0.5, abs=0.1)


def test_bypass_takes_the_servers_log_probs_and_saves_a_pass(alone):
    live = alone("algorithm.rollout_correction.bypass_mode=true", NO_WARM_UP, *VARIED)
    group = live.trainer.policies["alice"]
    group.compute_log_prob = None  # would be called
    metrics = live.step()
    assert metrics["agent/alice/grad_norm"] > 0 and metrics["agent/alice/ppo_kl"] == pytest.approx(0, abs=1e-5)
