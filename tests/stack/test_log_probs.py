"""The servers' log-probs as old ones: the same learning step as with the trainer's forward pass, and alarms that still ring."""

import logging

import pytest
import torch

from tests.builders import slow_but
from tests.stack.builders import ADAPTERS, VARIED, numbers, parameters

NO_WARM_UP = "actor_rollout_ref.actor.optim.lr_warmup_steps=0"
FEW = "controller.log_prob_check_rows=2"


def passes(live, policy="alice"):
    """The number of rows of every forward pass for log-probs from now on."""
    group, seen = live.trainer.policies[policy], []
    compute = group.compute_log_prob

    async def counted(rows):
        seen.append(len(rows))
        return await compute(rows)

    group.compute_log_prob = counted
    return seen


def trained(live, steps=2):
    """Metrics of each step, the weights after the last one, and the rows of each pass."""
    seen = passes(live)
    metrics = [live.step() for _ in range(steps)]
    return metrics, torch.cat([p.flatten() for p in parameters(live, "policies")]), seen


SETTINGS = {
    "plain": (),
    "mini-batches and epochs": (
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
    ),
    "packed": ("controller.pack_turns=true",),
    "one policy": ("agents.alice.policy=alice", "agents.carol.policy=alice"),
    "KL in the reward": ("algorithm.use_kl_in_reward=true",),
    "temperature": ("agents.alice.temperature=0.7",),
    "adapters": ADAPTERS,
}


@pytest.mark.parametrize("case", slow_but(SETTINGS, "packed"))
def test_a_learning_step_is_that_of_the_trainers_own_pass(alone, case):
    words = (NO_WARM_UP, *VARIED, *SETTINGS[case]) if case != "adapters" else SETTINGS[case]
    runs = []
    for source in ("controller.old_log_probs=trainer", FEW):
        torch.manual_seed(0)  # adapters begin at random
        runs.append(trained(alone(*words, source)))
    (own, weights, whole), (metrics, served, seen) = runs
    assert all(step["policy/alice/log_probs_from_server"] == 1.0 for step in metrics)
    assert all(step["policy/alice/log_probs_from_server"] == 0.0 for step in own)
    assert seen == [2, 2] and min(whole) >= 8
    assert float((served - weights).abs().max()) <= 1e-5
    learned = [key for key in numbers(own)[0] if not key.endswith("/entropy")]
    assert len(learned) > 5
    for before, after in zip(own, metrics, strict=True):
        assert [after[key] for key in learned] == pytest.approx([before[key] for key in learned], abs=1e-5)
        assert before["agent/alice/grad_norm"] > 1e-3


def corrupted(live, by, rows_of_batch):
    """Shift the log-prob of the first token of some rows of alice, as a server in error would."""
    batch_of = live.trainer.batch_of

    def shifted(episodes):
        batch = batch_of(episodes)
        rows = batch.rows["alice"]["rollout_log_probs"]
        for i in rows_of_batch(len(rows)):
            rows.values()[rows.offsets()[i]] += by
        return batch

    live.trainer.batch_of = shifted


def test_a_server_that_reports_a_log_prob_wrongly_is_not_trusted(alone, caplog):
    live = alone("controller.log_prob_gap_alarm=0.001", "controller.pack_turns=false")
    corrupted(live, 0.01, range)
    seen = passes(live)
    with caplog.at_level(logging.WARNING):
        metrics = live.step()
    assert metrics["policy/alice/log_probs_from_server"] == 0.0 and metrics["policy/carol/log_probs_from_server"] == 1.0
    assert metrics["agent/alice/log_prob_gap_max"] == pytest.approx(0.01, abs=1e-4)
    assert metrics["agent/carol/log_prob_gap_max"] <= 1e-5 and seen == [2, 32]
    said = [record.getMessage() for record in caplog.records]
    assert sum("controller.log_prob_gap_bound" in text and "'alice'" in text for text in said) == 1
    assert sum("alarm at 0.001" in text and "'alice'" in text for text in said) == 1


def test_weights_that_were_not_synced_are_noticed(alone):
    """The servers answer with the weights of an earlier step, and say so or not; ``resources.weight_check`` would end the run."""
    live = alone(NO_WARM_UP, *VARIED, "resources.weight_check=none")
    group = live.trainer.policies["alice"]
    synced = group.sync_weights

    async def skipped(step):
        group.version = step

    group.sync_weights = skipped
    live.step()
    group.sync_weights = synced
    group.version = 0  # as their turns have it
    metrics = live.step()
    assert metrics["agent/alice/log_prob_gap_max"] > 1e-4 and metrics["policy/alice/log_probs_from_server"] == 0.0
    assert metrics["policy/carol/log_probs_from_server"] == 1.0
    assert live.step()["agent/alice/log_prob_gap_max"] <= 1e-5, "the next sync mends it"
    assert live.step()["policy/alice/log_probs_from_server"] == 1.0, "a whole pass has found all gaps within the bound"


@pytest.mark.slow
def test_happo_compares_log_probs_of_one_forward_pass(alone):
    live = alone("learner=happo", "controller.pack_turns=false")
    seen = passes(live)
    assert live.step()["policy/alice/log_probs_from_server"] == 0.0 and seen[0] == 32


@pytest.mark.slow
def test_a_resumed_run_distrusts_the_same_servers(alone):
    live = alone("trainer.resume_mode=auto")
    corrupted(live, 0.01, range)
    live.step()
    live.wait(live.trainer.save())
    assert live.trainer.old_log_probs.beyond == {"alice"}
    again = alone("trainer.resume_mode=auto")
    again.wait(again.trainer.resume())
    assert again.trainer.old_log_probs.beyond == {"alice"}
    other = alone("trainer.resume_mode=auto", "precision=bf16", "trainer.resume_changes=[precision]")
    other.wait(other.trainer.resume())
    assert other.trainer.old_log_probs.beyond == {"alice", "carol"}, "in another precision, a whole pass comes first"
