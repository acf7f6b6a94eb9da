"""A step with an agent's turns in one row is the step with a row a turn: losses, gradients, parameters."""

import pytest

from tests.stack.builders import num_turns, numbers

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


@pytest.mark.parametrize(
    "words",
    [
        ("learner=ippo", "critic.level=token"),
        ("learner=happo",),
        ("learner=reinforce_plus_plus", "algorithm.kl_ctrl.type=adaptive"),
    ],
    ids=" ".join,
)
def test_a_step_has_the_same_metrics_packed_or_not(alone, words):
    """The first two steps, of every learner whose sums run over tokens or that asks for log-probs once more."""
    steps = []
    for pack in ([], [OFF]):
        live = alone(*words, *SMOOTH, *pack, "critic.optim.lr=1.0e-6")
        live.step()
        steps.append(numbers([live.step()])[0])
    assert len(steps[0]) > 6 and steps[0] == pytest.approx(steps[1], rel=1e-3, abs=2e-5)
    assert any(value for key, value in steps[0].items() if key.endswith("grad_norm"))
