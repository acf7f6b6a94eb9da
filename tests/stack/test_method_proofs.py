"""Methods are tested by learning: two agents that each see one number learn to say it, or the next one. A method that is wrong in one
place does not pass."""

import json

import pytest
import torch

from marl.main import run
from marl.methods import dpo, madpo, sft, spin
from marl.methods.base import Method
from tests.builders import slow_but
from tests.stack.builders import short_run

STEPS = 40
AGENTS = ("alice", "carol")


def tasks(truth):
    """``you have 7``: alice is taught to say 7, and carol 8; both are right where they say the truth."""
    for n in range(8):
        yield {
            "data_source": "marl/smudged_note",
            "prompt": [{"role": "user", "content": f"you have {n}"}],
            "reward_model": {"style": "rule", "ground_truth": str(n if truth is None else truth)},
            "extra_info": {"answer": f"#### {n if truth is None else truth}"},
            "answer": {"alice": f"#### {n}", "carol": f"#### {n + 1}"},
            "chosen": {"alice": f"#### {n}", "carol": f"#### {n + 1}"},
            "rejected": {"alice": f"#### {n + 1}", "carol": f"#### {n}"},
        }


@pytest.fixture
def learn(compose_config, cold_assets, tmp_path):
    """Train in this process; returns the first validation and the last one."""
    path = tmp_path / "tasks.jsonl"

    def learn(*words, seed=0):
        truth = 3 if {"method=rft", "method=spin"} & set(words) else None  # of a cold model, by chance or soon
        path.write_text("".join(json.dumps(row) + "\n" for row in tasks(truth)))
        data = (f"data.train_files={path}", f"data.val_files={path}", "data.train_batch_size=8")
        history = run(compose_config(*short_run(cold_assets, tmp_path, STEPS, seed), *data, *words)).history
        return history[min(history)], history[max(history)]

    return learn


def answers(before, after):
    """Every agent's answer is likely: less than a tenth of a nat a token."""
    return all(before[f"agent/{a}/loss"] > 1 and after[f"agent/{a}/loss"] < 0.1 for a in AGENTS)


def prefers(before, after):
    return all(
        after[f"agent/{a}/preference_accuracy"] == 1 and after[f"agent/{a}/preference_margin"] > 0.5 for a in AGENTS
    )


def is_right(before, after):
    return before["vote"] <= 0.5 and after["vote"] >= 0.85


PROOFS = {
    "sft": (("method=sft", "data.train_batch_size=4"), answers),
    "dpo": (("method=dpo", "data.train_batch_size=4"), prefers),
    "madpo": (("method=madpo", "data.train_batch_size=4"), prefers),
    "spin": (("method=spin", "runner=single_turn", "trainer.ref_update_freq=1", "actor_rollout_ref.rollout.n=4"), is_right),
    "rft": (("method=rft", "runner=single_turn", "actor_rollout_ref.rollout.n=8"), is_right),
    "hybrid": (
        ("method=hybrid", "runner=single_turn", "credit=own", "method.files=[${data.train_files}]", "method.answer_key=extra_info.answer",
         "method.sft_steps=15", "actor_rollout_ref.rollout.n=4"),
        is_right,
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", slow_but([0, 1, 2], 0))
@pytest.mark.parametrize("name", slow_but(list(PROOFS)))
def test_a_method_learns(learn, name, seed):
    words, has_learned = PROOFS[name]
    before, after = learn(*words, seed=seed)
    assert has_learned(before, after), (before, after)


def flipped(monkeypatch):
    """Every derivative has the other sign."""
    for cls in (sft.SFT, dpo.DPO, madpo.MADPO):
        own = cls.gradients

        def gradients(self, rows, own=own):
            return -1 * own(self, rows)

        monkeypatch.setattr(cls, "gradients", gradients)


def exchanged(monkeypatch):
    """The policies get each other's rows."""
    for cls in (Method, madpo.MADPO):

        async def update(self, rows, policies, own=cls.update):
            return await own(self, dict(zip(rows, reversed(list(rows.values())), strict=True)), policies)

        monkeypatch.setattr(cls, "update", update)


def keeps_everything(monkeypatch):
    monkeypatch.setattr(sft, "best_episodes", lambda episodes, *rule: list(episodes))


def other_answers(monkeypatch):
    """Another answer than the data's is chosen."""
    monkeypatch.setattr(spin, "text_of", lambda row, key, agent: "#### 5")


def forgets_side(monkeypatch):
    """The rejected side is raised as well as the chosen one."""
    own = madpo.joint_gradients

    def gradients(slope_B, rows):
        rows = rows.clone()
        rows["side"] = torch.zeros_like(rows["side"])
        return own(slope_B, rows)

    monkeypatch.setattr(madpo, "joint_gradients", gradients)


FAULTS = [
    ("sft", flipped), ("sft", exchanged),
    ("dpo", flipped), ("dpo", exchanged),
    ("madpo", flipped), ("madpo", exchanged), ("madpo", forgets_side),
    ("spin", flipped), ("spin", other_answers),
    ("rft", flipped), ("rft", keeps_everything),
    ("hybrid", flipped),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[f"{name}-{fault.__name__}" for name, fault in FAULTS])
def test_a_fault_is_seen(learn, monkeypatch, name, fault):
    words, has_learned = PROOFS[name]
    fault(monkeypatch)
    before, after = learn(*words)
    assert not has_learned(before, after), (before, after)
