"""HAPPO through the real parts: fresh weights correct the policies that come later, and nothing is computed for nobody."""

import math

import pytest
import torch

from tests.builders import slow_but
from tests.stack.builders import parameters

NO_WARM_UP = "actor_rollout_ref.actor.optim.lr_warmup_steps=0"
FAST = ("actor_rollout_ref.actor.optim.lr=0.003", NO_WARM_UP, "credit=team")


class Watch:
    """Rows that the policies were given to train on, in the order in which they were updated, and whose log-probs were asked for."""

    def __init__(self, live):
        self.live, self.trained, self.asked = live, {}, []
        for name, group in live.trainer.policies.items():
            self.watch(name, group)

    def watch(self, name, group):
        update_actor, compute_log_prob = group.update_actor, group.compute_log_prob

        async def updating(rows):
            self.trained[name] = rows
            return await update_actor(rows)

        async def asking(rows):
            self.asked.append(name)
            return await compute_log_prob(rows)

        group.update_actor, group.compute_log_prob = updating, asking

    def update(self, batch):
        """One update; the metrics."""
        self.trained, self.asked = {}, []
        return self.live.wait(self.live.trainer.learner.update(batch, self.live.trainer.policies))


def credited(live):
    """A batch whose advantages are there."""
    trainer, episodes = live.trainer, live.episodes()
    batch = trainer.batch_of(episodes)
    live.wait(trainer.log_probs(batch))
    live.wait(trainer.critics.value(episodes, batch))
    trainer.learner.assign_credit(batch)
    return batch


def by_turn(rows, column):
    """A row's tokens of each turn: lists by the turn's cell."""
    turns = {}
    for index, values in zip(rows["turn_index"].unbind(), column.unbind(), strict=True):
        for cell, value in zip(index.tolist(), values.tolist(), strict=True):
            if cell >= 0:
                turns.setdefault(cell, []).append(value)
    return turns


@pytest.mark.parametrize("pack", slow_but([False, True], True))
def test_later_policies_are_corrected_by_the_fresh_weights_of_earlier_ones(alone, pack):
    """Ratios anew, by hand, from the weights that the first policy has after its update."""
    live = alone("learner=happo", "learner.clip=null", f"controller.pack_turns={str(pack).lower()}", *FAST)
    watch, batch = Watch(live), credited(live)
    metrics = watch.update(batch)
    first, second = watch.trained
    assert watch.asked == [first], "the last one's new log-probs are nobody's business"
    assert torch.equal(watch.trained[first]["advantages"].values(), batch.rows[first]["advantages"].values())

    fresh = live.wait(live.trainer.policies[first].compute_log_prob(batch.rows[first]))["log_probs"]
    new, old = by_turn(batch.rows[first], fresh), by_turn(batch.rows[first], batch.rows[first]["old_log_probs"])
    agents = len(batch.agents)
    ratio = {
        cell // agents: math.exp(sum(a - b for a, b in zip(new[cell], old[cell], strict=True)) / len(old[cell]))
        for cell in old
    }
    assert max(abs(value - 1) for value in ratio.values()) > 0.01, "stale weights would give 1"
    estimated = by_turn(batch.rows[second], batch.rows[second]["advantages"])
    given = by_turn(batch.rows[second], watch.trained[second]["advantages"])
    assert len(given) == int(batch.mask_ERA[..., batch.agents.index(second)].sum())
    assert (len(batch.rows[second]) < len(given)) == pack
    for cell, advantages in given.items():
        assert advantages == pytest.approx([ratio[cell // agents] * value for value in estimated[cell]], rel=1e-4)
    assert metrics[second]["factor_max"] == pytest.approx(max(ratio.values()), rel=1e-4)
    assert metrics[first]["factor_max"] == 1.0 and metrics[first]["grad_norm"] > 0


@pytest.mark.slow
def test_with_a_learning_rate_of_0_it_is_mappo_to_the_last_bit(alone):
    still = ("actor_rollout_ref.actor.optim.lr=0", NO_WARM_UP, "credit=team")
    given = []
    for learner in ("mappo", "happo"):
        live = alone(f"learner={learner}", *still)
        watch = Watch(live)
        watch.update(credited(live))
        given.append(watch.trained)
    assert set(given[0]) == set(given[1]) == {"alice", "carol"}
    for name, mappo in given[0].items():
        assert mappo["advantages"].values().abs().sum() > 0
        assert all(
            torch.equal(mappo[key].values(), given[1][name][key].values())
            for key in mappo.keys() - {"temperature", "version"}
        )


def test_with_one_policy_it_is_mappo_to_the_last_bit(alone):
    """Three steps: the same weights; and it was not asked for log-probs but once a step, before its update."""
    runs = []
    for learner in ("mappo", "happo"):
        live = alone(f"learner={learner}", "agents.carol.trainable=false", *FAST)
        watch = Watch(live)
        runs.append([{key: value for key, value in live.step().items() if "grad_norm" in key} for _ in range(3)])
        runs[-1].append(parameters(live, "policies") + parameters_of_the_critic(live))
        assert watch.asked == ["alice"] * 3
    assert runs[0][:3] == runs[1][:3]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][3], runs[1][3], strict=True))


def parameters_of_the_critic(live):
    engine = live.trainer.critics.groups["central"].workers.worker.engine
    return [p.to_local().detach().clone() for p in engine.module.parameters()]


@pytest.mark.slow
def test_agents_that_share_a_policy_are_updated_once_and_not_corrected(alone):
    live = alone("learner=happo", "agents.alice.policy=shared", "agents.carol.policy=shared", *FAST)
    watch = Watch(live)
    metrics = live.step()
    assert list(watch.trained) == ["shared"] and watch.asked == ["shared"]
    assert metrics["agent/alice/factor_max"] == 1.0 and metrics["agent/alice/update_position"] == 1.0


@pytest.mark.slow
def test_orders_are_fresh_and_a_resumed_run_goes_on_with_them(alone):
    options = ("learner=happo", *FAST)
    positions = lambda live, steps: [live.step()["agent/alice/update_position"] for _ in range(steps)]  # noqa: E731
    whole = alone(*options)
    drawn = positions(whole, 5)
    assert set(drawn) == {1.0, 2.0}
    first = alone(*options)
    assert positions(first, 2) == drawn[:2]
    first.wait(first.trainer.save())
    second = alone(*options, "trainer.resume_mode=auto")
    second.wait(second.trainer.resume())
    assert positions(second, 3) == drawn[2:]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["turn", "token"])
def test_a_chain_through_the_real_critic(alone, level):
    live = alone("learner=happo", "learner.chain=true", f"critic.level={level}", *FAST)
    metrics = live.step()
    assert metrics["agent/alice/grad_norm"] > 0 and metrics["critic/central/grad_norm"] > 0
    batch = credited(live)
    returns = batch.returns_ERA if level == "turn" else batch.rows["alice"]["returns"].values()
    assert returns.isfinite().all() and returns.unique().numel() > 4
