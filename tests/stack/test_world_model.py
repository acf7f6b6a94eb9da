"""Prediction of peers is tested by learning: what a peer says is learned from dumps, and planning with it makes a team agree.

Alice says the number after the one that both see. Carol was never shown that: she learns from episodes in which she said what she
expected of alice, whatever that was, and predicts alice from episodes that are not imitated.
"""

import json

import pytest

from marl.main import run
from marl.methods import sft
from marl.report import dump
from marl.types import Episode, Score, Task, Turn
from tests.stack.builders import short_run

STEPS = 60
EXPECTED = "{agent} said {text}"


def note(n, expected=None):
    content = f"you have {n}"
    return [{"role": "user", "content": content if expected is None else f"{content}\n\n{expected}"}]


def episode(n, sample, score, *turns):
    record = Episode(Task(str(n), note(n), str(n + 1), "marl/smudged_note", str), sample, ["alice", "carol"])
    for agent, seen, number in turns:
        own = Score(score, str(number))
        record.turns.append(Turn(agent, 1, seen, f"#### {number}", policy=agent, stop_reason="completed", score=own))
    record.answer, record.score = str(n + 1), Score(score, str(n + 1))
    return record


def lessons():
    """Carol says what she expects, alice the next number, whatever she expects: both imitated; and what alice says beside carol's
    plain note, which is predicted."""
    for n in range(8):
        for k in range(1, 10):
            shown = [EXPECTED.format(agent=agent, text=f"#### {k}") for agent in ("alice", "carol")]
            yield episode(n, k, 1.0, ("carol", note(n, shown[0]), k))
            yield episode(n, 20 + k, 1.0, ("alice", note(n, shown[1]), n + 1))
            yield episode(n, 40 + k, 0.0, ("alice", note(n), n + 1), ("carol", note(n), 0))
        yield episode(n, 60, 1.0, ("alice", note(n), n + 1))


@pytest.fixture
def learn(compose_config, cold_assets, tmp_path):
    """Imitate the lessons in this process, and play; gives the first validation and the last one."""
    path, tasks = dump.write(list(lessons()), 1, tmp_path / "dumps"), tmp_path / "tasks.jsonl"
    rows = [
        {"data_source": "marl/smudged_note", "prompt": note(n), "reward_model": {"ground_truth": str(n + 1)}}
        for n in range(8)
    ]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in 4 * rows))

    def learn(*words, seed=0):
        data = (
            f"data.train_files={tasks}", f"data.val_files={tasks}", "data.train_batch_size=32",
            f"method.files=[{path}]", "method.imitates=episodes", "method.peers_request='{agent} ?'", f"method.sft_steps={STEPS - 1}",
        )  # fmt: skip
        plan = ("runner.num_rounds=1", "runner.foresee_request='{agent} ?'", f"runner.foreseen_template='{EXPECTED}'")
        short = (*short_run(cold_assets, tmp_path, STEPS, seed), "actor_rollout_ref.rollout.n=2")
        trainer = run(compose_config("method=hybrid", *short, *data, *plan, "credit=own", *words))
        return trainer.history[min(trainer.history)], trainer.history[max(trainer.history)]

    return learn


PLANNED = ("method.peers_weight=1.0", "runner.foresee=true", "data.max_prompt_length=60")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_planning_with_predictions_makes_a_team_agree(learn, seed):
    before, after = learn(*PLANNED, seed=seed)
    assert after["foresight/carol/alice"] >= 0.85 > 0.5 >= before.get("foresight/carol/alice", 0), (before, after)
    assert after["disagreement/round_1"] <= 0.15, (before, after)


UNPLANNED = {
    "not_read": ("method.peers_weight=1.0", "runner.foresee=false"),
    "not_learned": ("method.peers_weight=0.0", *PLANNED[1:]),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", UNPLANNED)
def test_predictions_that_are_not_read_or_not_learned_do_not(learn, name, seed):
    before, after = learn(*UNPLANNED[name], seed=seed)
    assert after["disagreement/round_1"] >= 0.25, (before, after)


def own_turns(monkeypatch):
    """An agent learns its own turns in the peers' places."""
    own = sft.predictions

    def predictions(episode, speakers, template):
        found = own(episode, speakers, template)
        for (agent, _), side in found.items():
            for turn in side:
                turn.text = next((t.text for t in episode.trajectory(agent) if t.round == turn.round), turn.text)
        return found

    monkeypatch.setattr(sft, "predictions", predictions)


def flipped(monkeypatch):
    """The predicted turns become less likely."""
    own = sft.weighted_gradients
    monkeypatch.setattr(sft, "weighted_gradients", lambda rows, weight: own(rows, -weight))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [own_turns, flipped], ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(learn, monkeypatch, fault):
    fault(monkeypatch)
    before, after = learn(*PLANNED)
    assert after.get("foresight/carol/alice", 0) < 0.5, (before, after)
