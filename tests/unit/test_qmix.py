"""QMIX is VDN with another mixer: what that changes, and that nothing else does."""

import pytest
import torch

from marl.learners import LEARNERS
from marl.learners.mixing import Advantage, Mixing
from marl.learners.qmix import QMIX
from marl.modules.mixers import VDNMixer
from tests.builders import batch_of, build_learner as build, episode, fit, read, two_rounds


class Summing(QMIX):
    def make_mixing(self, num_agents):
        return Mixing(VDNMixer())


@pytest.mark.parametrize("advantage", list(Advantage))
def test_with_a_summing_mixer_it_is_vdn_bit_for_bit(advantage):
    results = []
    for cls in (LEARNERS.get("vdn"), Summing):
        batch, records = two_rounds()
        batch, critics = read(batch, records)
        like = build("qmix", "team")
        config = cls.Config(name="x", gamma=0.9, seed=0, advantage=advantage)
        learner = cls(config, like.credit)
        fit(learner, batch, critics)
        learner.assign_credit(batch)
        results.append((batch, critics))
    for name in results[0][1]:
        first, second = ((critics[name].numbers, batch.rows[name]["advantages"].values()) for batch, critics in results)
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_advantages_are_the_mixers_slope_times_q_minus_v():
    batch, records = two_rounds()
    batch, _ = read(batch, records)
    learner = build("qmix", "team", whiten=False)
    learner.assign_credit(batch)
    mixing, joint, step = learner.fit(2).mixing, learner.joint(batch), 1e-3
    with torch.no_grad():
        state_BS, q_BA = mixing.states(joint), joint.from_grid(batch.critic_data.utilities_ERA)
        for a, name in enumerate("ab"):
            moved = q_BA.clone()
            moved[:, a] += step
            back = q_BA.clone()
            back[:, a] -= step
            slope_B = (mixing(moved, state_BS) - mixing(back, state_BS)) / (2 * step)
            expected = slope_B * (q_BA - joint.from_grid(batch.critic_data.values_ERA))[:, a]
            got = torch.stack([row[0] for row in batch.rows[name]["advantages"].unbind()])
            # rows of a policy are in the order of episodes and rounds, as joint actions are
            torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
            assert (slope_B - 1).abs().max() > 0.05, "the factor would not be missed"


def test_another_answer_is_mixed_in_the_state_of_the_answer_that_it_replaces():
    records = [episode("t", i, [[0], [0]]) for i in range(2)]
    batch, _ = read(batch_of(*records), records)
    learner = build("qmix", "team", whiten=False, advantage=Advantage.group)
    learner.assign_credit(batch)
    mixing, joint = learner.fit(2).mixing, learner.joint(batch)
    with torch.no_grad():
        states, q_BA = mixing.states(joint), joint.from_grid(batch.critic_data.utilities_ERA)
        for own, other in ((0, 1), (1, 0)):
            changed = q_BA[own].clone()
            changed[0] = q_BA[other, 0]
            expected = mixing(q_BA[own][None], states[own][None]) - mixing(changed[None], states[own][None])
            got = batch.rows["a"]["advantages"].unbind()[own][0]
            assert float(got) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.slow
def test_the_mixer_the_encoder_and_the_utilities_are_fitted_together():
    records = [episode(f"t{i}", 0, [[i % 2], [i % 2]]) for i in range(4)]
    batch, critics = read(batch_of(*records), records)
    learner = build("qmix", "team", mixer_epochs=200, mixer_lr=0.01)
    before = {name: value.clone() for name, value in learner.fit(2).mixing.state_dict().items()}
    metrics = fit(learner, batch, critics)
    assert metrics["a"]["q_tot_loss"] < 1e-4 and metrics["a"]["q_tot_explained_variance"] > 0.99
    after = learner.fit(2).mixing.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"mixer.weights_in.weight", "mixer.value.0.weight", "encoder.embed.weight"} <= changed


def test_targets_are_the_targets_mixers_until_they_are_renewed():
    batch, records = two_rounds()
    batch, critics = read(batch, records)
    learner = build("qmix", "team", target_update_every=2, mixer_lr=0.1)
    fit(learner, batch, critics)
    kept = {name: value.clone() for name, value in learner.fit(2).target.state_dict().items()}
    moved = learner.fit(2).mixing.state_dict()
    assert not torch.equal(kept["mixer.weights_in.weight"], moved["mixer.weights_in.weight"])
    fit(learner, batch, critics)
    assert all(torch.equal(kept[name], value) for name, value in learner.fit(2).target.state_dict().items())
    present = {name: value.clone() for name, value in learner.fit(2).mixing.state_dict().items()}
    fit(learner, batch, critics)
    assert all(torch.equal(present[name], value) for name, value in learner.fit(2).target.state_dict().items())


def test_the_bootstrap_is_the_target_mixers_of_the_target_utilities():
    import asyncio

    records = [episode("t", 0, [[0, 1], [0, 1]])]
    batch, critics = read(batch_of(*records), records)
    learner = build("qmix", "team", gamma=0.5)
    fits, joint = learner.fit(2), learner.joint(batch)
    for critic in critics.values():
        critic.target = critic.numbers + 1.0
    with torch.no_grad():
        for parameter in fits.target.parameters():
            parameter.mul_(1.5)
    fits.steps = 1
    targets = asyncio.run(fits.begin(batch, critics, joint, 0.5, target_update_every=2))
    with torch.no_grad():
        q_tot_B = fits.target(joint.from_grid(batch.critic_data.utilities_ERA) + 1.0, fits.target.states(joint))
    assert float(targets[0]) == pytest.approx(0.5 * float(q_tot_B[1])) and float(targets[1]) == 1.0


def test_its_state_goes_on_where_it_stopped(tmp_path):
    runs = []
    for interrupted in (False, True):
        batch, records = two_rounds()
        batch, critics = read(batch, records)
        learner = build("qmix", "team", target_update_every=2)
        fit(learner, batch, critics)
        if interrupted:
            torch.save(learner.state_dict(), tmp_path / "learner.pt")
            learner = build("qmix", "team", target_update_every=2, seed=5)
            learner.load_state_dict(torch.load(tmp_path / "learner.pt", weights_only=True))
        for _ in range(2):
            fit(learner, batch, critics)
        runs.append((learner.state_dict(), critics["a"].numbers))
    for part in ("mixing", "target"):
        assert all(torch.equal(value, runs[1][0][part][name]) for name, value in runs[0][0][part].items())
    assert torch.equal(runs[0][1], runs[1][1]) and runs[0][0]["steps"] == runs[1][0]["steps"] == 3
    fresh = build("qmix", "team")
    assert fresh.state_dict() == {}
    fresh.load_state_dict({})


def test_a_resumed_mixer_learns_at_the_rate_that_the_configuration_has_now():
    batch, records = two_rounds()
    batch, critics = read(batch, records)
    learner, resumed = build("qmix", "team", mixer_lr=0.1), build("qmix", "team", mixer_lr=0.01)
    fit(learner, batch, critics)
    resumed.load_state_dict(learner.state_dict())
    optimizer = resumed.fit(2).optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [0.01] and optimizer.state, (
        "its moments are the saved ones"
    )


def test_first_weights_are_drawn_from_the_seed_alone():
    def weights(seed):
        return build("qmix", "team", seed=seed).fit(2).mixing.state_dict()["mixer.weights_in.weight"]

    torch.manual_seed(1)
    first, drawn = weights(0), torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn), "what others draw is untouched"
    assert torch.equal(first, weights(0)) and not torch.equal(first, weights(1))


def test_it_needs_the_joint_observation():
    batch, records = two_rounds()
    batch, _ = read(batch, records)
    batch.critic_data.joint_ids = None
    with pytest.raises(ValueError, match="joint observation"):
        build("qmix", "team").assign_credit(batch)
    assert LEARNERS.get("qmix").reads_joint
