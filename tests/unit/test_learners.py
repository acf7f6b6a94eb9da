"""Every registered learner and credit scheme, on batches made by hand."""

import asyncio
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from omegaconf import II
from tensordict import TensorDict

from marl.controller.ballots import ballots_of
from marl.controller.batching import joint_batch, to_rows
from marl.learners import CREDITS, LEARNERS, spread
from marl.learners.schemes import TeamOf
from marl.types import Ballot, Episode, Rule, Task, Turn, Verdict, Vote
from marl.utils.ragged import jagged
from recipe import leave_one_out  # noqa: F401 - registers a learner from outside

AGENTS = ("a", "b")


class FakeGroup:
    """Stands for one policy's workers."""

    def __init__(self):
        self.rows = []

    async def update_actor(self, rows):
        self.rows.append(rows)
        return {"grad_norm": 1.0}

    async def compute_log_prob(self, rows):
        return TensorDict({"log_probs": rows["old_log_probs"]}, batch_size=[len(rows)])


def episode(task, sample, verdicts):
    """``verdicts``: one list an agent, a score a round; None is silence. Everybody answers its score; the last answers are
    voted on, and another answer to any turn would have scored .5."""
    record = Episode(Task(task, [], "1", "marl/x", lambda text: text), sample, list(AGENTS))
    for agent, scores in zip(AGENTS, verdicts, strict=True):
        for round, score in enumerate(scores, start=1):
            if score is not None:
                record.turns.append(
                    Turn(
                        agent,
                        round,
                        [],
                        str(score),
                        policy=agent,
                        prompt_ids=[1, 2],
                        response_ids=[3] * round,
                        response_mask=[1] * round,
                        log_probs=[-1.0] * round,
                        verdict=Verdict(score, "1"),
                        outcomes=[score, 0.5],
                    )
                )
    record.verdict = Verdict(1.0, "1")
    last = [turns[-1] for agent in AGENTS if (turns := record.trajectory(agent))]
    record.ballot = Ballot(Rule.heaviest, tuple(Vote(turn.agent, turn.round, turn.text) for turn in last))
    return record


def batch_of(*episodes, **options):
    batch = joint_batch(episodes, AGENTS, dict.fromkeys(AGENTS, 1.0), **options)
    batch.ballots = [ballots_of(record) for record in episodes]
    for rows in batch.rows.values():
        rows["old_log_probs"] = rows["rollout_log_probs"]
    return batch


def two_samples():
    return batch_of(episode("t", 0, [[1, 0], [0, 1]]), episode("t", 1, [[0, 0], [0, 0]]))


COMPOSED = {
    II("algorithm.gamma"): 1.0,
    II("algorithm.lam"): 1.0,
    II("algorithm.norm_adv_by_std_in_grpo"): True,
    II("algorithm.adv_estimator"): None,
    II("seed"): 0,
}
"""What the configuration puts in, where a learner refers to other keys."""


def build(name, credit="own", credit_options=None, **options):
    cls = LEARNERS.get(name)
    defaults = {option.name: COMPOSED[option.default] for option in fields(cls.Config) if option.default in COMPOSED}
    scheme = CREDITS.get(credit)
    return cls(
        cls.Config(name=name, **(defaults | options)), scheme(scheme.Config(name=credit, **(credit_options or {})))
    )


@pytest.mark.parametrize("credit", CREDITS.names())
@pytest.mark.parametrize("name", LEARNERS.names())
def test_every_learner_fills_advantages_and_updates_every_policy_once(name, credit):
    learner, batch = build(name, credit), two_samples()
    if learner.credits and credit not in learner.credits:
        pytest.skip("not defined for it, and refused")
    if learner.critic != "none":
        batch.values_ERA = torch.full(batch.mask_ERA.shape, 0.25)
        batch.utilities_ERA = torch.linspace(0, 1, batch.mask_ERA.numel()).view(batch.mask_ERA.shape)
        batch.joint_ids = jagged([[1, 2, 3]] * 4, torch.long)  # of two episodes with two rounds
    metrics = learner.assign_credit(batch)
    groups = {policy: FakeGroup() for policy in batch.rows}
    results = asyncio.run(learner.update(batch, groups))
    assert all(isinstance(value, float) for value in metrics.values())
    for policy, rows in batch.rows.items():
        advantages, mask = rows["advantages"], rows["response_mask"]
        assert torch.equal(advantages.offsets(), mask.offsets())
        assert advantages.values().isfinite().all()
        # leave_one_out compares agents: credit=team makes them equal
        assert advantages.values().any() or not learner.compares_samples
        assert len(groups[policy].rows) == 1 and results[policy]["grad_norm"] == 1.0


@pytest.mark.parametrize("credit", CREDITS.names())
def test_every_credit_scheme_is_zero_where_nobody_spoke(credit):
    batch = batch_of(episode("t", 0, [[1, None], [1, 1]]), episode("t", 1, [[1, 1], [None, 1]]))
    scheme = CREDITS.get(credit)
    got = scheme(scheme.Config(name=credit)).assign(batch)
    assert scheme.kind in ("reward", "return", "advantage")
    assert got.shape == batch.mask_ERA.shape and got[~batch.mask_ERA].abs().sum() == 0


@pytest.mark.parametrize(
    "of,expected",
    [
        (TeamOf.round, [[0.5, 0.5], [0.5, 0.5]]),
        (TeamOf.final, [[0.0, 0.0], [0.5, 0.5]]),
        (TeamOf.answer, [[0.0, 0.0], [1.0, 1.0]]),
    ],
)
def test_team_credit_pays_everybody_the_same(of, expected):
    scheme = CREDITS.get("team")
    got = scheme(scheme.Config(name="team", of=of)).assign(batch_of(episode("t", 0, [[1, 0], [0, 1]])))
    assert got[0].tolist() == expected


def test_only_the_named_rounds_are_trained():
    batch = batch_of(episode("t", 0, [[1, 0], [0, 1]]), train_rounds=[1])
    assert {policy: len(rows) for policy, rows in batch.rows.items()} == {"a": 1, "b": 1}
    assert batch.mask_ERA.all(), "credit still sees every round"


def test_numbers_of_turns_reach_the_tokens_of_a_packed_row():
    """A row may hold several turns of an agent: spread reads turn_index and assumes nothing about rows."""
    grid = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    turn = Turn(
        "a", 1, [], "", prompt_ids=[1], response_ids=[5, 6, 9, 9, 7], response_mask=[1, 1, 0, 0, 1], log_probs=[0.0] * 5
    )
    rows = to_rows([[(turn, 0)]], {"a": 1.0})
    index = rows["turn_index"]
    packed = torch.nested.nested_tensor_from_jagged(torch.tensor([0, 0, -1, -1, 2]), offsets=index.offsets())
    rows["turn_index"] = packed
    assert spread(grid, rows).values().tolist() == [1.0, 1.0, 0.0, 0.0, 3.0]


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="unknown learner 'grop'.*Did you mean 'grpo'"):
        LEARNERS.get("grop")


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="already taken"):

        @LEARNERS.register("grpo")
        class Another(LEARNERS.get("leave_one_out")):
            pass


def test_learners_see_no_workers():
    """verl's estimators and losses are functions; its workers and controllers are none of a learner's business."""
    import ast
    from pathlib import Path

    import marl.learners

    for path in Path(marl.learners.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [n for n in names if n.startswith(("verl.workers", "verl.single_controller"))], path


def test_a_learner_lives_in_the_file_of_its_name_and_is_tested_in_its_own():
    here = Path(__file__).parent
    for name in LEARNERS.names():
        cls = LEARNERS.get(name)
        if cls.__module__.startswith("marl."):
            assert cls.__module__ == f"marl.learners.{name}" and cls.__name__ == name.replace("_", "").upper()
            assert (here / f"test_{name}.py").is_file()
