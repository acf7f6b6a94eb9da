"""A run that is killed in the middle of a step goes on from its interrupted turns, to the same end."""

import json

import pytest
import torch

from marl.cluster.failures import GroupFailed
from marl.controller.client import PolicyClient
from tests.stack.builders import parameters

RUN = (
    "controller.ledger=true",
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
)
RESUMED = (*RUN, "trainer.resume_mode=auto")


@pytest.fixture
def asked(monkeypatch):
    """Seeds of the turns that servers gave; after ``limit`` of them the servers die with the next one in their hands."""

    class Asked(list):
        limit = None

    asked, act = Asked(), PolicyClient.act

    async def counted(self, *args, seed, **options):
        turn = await act(self, *args, seed=seed, **options)
        if len(asked) == asked.limit:
            raise GroupFailed("a server died")
        asked.append(seed)
        return turn

    monkeypatch.setattr(PolicyClient, "act", counted)
    return asked


def train(run):
    run.wait(run.trainer.fit())
    return parameters(run, "policies")


def dumped(folder):
    lines = [json.loads(line) for path in sorted(folder.glob("rollouts/*.jsonl")) for line in path.open()]
    return [{key: value for key, value in line.items() if not key.startswith("perf")} for line in lines]


@pytest.mark.slow
def test_a_hybrid_run_that_is_killed_while_it_plays_goes_on_from_its_turns(alone, asked, tmp_path):
    """Its first steps imitate, and leave no turns."""
    rows = [{"prompt": f"what is {i % 9} plus {i % 5} ?", "answer": f"#### {i % 9 + i % 5}"} for i in range(16)]
    (tmp_path / "imitated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("method=hybrid", f"method.files=[{tmp_path}/imitated.jsonl]", "method.sft_steps=2", *RESUMED)
    words = (
        *words,
        "trainer.total_training_steps=4",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={tmp_path}/run",
    )
    asked.limit = 60
    with pytest.raises(GroupFailed, match="a server died"):
        train(alone(*words))
    before, asked.limit = list(asked), None
    asked.clear()
    train(alone(*words))
    assert len(before) == 60 and not set(before) & set(asked), "none is generated twice"


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_interrupted_turns(alone, asked, tmp_path):
    """Killed before there is a checkpoint, in the middle of a later step, and in the last validation."""
    whole = train(alone(*RUN, f"trainer.default_local_dir={tmp_path}/whole"))
    seeds = list(asked)
    assert len(set(seeds)) == len(seeds)
    assert not list(tmp_path.glob("whole/ledger/*")), "a run that has ended needs none"
    for limit in (20, 100, len(seeds) - 7):
        folder, before = tmp_path / str(limit), []
        asked.clear()
        asked.limit = limit
        with pytest.raises(GroupFailed, match="a server died"):
            train(alone(*RUN, f"trainer.default_local_dir={folder}"))
        before, asked.limit = list(asked), None
        asked.clear()
        again = train(alone(*RESUMED, f"trainer.default_local_dir={folder}"))
        assert sorted([*before, *asked]) == sorted(seeds), "no turn is skipped, none is generated twice"
        assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
        assert dumped(folder) == dumped(tmp_path / "whole")
