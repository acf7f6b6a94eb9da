"""A game that a central critic sees through and a local one cannot."""

import pyarrow
import pyarrow.parquet
import pytest

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    '''Both are paid what the dealer holds, and a little for naming the same focal number.'''
    return float(ground_truth) / 10 + 0.02 * ("1" in solution_str)
"""


def user(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def game(tmp_path):
    """The dealer's number is worth a tenth of itself to everybody; only the dealer is shown it."""
    rows = [
        {
            "data_source": "game",
            "prompt": user("how many ?"),
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {
                "agent_prompts": {
                    "alice": user(f"you have {own}"),
                    "carol": user(f"you have {(own * 7 + number) % 10}"),
                    "dealer": user(f"you have {number}"),
                }
            },
        }
        for number in range(10)
        for own in range(10)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "game.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    return (
        f"data.train_files={tmp_path}/game.parquet",
        f"data.val_files={tmp_path}/game.parquet",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        "+agents.dealer.trainable=false",
        "runner=single_turn",
        "credit=team",
        "data.train_batch_size=50",
        "actor_rollout_ref.rollout.n=1",
        "critic.optim.lr=0.004",
        "critic.ppo_mini_batch_size=10",
        "critic.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.lr=0",
        "learner.whiten=false",
    )


@pytest.mark.parametrize("learner,low,high", [("mappo", 0.9, 1.0), ("ippo", -1.0, 0.1)])
@pytest.mark.slow
def test_only_the_central_critic_foretells_what_the_dealer_holds(alone, game, learner, low, high):
    live = alone(*game, f"learner={learner}")
    steps = [live.step() for _ in range(12)]
    last = [step[f"value/{agent}/explained_variance"] for step in steps[-4:] for agent in ("alice", "carol")]
    assert low <= sum(last) / len(last) <= high, [round(step["value/alice/explained_variance"], 2) for step in steps]
