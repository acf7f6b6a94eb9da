"""GRPO's numbers, its groups, and verl's estimators behind its key."""

import itertools

import pytest
import torch

from marl.batch.build import joint_batch
from marl.learners.groups import GroupKey, WeightBy, group_keys, unequal_turns
from marl.learners.grpo import GRPO
from tests.builders import AGENTS, batch_of, branch, build_learner as build, episode, grid_of, like, two_samples


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
    shifted.scores_ERA += torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    for batch in (plain, shifted):
        build("grpo", gamma=0.0).assign_credit(batch)
    for policy in AGENTS:
        torch.testing.assert_close(
            plain.rows[policy]["advantages"].values(), shifted.rows[policy]["advantages"].values(), atol=1e-3, rtol=0
        )


def test_grpo_reports_the_share_of_degenerate_groups():
    metrics = build("grpo", gamma=0.0).assign_credit(two_samples())
    assert metrics == {
        "team/degenerate_groups": 0.5,
        "agent/a/degenerate_groups": 0.5,
        "agent/b/degenerate_groups": 0.5,
    }


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


@pytest.mark.parametrize("estimator", GRPO.estimators())
def test_a_single_trained_token_gives_zero(estimator):
    """verl's whitening raises for it, and would end the run."""
    batch = batch_of(episode("t", 0, [[1.0], [None]]))
    build("grpo", estimator=estimator).assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == [0.0]


@pytest.mark.parametrize("estimator", sorted(set(GRPO.estimators()) - {"reinforce_plus_plus"}))
def test_a_group_of_one_gives_zero_under_every_estimator(estimator):
    """verl's own give the raw reward. Every estimator that is offered runs."""
    batch = batch_of(*(episode("t", i, [[float(i == 0)], [None]]) for i in range(3)), episode("u", 0, [[1.0], [None]]))
    build("grpo", estimator=estimator).assign_credit(batch)
    advantages = batch.rows["a"]["advantages"].values()
    assert advantages[3] == 0.0 and advantages[0] > 0


@pytest.mark.parametrize(
    "name,options,expected",
    [
        ("grpo", {}, [1.5, -0.5]),
        ("grpo", {"estimator": "rloo"}, [1.0, -1 / 3]),
        ("grpo", {"estimator": "rloo_vectorized"}, [1.0, -1 / 3]),
        ("grpo", {"estimator": "opo"}, [0.9, -0.1]),
        ("at_grpo", {}, [1.5, -0.5]),
        ("magrpo", {}, [0.75, -0.25]),
    ],
)
def test_untrained_turns_still_enter_comparisons(name, options, expected):
    """Four samples, 1 0 0 0; the last two were cut off, and have no rows. opo weighs by length: 1 of 1 + 1 + 4 + 4."""
    records = [episode("t", i, [[float(i == 0)], [None]]) for i in range(4)]
    for record in records[2:]:
        (cut,) = record.turns
        cut.trained, cut.response_ids, cut.response_mask, cut.log_probs = False, [3] * 4, [1] * 4, [-1.0] * 4
    batch = batch_of(*records)
    build(name, "team" if name == "magrpo" else "own", **options).assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("estimator", GRPO.estimators())
def test_equal_rewards_give_exactly_zero_under_every_estimator(estimator):
    """The mean of seven times .7 is not .7 to the last bit, and verl's divide what is left by next to nothing."""
    batch = batch_of(*(episode("t", i, [[0.7], [i / 7]]) for i in range(7)))
    build("grpo", estimator=estimator).assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == [0.0] * 7
    assert batch.rows["b"]["advantages"].values().any()


def test_a_later_round_counts_for_an_earlier_one_under_every_estimator():
    batch = two_samples()
    build("grpo", "own", estimator="rloo").assign_credit(batch)
    # agent b is right in round 2 of sample 0 alone: returns (1, 1) against (0, 0)
    assert batch.rows["b"]["advantages"].values().tolist() == [1, 1, 1, -1, -1, -1]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_kl_in_the_reward_reaches_learners_without_a_critic(estimator):
    batch = batch_of(*(episode("t", i, [[1.0], [None]]) for i in range(2)))
    rows = batch.rows["a"]
    rows["kl_penalty"] = torch.nested.nested_tensor_from_jagged(
        torch.tensor([0.5, 0.0]), offsets=rows["responses"].offsets()
    )
    build("grpo", estimator=estimator, std=False).assign_credit(batch)
    low, high = rows["advantages"].values().tolist()
    assert low < 0 < high


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("grpo", [0, 0.5, -0.5]), ("rloo", [0, 0.75, -0.75]), ("reinforce_plus_plus", [0, 1, -1])],
)
def test_kl_in_the_reward_counts_once(estimator, expected):
    """Rewards 1, 1, 0 and penalties .5, 0, 0 make returns of .5, 1, 0: mean .5, deviation .5; counted twice 0, 1, 0."""
    batch = batch_of(*(episode("t", i, [[float(i < 2)], [None]]) for i in range(3)))
    rows = batch.rows["a"]
    rows["kl_penalty"] = torch.nested.nested_tensor_from_jagged(
        torch.tensor([0.5, 0.0, 0.0]), offsets=rows["responses"].offsets()
    )
    build("grpo", estimator=estimator, std=False).assign_credit(batch)
    assert rows["advantages"].values().tolist() == pytest.approx(expected, abs=1e-4)


BY_AGENT = [GroupKey.task, GroupKey.agent]
TURN, EPISODE = WeightBy.turn, WeightBy.episode


@pytest.mark.parametrize(
    ("weight_by", "std", "expected"),
    [
        (TURN, False, [0.25, 0.25, 0.25, -0.75]),
        (TURN, True, [0.5, 0.5, 0.5, -1.5]),
        (EPISODE, False, [0.5, 0.5, 0.5, -0.5]),
        (EPISODE, True, [0.7071, 0.7071, 0.7071, -0.7071]),
    ],
)
def test_a_group_weighs_turns_or_episodes(weight_by, std, expected):
    """Three turns that return 1 each in one sample, one that returns 0 in the other: a mean of 3/4, or of 1/2."""
    batch = batch_of(episode("t", 0, [[0, 0, 1], []]), episode("t", 1, [[0], []]))
    build("grpo", std=std, group_by=BY_AGENT, weight_by=weight_by).assign_credit(batch)
    assert grid_of(batch, "a")[batch.spoken_ERA].tolist() == pytest.approx(expected, abs=1e-4)


def test_alternatives_of_a_turn_count_by_themselves():
    """1, .5 and 0 at one turn of one episode: 1.5 over a deviation of .5, as without weights."""
    for weight_by in (TURN, EPISODE):
        batch = batch_of(branch(episode("t", 0, [[1.0], []]), "a", 1, [0.5, 0.0]))
        build("at_grpo", "own", group_by=BY_AGENT, weight_by=weight_by).assign_credit(batch)
        assert sorted(grid_of(batch, "a")[batch.spoken_ERA].tolist()) == pytest.approx([-1, 0, 1], abs=1e-4)


@pytest.mark.parametrize(("weight_by", "expected"), [(TURN, 0.0065104), (EPISODE, -0.0125 / 2)])
def test_an_agent_that_may_stop_is_not_pushed_to_talk_on(weight_by, expected):
    """It stops after each of at most three turns with probability 1/2, and a conversation of 1, 2 or 3 turns ends with .2, .9 or
    .15: the return falls by 1/4 (.2 - .15) = .0125 in the logit of going on. Over all pairs of samples, a baseline that an
    episode enters once gives half of that gradient, as a mean over two that includes the sample itself does; one over turns has
    the wrong sign."""
    ends, chances = [0.2, 0.9, 0.15], [0.5, 0.25, 0.25]
    pairs = list(itertools.product(range(3), repeat=2))
    records = [
        episode(str(pair), sample, [[*([0.0] * rounds), ends[rounds]], []])
        for pair in pairs
        for sample, rounds in enumerate(pair)
    ]
    batch = batch_of(*records)
    build("grpo", std=False, group_by=BY_AGENT, weight_by=weight_by).assign_credit(batch)
    score_ER = torch.tensor([[-0.5, 0, 0], [0.5, -0.5, 0], [0.5, 0.5, 0]])[
        [rounds for pair in pairs for rounds in pair]
    ]
    chance_E = torch.tensor([chances[a] * chances[b] for a, b in pairs for _ in range(2)])
    gradient = (chance_E[:, None] * score_ER * grid_of(batch, "a")[..., 0]).sum() / 2
    assert float(gradient) == pytest.approx(expected, abs=1e-6)


def test_verls_estimators_count_turns():
    build("grpo", weight_by=EPISODE).check({})
    with pytest.raises(
        ValueError, match=r"weight_by=episode: algorithm.adv_estimator=rloo is verl's.*adv_estimator=grpo"
    ):
        build("grpo", weight_by=EPISODE, estimator="rloo").check({})
    build("magrpo", "team", estimator="reinforce_plus_plus").check({})


def test_dapo_drops_degenerate_groups():
    """Groups [1, 1, 1, 1] and [1, 0, 0, 1]: the first has no part in the update, nor in the mean over its tokens."""
    scores = [1, 1, 1, 1, 1, 0, 0, 1]
    records = [episode(f"t{i // 4}", i % 4, [[score], [0]]) for i, score in enumerate(scores)]
    batch, kept = batch_of(*records), batch_of(*records)
    metrics = build("grpo", drop_equal=True).assign_credit(batch)
    build("grpo").assign_credit(kept)
    assert len(batch.rows["a"]) == 4 and len(kept.rows["a"]) == 8 and "b" not in batch.rows
    assert torch.equal(batch.rows["a"]["advantages"].values(), kept.rows["a"]["advantages"].values()[4:])
    assert batch.trained_ERA.sum() == 4 and metrics["agent/a/degenerate_groups"] == 0.5


def test_dapo_drops_turns_out_of_rows_that_they_share():
    """In a packed row the equal round is masked out, and its tokens do not count."""
    records = [episode("t", i, [[1, i], [None, None]]) for i in range(2)]
    for record in records:
        record.turns[1].prompt_ids = [1, 2, 3, 9]
    batch = batch_of(*records, pack_turns=True)
    assert len(batch.rows["a"]) == 2
    build("grpo", gamma=0.0, drop_equal=True).assign_credit(batch)
    assert [row.tolist() for row in batch.rows["a"]["response_mask"].unbind()] == [[0, 0, 1, 1]] * 2


def test_groups_without_a_trained_turn_do_not_count():
    """b's answers differ, and b is not trained; a's are all alike."""
    records = [episode("t", i, [[1.0], [float(i)]]) for i in range(2)]
    metrics = build("grpo").assign_credit(joint_batch(records, AGENTS, {"a": 1.0}))
    assert metrics == {"team/degenerate_groups": 1.0, "agent/a/degenerate_groups": 1.0}


def test_dapo_drops_turns_to_which_the_credit_gives_no_advantage():
    """Replay: another answer of a would have scored .5, not 1; b's own and the other score .5 both."""
    batch = batch_of(episode("t", 0, [[1.0], [0.5]]))
    metrics = build("grpo", "replay", drop_equal=True).assign_credit(batch)
    assert {name: rows["advantages"].values().tolist() for name, rows in batch.rows.items()} == {"a": [0.5]}
    assert metrics == {
        "team/degenerate_groups": 0.5,
        "agent/a/degenerate_groups": 0.0,
        "agent/b/degenerate_groups": 1.0,
    }


@pytest.mark.parametrize("without", ["untrained", "rejected"])
def test_a_turn_without_a_kl_penalty_costs_what_those_cost_that_it_is_compared_with(without):
    """As where it was cut off (controller.train_truncated=false), or a rollout correction rejected all of it."""
    records = [episode("t", i, [[0.0], [0.0]]) for i in range(4)] + [episode("u", i, [[i], [i]]) for i in range(2)]
    if without == "untrained":
        next(turn for turn in records[0].turns if turn.agent == "a").trained = False
    batch = batch_of(*records)
    for rows in batch.rows.values():
        rows["kl_penalty"] = torch.full_like(rows["rollout_log_probs"], 0.1)
    if without == "rejected":
        rows = batch.rows["a"]
        mask, start = rows["response_mask"].clone(), rows["responses"].offsets()
        mask.values()[: start[1]] = 0
        rows["response_mask"] = mask
    metrics = build("grpo", std=True).assign_credit(batch)
    assert metrics["agent/a/degenerate_groups"] == pytest.approx(3 / 5 if without == "untrained" else 4 / 6)
    advantages = [row.tolist() for row in batch.rows["a"]["advantages"].unbind()]
    assert not any(x for row in advantages[:-2] for x in row) and all(x for row in advantages[-2:] for x in row)


DIVIDE = {
    "grpo": {},
    "magrpo": {"std": True},
    "at_grpo": {},
    "reinforce_plus_plus": {"estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"estimator": "reinforce_plus_plus_baseline"},
    "grpo_vectorized": {"estimator": "grpo_vectorized"},
}
"""Learners and estimators that divide by a deviation."""


def advantages_of(name, scale, offset, **more):
    samples = [
        episode("t", i, [[scale * r + offset], [scale * s + offset]])
        for i, (r, s) in enumerate([(1, 0), (0.5, 1), (0, 0)])
    ]
    batch = batch_of(*samples)
    for rows in batch.rows.values():
        if more:
            rows["kl_penalty"] = like(rows, torch.tensor(more["kl"]))
    credit = "own" if name != "magrpo" else "team"
    learner = name if name in ("magrpo", "at_grpo") else "grpo"
    shares = build(learner, credit, **DIVIDE[name]).assign_credit(batch)
    return torch.cat([rows["advantages"].values() for rows in batch.rows.values()]), shares["team/degenerate_groups"]


@pytest.mark.parametrize("scale, offset", [(1e-8, 0.0), (0.1, 2e5), (3e9, 0.0)])
@pytest.mark.parametrize("name", DIVIDE)
def test_neither_scale_nor_offset_of_rewards_matters_where_a_deviation_divides(name, scale, offset):
    (expected, none), (got, share) = advantages_of(name, 1.0, 0.0), advantages_of(name, scale, offset)
    assert expected.abs().max() > 0.5 and none == share == 0
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", DIVIDE)
def test_equal_rewards_are_equal_whatever_rounds_them(name):
    """The log-probs of a KL penalty are of single precision; these policies are their references."""
    got, share = advantages_of(name, 0.0, 0.3, kl=[0.0, 1e-8, -1e-8])
    assert got.abs().max() == 0 and share == 1


def test_sums_that_cancel_out_are_equal_though_their_rest_is_not():
    """.15 less the mean of .15 and .15, or of .1 and .2, which is 2.8e-17 more."""
    batch = batch_of(episode("t", 0, [[0.15], [0.15]]), episode("t", 1, [[0.15], [0.1]]))
    returns_ERA = torch.tensor([[[0.0, 0.0]], [[-2.8e-17, 2.8e-17]]], dtype=torch.float64)
    assert not unequal_turns(batch, returns_ERA, group_keys(batch, [GroupKey.task, GroupKey.agent])).any()
