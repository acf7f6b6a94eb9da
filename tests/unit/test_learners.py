"""Every registered learner and credit scheme, on batches made by hand."""

import asyncio
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from marl.batch.build import joint_batch, to_rows
from marl.batch.evidence import ballots_of, outcomes_of
from marl.learners import CREDITS, LEARNERS, broadcast_to_tokens
from marl.learners.credit_schemes import TeamOf
from marl.types import Turn
from marl.utils.ragged import jagged
from recipe import leave_one_out  # noqa: F401 - registers a learner from outside
from tests.builders import AGENTS, FakeGroup, batch_of, build_learner as build, episode, scheme, two_samples


@pytest.mark.parametrize("credit", CREDITS.names())
@pytest.mark.parametrize("name", LEARNERS.names())
def test_every_learner_fills_advantages_and_updates_every_policy_once(name, credit):
    learner, batch = build(name, credit), two_samples()
    if learner.credits and credit not in learner.credits:
        pytest.skip("not defined for it, and refused")
    if learner.critics:
        batch.critic_data.values_ERA = torch.full(batch.mask_ERA.shape, 0.25)
        batch.critic_data.utilities_ERA = torch.linspace(0, 1, batch.mask_ERA.numel()).view(batch.mask_ERA.shape)
        batch.critic_data.joint_ids = jagged([[1, 2, 3]] * 4, torch.long)  # of two episodes with two rounds
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


def as_critics_leave_it(batch):
    """Values and utilities of every trained turn, where any turn is trained."""
    if batch.rows:
        batch.critic_data.values_ERA = torch.full(batch.mask_ERA.shape, 0.25) * batch.trained_ERA
        batch.critic_data.utilities_ERA = (
            torch.linspace(0, 1, batch.mask_ERA.numel()).view(batch.mask_ERA.shape) * batch.trained_ERA
        )
    batch.critic_data.joint_ids = jagged([[1, 2, 3]] * batch.mask_ERA[..., 0].numel(), torch.long)
    return batch


def variants():
    """Every learner with its first credit; those that chain also with a chain; GRPO with every credit."""
    for name in LEARNERS.names():
        cls = LEARNERS.get(name)
        credit = (cls.credits or ("own",))[0]
        yield name, credit, {}
        if any(option.name == "chain" for option in fields(cls.Config)):
            yield name, credit, {"chain": True}
    yield from (("grpo", credit, {}) for credit in CREDITS.names() if credit != "own")


def step(learner, batch):
    """A trainer's calls of a learner, for policies a and b: its metrics, and the updates."""
    groups = {policy: FakeGroup() for policy in AGENTS}
    metrics = learner.assign_credit(as_critics_leave_it(batch)) if learner.critics else learner.assign_credit(batch)
    assert asyncio.run(learner.update_critics(batch, {})) == {}
    updates = asyncio.run(learner.update(batch, groups))
    assert all(math.isfinite(value) for value in metrics.values())
    return metrics, updates


@pytest.mark.parametrize("name,credit,options", variants())
def test_a_step_without_a_trained_turn_is_survived(name, credit, options):
    learner = build(name, credit, **options)
    records = [episode("t", 0, [[1, 0], [0, 1]]), episode("t", 1, [[0, 0], [0, 0]])]
    batch = joint_batch(records, AGENTS, {})
    batch.evidence.ballots = [ballots_of(record) for record in records]
    assert not batch.rows and not batch.trained_ERA.any() and batch.mask_ERA.all()
    _, updates = step(learner, batch)
    assert updates == {}, "nobody is updated"
    _, updates = step(learner, two_samples())
    assert set(updates) == set(AGENTS), "and the next step goes on"


def ended_before_a_choice(task, sample):
    """The context overflowed in round 1, before one of its answers was kept."""
    record = episode(task, sample, [[sample], [0]])
    record.failure, record.ballot = "overflow", None
    for turn in record.turns:
        turn.kept = turn.trained = False
    return record


@pytest.mark.parametrize("name,credit,options", variants())
def test_a_step_of_alternatives_that_nobody_kept_is_survived(name, credit, options):
    learner, records = build(name, credit, **options), [ended_before_a_choice("t", sample) for sample in range(2)]
    batch = batch_of(*records)
    assert batch.mask_ERA.shape == (2, 1, 2) and not batch.rows and not batch.spoken_ERA.any()
    _, updates = step(learner, batch)
    assert updates == {}, "nobody is updated"
    _, updates = step(learner, two_samples())
    assert set(updates) == set(AGENTS), "and the next step goes on"


@pytest.mark.parametrize("credit", CREDITS.names())
def test_every_credit_scheme_takes_alternatives_that_nobody_kept(credit):
    batch, own = batch_of(*(ended_before_a_choice("t", sample) for sample in range(2))), scheme(credit)
    assert own.of(batch).shape == own.assign(batch).shape == (2, 1, 2) and not own.of(batch).any()
    assert own.of_team(batch).tolist() == [[0], [0]]


@pytest.mark.parametrize("name,credit,options", variants())
def test_a_policy_without_rows_is_left_alone(name, credit, options):
    """b is silent in one episode and not trained in the other."""
    records = [episode("t", 0, [[1, 0], [None, None]]), episode("t", 1, [[0, 1], [0, 0]])]
    batch = joint_batch(records, AGENTS, {"a": 1.0})
    batch.evidence.ballots = [ballots_of(record) for record in records]
    batch.evidence.outcomes_ERAK = outcomes_of(records, batch)
    batch.rows["a"]["old_log_probs"] = batch.rows["a"]["rollout_log_probs"]
    _, updates = step(build(name, credit, **options), batch)
    assert set(updates) == {"a"} and batch.rows["a"]["advantages"].values().isfinite().all()


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
def test_team_credit_is_the_same_for_all_agents(of, expected):
    scheme = CREDITS.get("team")
    got = scheme(scheme.Config(name="team", of=of)).assign(batch_of(episode("t", 0, [[1, 0], [0, 1]])))
    assert got[0].tolist() == expected


def test_only_the_named_rounds_are_trained():
    batch = batch_of(episode("t", 0, [[1, 0], [0, 1]]), train_rounds=[1])
    assert {policy: len(rows) for policy, rows in batch.rows.items()} == {"a": 1, "b": 1}
    assert batch.mask_ERA.all(), "credit still sees every round"


def test_numbers_of_turns_reach_the_tokens_of_a_packed_row():
    """A row may hold several turns of an agent: broadcast_to_tokens reads turn_index and assumes nothing about rows."""
    grid = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    turn = Turn(
        "a", 1, [], "", prompt_ids=[1], response_ids=[5, 6, 9, 9, 7], response_mask=[1, 1, 0, 0, 1], log_probs=[0.0] * 5
    )
    rows = to_rows([[(turn, 0)]], {"a": 1.0})
    index = rows["turn_index"]
    packed = torch.nested.nested_tensor_from_jagged(torch.tensor([0, 0, -1, -1, 2]), offsets=index.offsets())
    rows["turn_index"] = packed
    assert broadcast_to_tokens(grid, rows).values().tolist() == [1.0, 1.0, 0.0, 0.0, 3.0]


def remembered(name):
    """A learner's state after it has worked."""
    learner = build(name)
    if hasattr(learner, "fit"):
        learner.fit(len(AGENTS))
    return learner.state_dict()


@pytest.mark.parametrize("name", LEARNERS.names())
def test_a_learner_takes_its_own_state_and_refuses_that_of_others(name):
    state = remembered(name)
    build(name).load_state_dict(state)
    others = {other: held for other in LEARNERS.names() if set(held := remembered(other)) != set(state)}
    assert others
    for held in others.values():
        if not held and hasattr(build(name), "fit"):
            continue  # a mixer that was not fitted yet has nothing to save
        with pytest.raises(ValueError, match=f"learner={name}: the saved state holds .*another learner saved it"):
            build(name).load_state_dict(held)


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
