"""Learners that are verl's functions under a name: what each shipped configuration sets, and the number that defines it."""

from pathlib import Path

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

from marl.config.errors import ConfigError
from marl.controller.scores import overlong
from marl.preflight.prepare import prepare
from tests.builders import batch_of, build_learner as build, episode

SHIPPED = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "learner").glob("*.yaml"))
SETS = {
    "rloo": {"learner.estimator": "rloo"},
    "dr_grpo": {"learner.std": False, "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm"},
    "reinforce_plus_plus": {"learner.estimator": "reinforce_plus_plus", "algorithm.use_kl_in_reward": True},
    "gspo": {
        "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
        "actor_rollout_ref.actor.clip_ratio_low": 3e-4,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    },
    "dapo": {
        "learner.drop_equal": True,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    },
    "dr_mas": {},
}


@pytest.mark.parametrize("name", SHIPPED)
def test_what_a_named_learner_sets_reaches_the_run(compose_config, cold_assets, name):
    from omegaconf import OmegaConf

    config = prepare(compose_config(f"assets={cold_assets}", f"learner={name}", "credit=own")).config
    assert config.learner.name == "grpo"
    for key, value in SETS[name].items():
        assert OmegaConf.select(config, key) == value
    omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def of_one_group(name, compose_config, cold_assets):
    """The advantages of R = [1, 0, 0, 0] under a shipped configuration."""
    from omegaconf import OmegaConf

    options = OmegaConf.to_object(prepare(compose_config(f"assets={cold_assets}", f"learner={name}")).config.learner)
    settings = {key: getattr(options, key) for key in ("std", "estimator", "drop_equal", "group_by", "gamma")}
    batch = batch_of(*(episode("t", i, [[float(i == 0)], [None]]) for i in range(4)))
    build("grpo", **settings).assign_credit(batch)
    return batch.rows["a"]["advantages"].values().tolist()


@pytest.mark.parametrize(
    "name,expected",
    [
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("dapo", [1.5, -0.5, -0.5, -0.5]),
        ("gspo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_mas", [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_its_advantages(compose_config, cold_assets, name, expected):
    assert of_one_group(name, compose_config, cold_assets) == pytest.approx(expected, abs=1e-5)


def test_rloo_is_dr_grpo_times_g_over_g_minus_1(compose_config, cold_assets):
    rloo, dr_grpo = (of_one_group(name, compose_config, cold_assets) for name in ("rloo", "dr_grpo"))
    assert rloo == pytest.approx([4 / 3 * x for x in dr_grpo], abs=1e-6)


def policy_loss(name, compose_config, cold_assets, deltas, advantages, mask):
    """verl's loss of the shipped configuration, and its gradient, at log-probs that moved by ``deltas``."""
    actor = prepare(compose_config(f"assets={cold_assets}", f"learner={name}")).config.actor_rollout_ref.actor
    settings = omega_conf_to_dataclass(actor)
    old = torch.full(deltas.shape, -1.0)
    new = (old + deltas).requires_grad_()
    numbers = {"dp_size": 1, "batch_num_tokens": float(mask.sum()), "global_batch_size": len(mask)}
    settings.global_batch_info.update(numbers | {"loss_scale_factor": settings.loss_scale_factor})
    function = get_policy_loss_fn(settings.policy_loss.loss_mode)
    loss, _ = function(old, new, advantages, mask, settings.loss_agg_mode, settings)
    loss.backward()
    return loss.item(), new.grad


def test_gspo_has_one_ratio_a_response_and_clips_it(compose_config, cold_assets):
    """Changes of .3, -.1, .2, 0: s = exp(.1) = 1.10517; with a positive advantage it is clipped to 1.0004."""
    deltas, mask = torch.tensor([[0.3, -0.1, 0.2, 0.0]]), torch.ones(1, 4)
    worse, gradient = policy_loss("gspo", compose_config, cold_assets, deltas, -torch.ones(1, 4), mask)
    assert worse == pytest.approx(1.10517, abs=1e-5) and gradient.abs().sum() > 0
    clipped, gradient = policy_loss("gspo", compose_config, cold_assets, deltas, torch.ones(1, 4), mask)
    assert clipped == pytest.approx(-1.0004, abs=1e-6) and gradient.abs().sum() == 0


def test_dapo_weighs_sequences_by_their_tokens_and_clips_higher(compose_config, cold_assets):
    """Sequences of 1 and 3 tokens weigh 1 : 3; ratios are let up to 1.28 and down to .8."""
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    _, gradient = policy_loss("dapo", compose_config, cold_assets, torch.zeros(2, 3), torch.ones(2, 3), mask)
    assert (gradient * mask).sum(1).tolist() == pytest.approx([-0.25, -0.75])
    for delta, advantage, moved in ((0.24, 1.0, True), (0.26, 1.0, False), (-0.21, -1.0, True), (-0.24, -1.0, False)):
        given = torch.full((1, 1), delta), torch.full((1, 1), advantage), torch.ones(1, 1)
        _, gradient = policy_loss("dapo", compose_config, cold_assets, *given)
        assert bool(gradient.abs().sum() > 0) is moved, (delta, advantage)


def test_dr_grpo_divides_by_a_constant_and_not_by_the_length(compose_config, cold_assets):
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    _, gradient = policy_loss("dr_grpo", compose_config, cold_assets, torch.zeros(2, 3), torch.ones(2, 3), mask)
    constant = 2 * 3  # sequences, and data.max_response_length
    assert gradient[mask.bool()].tolist() == pytest.approx([-1 / constant] * 4), "whatever the widest answer's length"
    _, narrow = policy_loss("dr_grpo", compose_config, cold_assets, torch.zeros(2, 1), torch.ones(2, 1), mask[:, :1])
    assert narrow[0].item() == gradient[0, 0].item()


def test_one_sample_a_task_is_enough_where_the_batch_is_the_baseline(compose_config, cold_assets):
    """As docs/algorithms.md recommends of it; whatever compares a task's samples refuses the same configuration."""
    alone = f"assets={cold_assets}", "credit=own", "actor_rollout_ref.rollout.n=1"
    assert not prepare(compose_config(*alone, "learner=reinforce_plus_plus")).learner.compares_samples
    with pytest.raises(ConfigError, match="rollout.n=1: learner=grpo compares a task's samples"):
        prepare(compose_config(*alone, "learner=rloo"))


def test_its_advantages_of_one_sample_a_task():
    """Returns 1, 0, 0, 0 of four tasks, whitened over the batch: deviation 1/2."""
    batch = batch_of(*(episode(f"t{i}", 0, [[float(i == 0)], [0.25]]) for i in range(4)))
    learner = build("grpo", estimator="reinforce_plus_plus")
    metrics = learner.assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert batch.rows["b"]["advantages"].values().tolist() == [0.0] * 4, "all alike"
    assert metrics["agent/a/degenerate_groups"] == 0.0 and metrics["agent/b/degenerate_groups"] == 1.0
    assert metrics["team/degenerate_groups"] == 0.5, "a policy's turns are one group"


@pytest.mark.parametrize("length,share", [(1, 0.0), (96, 0.0), (98, 0.5), (100, 1.0), (120, 1.0)])
def test_the_penalty_of_an_overlong_answer(length, share):
    assert overlong(length, limit=100, buffer=4) == share


def test_every_shipped_one_is_tested():
    assert set(SHIPPED) == set(SETS)
