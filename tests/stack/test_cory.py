"""Exchanges through the real parts: who acts with which weights, and what goes along."""

import pytest
import torch

from marl.report.step_metrics import policy_metrics

START = (
    "learner=cory",
    "runner=pioneer_observer",
    "credit=auto",
    "learner.exchange_every=2",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=50",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
)


def state(live, policy):
    """Weights, moments and the coefficient of the divergence of one policy."""
    engine = live.trainer.policies[policy].workers.worker.actor.engine
    weights = torch.cat([p.to_local().flatten() for p in engine.module.parameters()])
    moments = torch.cat([s["exp_avg"].to_local().flatten() for s in engine.optimizer.state.values()])
    return weights, moments, torch.tensor(float(live.trainer.references.penalties[policy].controller.value))


def acting(live):
    """The policies of the pioneer and the observer, in episodes that are played now."""
    (episode, *_) = live.episodes(samples=1)
    return [turn.policy for turn in sorted(episode.turns, key=lambda turn: turn.round)]


@pytest.mark.slow
def test_after_an_exchange_the_pioneer_is_the_former_observer(alone):
    live = alone(*START)
    seen = []
    for _ in range(5):
        before = {name: state(live, name) for name in ("alice", "carol")} if live.trainer.step_number else None
        live.trainer.step_number += 1
        seen.append(acting(live))
        live.trainer.step_number -= 1
        if before:
            for name in ("alice", "carol"):
                for kept, now in zip(before[name], state(live, name), strict=True):
                    assert torch.equal(kept, now), "an exchange changes no policy"
        metrics = live.step()
        assert {"agent/alice/grad_norm", "agent/carol/grad_norm"} <= set(metrics)
    assert seen == [["alice", "carol"]] * 2 + [["carol", "alice"]] * 2 + [["alice", "carol"]]


def test_metrics_and_rows_stand_under_the_agent_that_acted(alone):
    live = alone(*START, "agents.alice.temperature=0.5")
    live.trainer.step_number = 3
    batch = live.trainer.batch_of(live.episodes())
    alice = batch.agents.index("alice")
    assert set((batch.rows["carol"]["turn_index"].values() % 2).tolist()) == {alice}
    assert set(batch.rows["carol"]["temperature"].tolist()) == {0.5}
    metrics = policy_metrics(
        {"alice": {"x": 1.0}, "carol": {"x": 2.0}}, live.trainer.policy_map.labels(["alice", "carol"])
    )
    assert metrics == {"agent/carol/x": 1.0, "agent/alice/x": 2.0}


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_with_the_exchange(alone, tmp_path):
    first = alone(*START)
    for _ in range(3):
        first.step()
    first.wait(first.trainer.save())
    kept = {name: state(first, name) for name in ("alice", "carol")}
    again = alone(*START, f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=auto")
    again.wait(again.trainer.resume())
    again.wait(again.trainer.sync_weights())
    for name, wanted in kept.items():
        for a, b in zip(wanted, state(again, name), strict=True):
            assert torch.equal(a, b)
    assert acting(again) == ["carol", "alice"]
