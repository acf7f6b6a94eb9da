"""Steps that are saved, and validations that compare with one another."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from marl.checkpoint import Trained, check_source, check_state, fingerprint, validation_sampling
from marl.cluster.policy_group import PolicyGroup
from marl.config.identity import code_fingerprint
from marl.evaluation.baselines import answers_per_episode
from marl.marl_trainer import MARLTrainer
from marl.report.alarms import Collapse
from marl.types import Episode, Task, Turn
from marl.utils.metrics import RunningMean


class Stub(SimpleNamespace):
    """As much of a trainer as deciding what to keep needs."""

    async def validate(self):
        self.done.append("validate")
        if self.fails:
            raise RuntimeError("the judge is gone")
        return {"val/team/vote": 1.0}

    async def save(self, wait):
        self.done.append("save and wait" if wait else "save")


def kept(
    step, total, save_freq=-1, save_final=True, test_freq=-1, spent=False, fails=False, beside=True, unreachable=False
):
    settings = SimpleNamespace(
        save_freq=save_freq, save_final=save_final, test_freq=test_freq, save_in_background=beside
    )
    config = SimpleNamespace(trainer=settings)
    tokens, controller = 10 if spent else 9, SimpleNamespace(ledger=SimpleNamespace(root=None), spent=dict)
    stub = Stub(
        config=config,
        controller=controller,
        step_number=step,
        total_steps=total,
        sampled_tokens=tokens,
        fails=fails,
        done=[],
        collapse_alarm=Collapse([]),
    )

    def log(metrics, step):
        stub.done.append(f"log {len(metrics)}")
        if unreachable:
            raise RuntimeError("the tracker is gone")

    stub.tracking = SimpleNamespace(log=log)
    try:
        asyncio.run(MARLTrainer.keep(stub, {"loss": 1.0}, last=MARLTrainer.is_over(stub, token_budget=10)))
    except RuntimeError as error:
        stub.done.append(str(error))
    return stub.done


@pytest.mark.parametrize(
    "step,options,done",
    [
        (1, {}, ["log 1"]),
        (4, {}, ["validate", "log 2", "save and wait"]),
        (4, {"save_final": False}, ["validate", "log 2"]),
        (2, {"save_freq": 2, "save_final": False}, ["log 1", "save"]),
        (2, {"save_freq": 2, "beside": False}, ["log 1", "save and wait"]),
        (3, {"save_freq": 2}, ["log 1"]),
        (4, {"save_freq": 4, "save_final": False}, ["validate", "log 2", "save and wait"]),
        (2, {"test_freq": 2}, ["validate", "log 2"]),
        (2, {"spent": True}, ["validate", "log 2", "save and wait"]),
        (0, {"save_freq": 0, "test_freq": 0}, ["log 1"]),
    ],
)
def test_the_last_weights_are_kept_whatever_the_frequency(step, options, done):
    assert kept(step, 4, **options) == done


def test_weights_are_kept_where_their_validation_fails():
    assert kept(4, 4, fails=True) == ["validate", "log 1", "save and wait", "the judge is gone"]
    assert kept(4, 4, fails=True, save_final=False) == ["validate", "log 1", "the judge is gone"]
    assert kept(2, 4, fails=True, test_freq=2) == ["validate", "log 1", "the judge is gone"]


def test_weights_are_kept_where_a_tracker_fails():
    assert kept(4, 4, unreachable=True) == ["validate", "log 2", "save and wait", "the tracker is gone"]
    assert kept(2, 4, unreachable=True, save_freq=2) == ["log 1", "save", "the tracker is gone"]


def test_discarded_weights_raise_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        kept(4, 4, save_final=False)
    assert "step 4, the last, are lost: trainer.save_final=false" in caplog.text


def resumed_from(ranks, code=None):
    group = SimpleNamespace(takes_weights=True, workers=SimpleNamespace(world_size=ranks))
    run = Trained(None, None, {"alice": group}, {"bob": group}, None, None, None)
    facts = {"world_size": {"alice/actor": 2, "bob/critic": 2}, "fingerprints": {"code": code or code_fingerprint()}}
    check_source(run, "global_step_3", facts)


def test_another_number_of_ranks_is_refused_and_other_source_files_are_said(caplog):
    resumed_from(2)
    assert not caplog.text
    resumed_from(2, "of another version")
    assert "global_step_3 was saved with other source files (of marl, or of your own modules)" in caplog.text
    with pytest.raises(
        ValueError, match=r"global_step_3: alice/actor was saved by 2 ranks, and this run has 1; resume with"
    ):
        resumed_from(1)


def task(number, truth="4", source="x"):
    return Task(str(number), [{"role": "user", "content": f"{number}+1?"}], truth, source, str)


def test_validation_data_are_known_by_their_tasks():
    tasks = [task(1), task(2)]
    assert fingerprint(tasks) == fingerprint([task(1), task(2)])
    others = ([task(1)], [task(1), task(2, "5")], [task(1), task(2, source="y")], [task(1), task(3)])
    assert len({fingerprint(other) for other in (tasks, *others)}) == 5
    private = task(1)
    private = replace(private, extra={"agent_prompts": {"alice": [{"role": "user", "content": "half of it"}]}})
    assert fingerprint([private]) != fingerprint([task(1)]), "an agent is shown something else"


def test_validation_data_are_known_by_how_answers_are_sampled():
    sampled = [{"n": n, "alice": [{"temperature": heat}]} for n in (1, 4) for heat in (0.0, 1.0)]
    assert len({fingerprint([task(1)], sampling) for sampling in sampled}) == 4
    assert fingerprint([task(1)], sampled[0]) == fingerprint([task(1)], dict(sampled[0]))


def test_sampling_of_a_validation_is_that_of_every_agent_with_each_of_its_policies():
    agents = {"alice": SimpleNamespace(policy_by_round=["a", "b"])}
    rollout = SimpleNamespace(val_kwargs=SimpleNamespace(n=3))
    config = SimpleNamespace(agents=agents, actor_rollout_ref=SimpleNamespace(rollout=rollout))
    found = validation_sampling(config, lambda agent, policy, validate: {"of": (agent, policy, validate)})
    assert found == {"n": 3, "agents": {"alice": [{"of": ("alice", "a", True)}, {"of": ("alice", "b", True)}]}}


def spoken(agent="alice", **marks):
    turn = Turn(agent, 1, [], "4")
    for name, value in marks.items():
        setattr(turn, name, value)
    return turn


def test_the_answers_of_an_episode_are_those_of_the_whole_run():
    """A baseline gets as many: notes count for nothing, nor does a user that is played but not trained."""
    note = spoken(branch=-1, kept=False, trained=False, answers=False)
    user, critique = spoken("user", answers=False), spoken(answers=False)
    steps = (
        [[spoken(), critique, spoken()], [spoken(), critique, spoken()]],
        [[spoken(), user, note], [spoken(), user]],
    )
    trainer = SimpleNamespace(sampled_tokens=0, answers_per_episode=RunningMean(), trained_agents=["alice"])
    trainer.controller = SimpleNamespace(accuracy=SimpleNamespace(update=lambda episodes: None))
    for step in steps:
        MARLTrainer._count(trainer, [Episode(task(1), 0, ["alice", "user"], turns) for turns in step])
    assert trainer.answers_per_episode.mean == 2.0 and answers_per_episode(trainer) == 2
    assert answers_per_episode(SimpleNamespace(answers_per_episode=RunningMean())) == 1


@pytest.mark.parametrize(
    "changes,said",
    [
        ({}, None),
        ({"running_means": None}, "lacks running_means: another version of marl saved it"),
        ({"policies": ["bob"]}, r"holds the policies \['bob'\], and this run has \['alice'\]; expected the same"),
        ({"frozen": True}, r"holds no weights of alice, which nobody trained then; set agents.<name>.trainable=false"),
    ],
)
def test_a_checkpoint_of_another_version_or_run_is_refused_by_name(tmp_path, changes, said):
    run = Trained(None, None, {"alice": PolicyGroup}, {}, None, None, None)
    changes = dict(changes)
    if not changes.pop("frozen", False):
        (tmp_path / "alice" / "actor").mkdir(parents=True)
    state = {"policies": ["alice"], "critics": [], "references": {}, "running_means": {}, "histories": {}}
    state |= {"answers_per_episode": [0.0, 0], "seconds": 0.0, "old_log_probs": {"within": {}, "beyond": []}}
    state |= {"spent_at_endpoints": {}} | changes
    state = {key: value for key, value in state.items() if value is not None}
    if said is None:
        check_state(run, tmp_path, state)
    else:
        with pytest.raises(ValueError, match=said):
            check_state(run, tmp_path, state)
