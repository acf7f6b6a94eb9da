"""A team whose second agent is a server elsewhere: it is played with, scored and recorded, and never trained."""

import pytest

from marl.build import build
from marl.cluster.failures import GroupFailed
from marl.controller.collection import EpisodesFailed
from marl.evaluation.baselines import untrained
from tests.judge import Judge, completion, serving
from tests.stack.builders import plays_again

TEAM = ("agents.carol.trainable=false", "credit=own")


def asks(address, **settings):
    fields = {"base_url": address, "model": "m-1", "backoff_s": 0.01} | settings
    return (*TEAM, f"+policies.carol.endpoint={{{','.join(f'{key}: {value!r}' for key, value in fields.items())}}}")


def test_a_step_with_an_endpoint_trains_the_others_alone(alone, tmp_path):
    reward = tmp_path / "odd.py"  # an untrained team is never right, and has nothing to learn from
    reward.write_text("def compute_score(solution_str, **_):\n    return float(sum(map(ord, solution_str)) % 2)\n")
    judge = Judge(lambda number, body: completion("#### 7" if number % 2 else "so#### 3", "stop"))
    with serving(judge) as address:
        live = alone(*asks(address), f"reward.custom_reward_function.path={reward}")
        trainer = live.trainer
        assert list(trainer.policies) == ["alice"] and trainer.trained_agents == ["alice"]
        episodes = live.episodes()
        turns = [turn for episode in episodes for turn in episode.turns if turn.agent == "carol"]
        assert turns and all(turn.text in ("#### 7", "so#### 3") for turn in turns)
        assert all(turn.score is not None for turn in turns), "they are scored as anybody's"
        heard = [
            str(turn.observation) for e in episodes for turn in e.turns if turn.agent == "alice" and turn.round > 1
        ]
        assert heard and all("#### 7" in text or "#### 3" in text for text in heard)
        batch = trainer.batch_of(episodes)
        assert list(batch.rows) == ["alice"] and not batch.trained_ERA[..., 1].any() and batch.spoken_ERA[..., 1].any()
        plays_again(trainer, episodes, tmp_path / "dump")
        metrics = live.step()
        norms = {key: value for key, value in metrics.items() if key.endswith("grad_norm")}
        assert len(norms) == 1 and all("alice" in key and value > 0 for key, value in norms.items())
        assert "agent/carol/response_length" not in metrics
        assert 0 < metrics["endpoint/carol/requests"] == len(judge.bodies) and metrics["endpoint/carol/retries"] == 0
        assert metrics["endpoint/carol/tokens"] == 7 * len(judge.bodies) and 0 < metrics["endpoint/carol/seconds"] < 5
        live.wait(trainer.save())
        assert not list(tmp_path.glob("global_step_*/carol"))


def test_a_server_that_fails_for_good_ends_the_step_with_its_name(alone):
    with serving(Judge(lambda *_: (500, "broken"))) as address:
        live = alone(*asks(address, max_attempts=2))
        with pytest.raises(EpisodesFailed, match=r"the endpoint of policy 'carol' .*2 attempts.*HTTP 500: broken"):
            live.step()


@pytest.mark.slow
def test_a_budget_lasts_over_a_resume(alone):
    """Tokens that the run had used when it was saved are not given twice, and a larger budget lets it go on."""
    with serving(Judge()) as address:
        live = alone(*asks(address))
        live.step()
        live.wait(live.trainer.save())
        used = live.trainer.controller.spent()["carol"]
        again = alone(*asks(address, token_budget=used + 7, max_concurrent=1), "trainer.resume_mode=auto")
        again.wait(again.trainer.resume())
        assert again.trainer.controller.spent() == {"carol": used}
        with pytest.raises(GroupFailed, match=rf"has spent {used + 7} tokens of .*token_budget={used + 7}; raise it"):
            again.step()
        larger = alone(*asks(address, token_budget=10 * used), "trainer.resume_mode=auto")
        larger.wait(larger.trainer.resume())
        larger.step()


@pytest.mark.slow
def test_a_baseline_does_not_get_the_budget_again(alone):
    """The team before training is played again after the run where the run did not measure it."""
    with serving(Judge()) as address:
        live = alone(*asks(address, token_budget=10**9), "trainer.val_before_train=false")
        live.step()
        used = live.trainer.controller.spent()["carol"]
        live.trainer.config.policies.carol.endpoint.token_budget = used
        with pytest.raises(GroupFailed, match=rf"has spent {used} tokens of .*token_budget={used}; raise it"):
            live.wait(untrained(live.trainer.config, live.trainer, build))
