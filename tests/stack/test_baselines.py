"""Baselines of a team: one agent on as many tokens, the vote over it, and the team before training."""

import json

import pytest

from marl.cluster.failures import GroupLost
from marl.controller.client import PolicyClient
from marl.controller.controller import Controller
from marl.evaluation.baselines import majority_is_right, solo_config
from marl.main import run
from marl.marl_trainer import MARLTrainer
from marl.preflight.prepare import prepare
from marl.report import summary
from marl.run_setup import Setup
from marl.types import Episode, Score, Task, Turn

from .conftest import SMALL


@pytest.fixture
def small(compose_config, cold_assets, tmp_path):
    def compose(*overrides):
        return compose_config(
            f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "resources.one_process=true",
            "trainer.total_training_steps=2", *SMALL, *overrides,
        )  # fmt: skip

    return compose


@pytest.mark.slow
def test_baselines_stand_beside_the_team(small, tmp_path):
    run(small("baseline=[solo,vote,untrained]", "trainer.logger=[file]", "learner=mappo"))
    found = summary.read_json(tmp_path)
    assert set(found["baselines"]) == {"solo", "vote", "untrained"}
    solo, team = found["baselines"]["solo"], found["sampled_tokens"]
    # 4 tasks x 4 samples x 4 turns of at most 3 tokens a step; the single agent stops in the step that reaches the budget
    assert 100 < team <= 2 * 4 * 4 * 4 * 3 and team <= solo["sampled_tokens"] <= team + 4 * 16 * 3
    assert found["baselines"]["vote"]["answers"] == 4.0
    assert found["baselines"]["untrained"]["accuracy"] == found["accuracy"]["before"]["final"]
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"baseline/solo/accuracy", "baseline/vote/accuracy"} <= set(logged[-1]["data"])
    assert (tmp_path / "baseline_solo" / "summary.json").is_file()


@pytest.mark.slow
def test_an_interrupted_baseline_goes_on_from_its_own_turns(small, tmp_path, monkeypatch):
    """After a fault, and after a kill and the same command again."""
    asked, act, limits = [], PolicyClient.act, []

    async def counted(self, *args, seed, **options):
        turn = await act(self, *args, seed=seed, **options)
        if limits and len(asked) == limits[0][0]:
            raise limits.pop(0)[1]
        asked.append(seed)
        return turn

    monkeypatch.setattr(PolicyClient, "act", counted)
    words = ("baseline=[solo]", "trainer.logger=[file]", "controller.ledger=true", "trainer.resume_mode=auto")
    run(small(*words, f"trainer.default_local_dir={tmp_path}/whole"))
    whole, cut = len(asked), f"trainer.default_local_dir={tmp_path}/cut"
    limits[:] = [(whole - 10, GroupLost("a server died")), (whole - 5, KeyboardInterrupt())]
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        run(small(*words, cut))
    run(small(*words, cut))
    solo = [summary.read_json(tmp_path / name)["baselines"]["solo"] for name in ("whole", "cut")]
    assert solo[0] == solo[1]
    assert len(asked) - whole <= 16, "the turns in the hands of two faults are generated twice, and hardly more"


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "steps"), [("constant", 2), ("cosine", 1)])
def test_the_single_agent_has_the_teams_schedule_and_twice_its_steps(small, monkeypatch, schedule, steps):
    """A learning rate that decays over twice the steps would be another recipe, and a cosine rises again after its end."""
    built, original = [], MARLTrainer.fit

    async def fit(self, token_budget=None):
        lengths = {group.actor.optim.total_training_steps for group in self.policies.values()}
        built.append((self.total_steps, lengths, self.config.trainer.total_training_steps))
        await original(self, token_budget)

    monkeypatch.setattr(MARLTrainer, "fit", fit)
    kind = f"actor_rollout_ref.actor.optim.lr_scheduler_type={schedule}"
    run(small("baseline=[solo]", "trainer.total_training_steps=1", kind))
    assert built == [(1, {1}, 1), (steps, {1}, 1)]


@pytest.mark.slow
def test_the_untrained_team_is_measured_where_the_run_did_not(small, tmp_path):
    run(small("baseline=untrained", "trainer.val_before_train=false", "trainer.test_freq=1"))
    found = summary.read_json(tmp_path)
    other = run(small("trainer.val_only=true", f"trainer.default_local_dir={tmp_path}/other"))
    assert found["baselines"]["untrained"]["vote"] == other.history[0]["vote"]


def test_the_single_agent_is_the_first_that_is_trained(small):
    config = prepare(
        small("agents.alice.trainable=false", "+policies.carol.actor.optim.lr=0.5", "learner.train_rounds=[2]")
    ).config
    solo = solo_config(config, answers=3)
    assert list(solo.agents) == ["carol"] and solo.actor_rollout_ref.rollout.n == 12
    assert (solo.runner.name, solo.credit.name, solo.learner.train_rounds) == ("single_turn", "own", None)
    assert solo.policies.carol.actor.optim.lr == 0.5 and len(config.agents) == 2, "the team's own is as it was"
    assert Setup.of(solo).ranks_by_pool == {"carol": 1}


@pytest.mark.parametrize(
    "answers,right",
    [(["7", "7", "3"], True), (["3", "3", "7"], False), ([None, None, "7"], True), ([None, None], False)],
)
def test_the_vote_over_answers(answers, right):
    task = Task("t", [], "7", "x", str)
    episodes = [
        Episode(task, i, ["a"], [Turn("a", 1, [], "")], answer, Score(float(answer == "7"), answer))
        for i, answer in enumerate(answers)
    ]
    assert majority_is_right(episodes) is right


def test_an_answer_that_one_of_its_texts_makes_right_is_right():
    """A reward of the form may judge two texts with one answer differently; the last one decided."""
    task = Task("t", [], "7", "x", str)
    for scores in ((1.0, 0.0), (0.0, 1.0)):
        episodes = [Episode(task, i, ["a"], [], "7", Score(score, "7")) for i, score in enumerate(scores)]
        assert majority_is_right(episodes) is True


@pytest.mark.slow
def test_the_vote_baseline_samples_where_validation_is_greedy(small, tmp_path, monkeypatch):
    """Greedy answers to one task are all the same, and so is their vote: that would be solo again."""
    greedy = "actor_rollout_ref.rollout.val_kwargs.do_sample=false"
    measured = []
    original = Controller.measure

    async def measure(self, *arguments, **options):
        episodes = await original(self, *arguments, **options)
        measured.append(episodes)
        return episodes

    monkeypatch.setattr(Controller, "measure", measure)
    run(small("baseline=[vote]", greedy, "trainer.total_training_steps=1"))
    episodes = measured[-1]
    by_task: dict[str, list] = {}
    for episode in episodes:
        by_task.setdefault(episode.task.id, []).append(episode.turns[0])
    assert {len(turns) for turns in by_task.values()} == {4}
    assert summary.read_json(tmp_path)["baselines"]["vote"]["answers"] == 4.0
    assert all(len({turn.seed for turn in turns}) == 4 for turns in by_task.values())
    assert any(len({turn.text for turn in turns}) > 1 for turns in by_task.values()), "they differ"


@pytest.mark.slow
def test_instruction_variants_against_a_single_instruction_at_equal_cost(small, tmp_path):
    """Two instructions of one model answer beside one another and are one group; the share of groups that taught nothing
    stands beside that of a single instruction with as many answers."""
    variants = ("runner=single_turn", "agents.carol.policy=alice", "agents.alice.role=tom", "agents.carol.role=ann")
    trainer = run(small(*variants, "learner.group_by=[task,round]", "credit=own", "baseline=[solo]"))
    found = json.loads((tmp_path / "summary.json").read_text())
    assert list(trainer.policies) == ["alice"]
    for share in (found["degenerate_groups"], found["baselines"]["solo"]["degenerate_groups"]):
        assert 0 <= share <= 1
    assert trainer.learner.running_means["degenerate_groups"].count == 2, "a share of every step"
    solo = json.loads((tmp_path / "baseline_solo" / "summary.json").read_text())
    assert solo["sampled_tokens"] >= found["sampled_tokens"] * 0.9
