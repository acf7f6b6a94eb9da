"""Distillation is tested by learning: a team's episodes become one policy, its answer one agent, and one agent's turns a team."""

import json

import pytest

from marl.main import run
from marl.methods import sft
from marl.report import dump
from marl.types import Episode, Score, Task, Turn
from tests.stack.builders import short_run

pytestmark = pytest.mark.slow
STEPS = 40
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])


def note(n):
    return [{"role": "user", "content": f"you have {n}"}]


def debated(n):
    """Alice is wrong, carol is right, and the team answers as carol."""
    record = Episode(Task(str(n), note(n), str(n), "marl/smudged_note", str), 0, ["alice", "carol"])
    for agent, number in (("alice", n + 1), ("carol", n)):
        text, score = f"#### {number}", Score(float(number == n), str(number))
        seen = note(n)[0] | {"content": f"{agent} has {n}"}
        record.turns.append(Turn(agent, 1, [seen], text, policy=agent, stop_reason="completed", score=score))
    record.answer, record.score = str(n), Score(1.0, str(n))
    return record


@pytest.fixture
def learn(compose_config, cold_assets, tmp_path):
    """Train on the dumped debates in this process; gives the first validation, the last one, and the trainer."""
    path = dump.write([debated(n) for n in range(8)], 1, tmp_path / "dumps")
    tasks = tmp_path / "tasks.jsonl"
    rows = (
        {"data_source": "marl/smudged_note", "prompt": note(n), "reward_model": {"ground_truth": str(n)}}
        for n in range(8)
    )
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def learn(*words, plays=False, seed=0):
        files = tasks if plays else path
        data = (
            f"data.train_files={files}", f"data.val_files={files}", "data.train_batch_size=8",
            *((f"method.files=[{path}]", "method.imitates=episodes") if plays else ("method.source=episodes",)),
        )  # fmt: skip
        trainer = run(compose_config(*short_run(cold_assets, tmp_path, STEPS, seed), *data, *words))
        return trainer.history[min(trainer.history)], trainer.history[max(trainer.history)], trainer

    return learn


TEAM_INTO_ONE = ("method=sft", "sharing=shared")
ONE_INTO_A_TEAM = ("method=sft", "method.from_agent=carol")
ANSWER_INTO_ONE = (
    "method=hybrid", "method.target=team_answer", f"method.sft_steps={STEPS - 1}", "runner=single_turn", "credit=own",
    "~agents.alice", "~agents.carol", "+agents.solo={}", "actor_rollout_ref.rollout.n=4",
)  # fmt: skip


def losses(metrics):
    return [value for key, value in metrics.items() if key.endswith("/loss")]


@SEEDS
def test_a_team_becomes_one_policy(learn, seed):
    before, after, trainer = learn(*TEAM_INTO_ONE, seed=seed)
    assert list(trainer.policies) == ["team"] and len(losses(after)) >= 1
    assert min(losses(before)) > 1 and max(losses(after)) < 0.1, (before, after)


@SEEDS
def test_one_agents_turns_become_a_teams(learn, seed):
    """Alice learns to say what carol said to what carol was shown, and not what she said herself."""
    before, after, _ = learn(*ONE_INTO_A_TEAM, seed=seed)
    assert len(losses(after)) == 2 and min(losses(before)) > 1 and max(losses(after)) < 0.1, (before, after)


@SEEDS
def test_one_agent_answers_as_the_teams_vote(learn, seed):
    before, after, trainer = learn(*ANSWER_INTO_ONE, plays=True, seed=seed)
    assert list(trainer.policies) == list(trainer.config.agents) == ["solo"]
    assert before["vote"] <= 0.5 and after["vote"] >= 0.85, (before, after)


def test_turns_of_another_agent_teach_something_else(learn, monkeypatch):
    """With alice's own turns in place of the team's answer the one agent is wrong."""
    own = sft.team_answer

    def of_alice(episode, speakers):
        episode.answer = episode.turns[0].scored.answer
        return own(episode, speakers)

    monkeypatch.setattr(sft, "team_answer", of_alice)
    before, after, _ = learn(*ANSWER_INTO_ONE, plays=True)
    assert after["vote"] <= 0.5, (before, after)
