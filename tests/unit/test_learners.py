"""Every registered learner and credit scheme, on batches made by hand."""

import asyncio

import pytest
import torch

from marl.controller.batching import joint_batch, to_rows
from marl.learners import CREDITS, LEARNERS, spread
from marl.learners.grpo import GRPO, GroupKey
from marl.learners.ippo import IPPO
from marl.learners.schemes import TeamOf
from marl.types import Episode, Task, Turn, Verdict
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
        raise AssertionError("no learner of this version asks for log-probs")


def episode(task, sample, verdicts):
    """``verdicts``: one list an agent, a score a round; None is silence."""
    record = Episode(Task(task, [], "1", "marl/x", lambda text: text), sample, list(AGENTS))
    for agent, scores in zip(AGENTS, verdicts, strict=True):
        for round, score in enumerate(scores, start=1):
            if score is not None:
                record.turns.append(
                    Turn(
                        agent,
                        round,
                        [],
                        "1",
                        policy=agent,
                        prompt_ids=[1, 2],
                        response_ids=[3] * round,
                        response_mask=[1] * round,
                        log_probs=[-1.0] * round,
                        verdict=Verdict(score, "1"),
                    )
                )
    record.verdict = Verdict(1.0, "1")
    return record


def batch_of(*episodes, **options):
    return joint_batch(episodes, AGENTS, dict.fromkeys(AGENTS, 1.0), **options)


def two_samples():
    return batch_of(episode("t", 0, [[1, 0], [0, 1]]), episode("t", 1, [[0, 0], [0, 0]]))


def build(name, credit="own", credit_options=None, **options):
    cls = LEARNERS.get(name)
    defaults = {"std": True, "gamma": 1.0, "estimator": None} if issubclass(cls, GRPO) else {}
    defaults |= {"gamma": 1.0, "lam": 1.0} if issubclass(cls, IPPO) else {}
    scheme = CREDITS.get(credit)
    return cls(  # what the configuration interpolates is given here
        cls.Config(name=name, **(defaults | options)), scheme(scheme.Config(name=credit, **(credit_options or {})))
    )


@pytest.mark.parametrize("credit", CREDITS.names())
@pytest.mark.parametrize("name", LEARNERS.names())
def test_every_learner_fills_advantages_and_updates_every_policy_once(name, credit):
    learner, batch = build(name, credit), two_samples()
    if learner.critic != "none":
        batch.values_ERA = torch.full(batch.mask_ERA.shape, 0.25)
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
        assert len(groups[policy].rows) == 1 and results[policy] == {"grad_norm": 1.0}


@pytest.mark.parametrize("credit", CREDITS.names())
def test_every_credit_scheme_is_zero_where_nobody_spoke(credit):
    batch = batch_of(episode("t", 0, [[1, None], [1, 1]]), episode("t", 1, [[1, 1], [None, 1]]))
    scheme = CREDITS.get(credit)
    got = scheme(scheme.Config(name=credit)).assign(batch)
    assert scheme.kind in ("reward", "return", "advantage")
    assert got.shape == batch.mask_ERA.shape and got[~batch.mask_ERA].abs().sum() == 0


def test_grpo_compares_the_samples_of_one_task_agent_and_round():
    batch = two_samples()
    build("grpo", gamma=0.0).assign_credit(batch)
    # rows: episode 0 round 1, round 2, episode 1 round 1, round 2; a round-2 answer has two tokens
    a, b = batch.rows["a"]["advantages"], batch.rows["b"]["advantages"]
    torch.testing.assert_close(a.values(), torch.tensor([0.7071, 0, 0, -0.7071, 0, 0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(b.values(), torch.tensor([0, 0.7071, 0.7071, 0, -0.7071, -0.7071]), atol=1e-4, rtol=0)


def test_grpo_adds_an_agents_later_rounds_to_a_reward_and_not_to_a_return():
    batch = two_samples()
    build("grpo", "own", std=False).assign_credit(batch)
    # agent b is right in round 2 alone: with credit of kind reward its round 1 is paid as well
    assert batch.rows["b"]["advantages"].values()[0] == 0.5
    build("grpo", "influence", {"gamma": 0.0}, std=False).assign_credit(batch)
    assert batch.rows["b"]["advantages"].values()[0] == 0.0


def test_grpo_grouping_by_task_alone_pools_agents_and_rounds():
    batch = two_samples()
    build("grpo", gamma=0.0, std=False, group_by=[GroupKey.task]).assign_credit(batch)
    assert batch.rows["a"]["advantages"].values()[0] == pytest.approx(1 - 2 / 8)


def test_offsets_between_rounds_and_agents_change_nothing_under_the_default_grouping():
    plain, shifted = two_samples(), two_samples()
    shifted.verdicts_ERA += torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    for batch in (plain, shifted):
        build("grpo", gamma=0.0).assign_credit(batch)
    for policy in AGENTS:
        torch.testing.assert_close(
            plain.rows[policy]["advantages"].values(), shifted.rows[policy]["advantages"].values(), atol=1e-3, rtol=0
        )


def test_grpo_reports_the_share_of_groups_that_teach_nothing():
    metrics = build("grpo", gamma=0.0).assign_credit(two_samples())
    assert metrics == {"agent/a/degenerate_groups": 0.5, "agent/b/degenerate_groups": 0.5}


@pytest.mark.parametrize(
    "of,expected",
    [(TeamOf.round, [[0.5, 0.5], [0.5, 0.5]]), (TeamOf.final, [[0.5, 0.5]] * 2), (TeamOf.answer, [[1.0, 1.0]] * 2)],
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


@pytest.mark.parametrize(
    "estimator,expected",
    [
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("rloo_vectorized", [1, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_estimators_of_verl_by_their_key(estimator, expected):
    """The oracles of RLOO and GRPO for R = [1, 0, 0, 0]."""
    batch = batch_of(*(episode("t", i, [[float(i == 0)], [None]]) for i in range(4)))
    build("grpo", estimator=estimator).assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == pytest.approx(expected, abs=1e-5)


def test_reinforce_plus_plus_is_whitened_and_blind_to_a_constant():
    batches = [
        batch_of(*(episode(f"t{i}", 0, [[r + shift], [None]]) for i, r in enumerate((1, 0, 0.5, 0))))
        for shift in (0, 10)
    ]
    for batch in batches:
        build("grpo", estimator="reinforce_plus_plus").assign_credit(batch)
    first, second = (batch.rows["a"]["advantages"].values() for batch in batches)
    assert float(first.mean()) == pytest.approx(0, abs=1e-6) and float(first.std()) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimator", sorted(set(GRPO.estimators()) - {"reinforce_plus_plus"}))
def test_a_group_of_one_teaches_nothing_whatever_the_estimator(estimator):
    """verl's own give the raw reward. Every estimator that is offered runs."""
    batch = batch_of(*(episode("t", i, [[float(i == 0)], [None]]) for i in range(3)), episode("u", 0, [[1.0], [None]]))
    build("grpo", estimator=estimator).assign_credit(batch)
    advantages = batch.rows["a"]["advantages"].values()
    assert advantages[3] == 0.0 and advantages[0] > 0


def test_a_later_round_counts_for_an_earlier_one_under_every_estimator():
    batch = two_samples()
    build("grpo", "own", estimator="rloo").assign_credit(batch)
    # agent b is right in round 2 of sample 0 alone: returns (1, 1) against (0, 0)
    assert batch.rows["b"]["advantages"].values().tolist() == [1, 1, 1, -1, -1, -1]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_divergence_in_the_reward_reaches_learners_without_a_critic(estimator):
    batch = batch_of(*(episode("t", i, [[1.0], [None]]) for i in range(2)))
    rows = batch.rows["a"]
    rows["kl_penalty"] = torch.nested.nested_tensor_from_jagged(
        torch.tensor([0.5, 0.0]), offsets=rows["responses"].offsets()
    )
    build("grpo", estimator=estimator, std=False).assign_credit(batch)
    low, high = rows["advantages"].values().tolist()
    assert low < 0 < high


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
