"""A step with an agent's turns in one row is the step with a row a turn: losses, gradients, parameters."""

import copy

import pytest
import torch

from marl.batch.build import joint_batch
from marl.learners import broadcast_to_tokens
from tests.stack.builders import gradient, num_turns, numbers, parameters

OFF = "controller.pack_turns=false"
PLAIN = ("actor_rollout_ref.rollout.n=4", "runner.num_rounds=3", "data.max_prompt_length=60")
SMOOTH = ("actor_rollout_ref.actor.optim.lr=1.0", "actor_rollout_ref.actor.optim.override_optimizer_config={eps: 1.0}",
          "actor_rollout_ref.actor.optim.lr_warmup_steps=0")  # fmt: skip
"""Adam's step follows the gradient's size: by default it is that of the sign, which rounding turns where it is nearly 0."""


def test_turns_are_packed_by_default(alone):
    live = alone(*PLAIN)
    episodes = live.episodes()
    rows = live.trainer.batch_of(episodes).rows
    assert {name: num_turns(own) for name, own in rows.items()} == {"alice": 48, "carol": 48}
    assert {name: len(own) for name, own in rows.items()} == {"alice": 16, "carol": 16}
    longest = {(id(e), t.agent): len(t.prompt_ids) + len(t.response_ids) for e in episodes for t in e.turns}
    assert sum(len(own["input_ids"].values()) for own in rows.values()) == sum(longest.values()), (
        "no more than the transcript"
    )


def started_anew(episodes):
    """The same episodes, in half of which the second round forgets the first one: its prompt extends nothing."""
    changed = copy.deepcopy(episodes)
    for number, episode in enumerate(changed):
        for turn in episode.turns if number % 2 else ():
            if turn.round == 2:
                turn.prompt_ids = turn.prompt_ids[1:]
    return changed


def as_trained(live, episodes, pack):
    """The rows of one policy, ready to train, with a different advantage for every turn."""
    trainer = live.trainer
    batch = joint_batch(episodes, ["alice", "carol"], trainer.temperatures, pack_turns=pack)
    rows, shape = batch.rows["alice"], batch.mask_ERA.shape
    rows["advantages"] = broadcast_to_tokens(torch.linspace(-1, 1, shape.numel()).view(shape), rows)
    rows["old_log_probs"] = live.wait(trainer.policies["alice"].compute_log_prob(rows))["log_probs"]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_rows_of_one_turn_and_of_several_train_side_by_side(alone, shared):
    """With contexts of which only some extend, and with agents that share the policy: the same loss, gradient and parameters."""
    words = [*PLAIN, *SMOOTH, *(["agents.carol.policy=alice"] if shared else [])]
    apart, packed = alone(*words), alone(*words)
    before = parameters(apart, "policies")
    episodes = started_anew(apart.episodes())
    single, several = as_trained(apart, episodes, False), as_trained(packed, episodes, True)
    turns = 48 * (1 + shared)
    assert len(single) == num_turns(single) == num_turns(several) == turns
    assert len(several) == turns // 2, (
        "one row for three turns, or two: the third extends the first where the second does not"
    )
    (first, numbers_of), (second, others) = gradient(apart, single), gradient(packed, several)
    assert float(first.norm()) > 0.01 and float((first - second).abs().max()) <= 1e-6
    assert others["actor/pg_loss"] == pytest.approx(numbers_of["actor/pg_loss"], abs=1e-6)
    for live, rows in ((apart, single), (packed, several)):
        live.wait(live.trainer.policies["alice"].update_actor(rows))
    moved = [parameters(live, "policies") for live in (apart, packed)]
    assert max(float((new - old).abs().max()) for new, old in zip(moved[0], before, strict=True)) > 1e-3
    assert max(float((one - other).abs().max()) for one, other in zip(*moved, strict=True)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("learner=ippo", "critic.level=token"),
        ("learner=happo",),
        ("learner=reinforce_plus_plus", "algorithm.kl_ctrl.type=adaptive"),
        ("learner=ippo", "actor_rollout_ref.actor.use_kl_loss=true"),
    ],
    ids=" ".join,
)
def test_a_step_has_the_same_metrics_packed_or_not(alone, words):
    """The first two steps, of every learner whose sums run over tokens or that asks for log-probs once more."""
    steps, played = [], []
    for pack in ([], [OFF]):
        live = alone(*words, *SMOOTH, *pack, "critic.optim.lr=1.0e-6", "controller.old_log_probs=trainer")
        live.trainer.batch_of = playing(played, live.trainer.batch_of, again=bool(pack))
        live.step()
        steps.append(numbers([live.step()])[0])
    assert not played and len(steps[0]) > 6 and steps[0] == pytest.approx(steps[1], rel=1e-3, abs=2e-5)
    assert any(value for key, value in steps[0].items() if key.endswith("grad_norm"))


def playing(played, batch_of, again):
    """``batch_of`` that keeps a step's episodes in ``played``, or puts those in place of the step's own: after an update,
    whose last bits differ, a run may sample another token."""

    def of_the_same(episodes):
        if again:
            own = answers_of(episodes)
            episodes[:] = played.pop(0)
            same = sum(one == other for one, other in zip(own, answers_of(episodes), strict=True))
            assert same >= 0.9 * len(own), "the server has other weights"
        else:
            played.append(copy.deepcopy(episodes))
        return batch_of(episodes)

    return of_the_same


def answers_of(episodes):
    return [turn.response_ids for episode in episodes for turn in episode.turns]
