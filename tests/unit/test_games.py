"""Games by hand, and what can be learned in them by exact expectations over all joint actions."""

import asyncio
import itertools
import random
import re
from pathlib import Path

import pytest
import torch

from marl.batch.build import joint_batch
from marl.batch.joint import JointBatch
from marl.controller.scores import team_score
from marl.envs import GAMES, TABLES, Game, make_game, register_game
from marl.learners import CREDITS
from marl.learners.credit import returns_to_go
from marl.runners import RUNNERS, RecordedAnswers, scripted
from marl.types import Score, Task

TASK = Task("t", [{"role": "user", "content": "how many ?"}], "0", "marl/game", lambda text: None)
PRISONERS = [[[3, 3], [0, 4]], [[4, 0], [1, 1]]]
PENNIES = [[[1, -1], [-1, 1]], [[-1, 1], [1, -1]]]
COSTLY = {"name": "two_step", "payoffs": [[[-5, -5], [-5, -9]], [[-6, -4], [-3, -8]]]}
GENEROUS = {"name": "two_step", "payoffs": [[[7, 7], [7, 7]], [[5, 6], [6, 8]]]}


def joints(game, earlier=()):
    """All that the seats which act can do."""
    acting = game.actors(list(earlier))
    options = [range(game.num_actions) if seat in acting else [None] for seat in range(game.num_agents)]
    return list(itertools.product(*options))


def plays(game, earlier=()):
    """Every way through a game: its joint actions, and what each stage pays each seat."""
    if len(earlier) == game.num_stages:
        yield [], []
        return
    for joint in joints(game, earlier):
        for after, payoffs in plays(game, (*earlier, joint)):
            yield [joint, *after], [game.outcome(said(game, joint), list(earlier))[1], *payoffs]


def said(game, joint):
    return {seat: game.words[action] for seat, action in enumerate(joint) if action is not None}


def payoffs_of(game, joint, earlier=()):
    return game.outcome(said(game, joint), list(earlier))[1]


# games


@pytest.mark.parametrize(
    "table,joint,payoff",
    [
        ("xor", (0, 0), 0), ("xor", (0, 1), 1), ("xor", (1, 0), 1), ("xor", (1, 1), 0),
        ("happo", (0, 1), 2), ("happo", (1, 0), 2), ("happo", (1, 1), -1),
        ("climbing", (0, 0), 11), ("climbing", (1, 2), 6), ("climbing", (2, 1), 0), ("penalty", (0, 2), -100),
    ],
)  # fmt: skip
def test_common_payoffs_are_shared(table, joint, payoff):
    assert payoffs_of(make_game({"name": "matrix", "payoffs": table}, 2), joint) == [payoff, payoff]


def test_the_additive_table_is_a_sum_over_actions():
    assert all(TABLES["additive"][a][b] == 2 * a + b for a in (0, 1) for b in (0, 1))


def test_an_entry_may_hold_a_payoff_for_every_agent():
    game = make_game({"name": "matrix", "payoffs": PRISONERS}, 2)
    assert [payoffs_of(game, joint) for joint in joints(game)] == [[3, 3], [0, 4], [4, 0], [1, 1]] and game.bounds == (
        0,
        4,
    )


def test_a_table_has_an_axis_for_every_agent():
    table = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    game = make_game({"name": "matrix", "payoffs": table}, 3)
    assert [payoffs_of(game, joint)[0] for joint in joints(game)] == list(range(8))
    assert payoffs_of(make_game({"name": "matrix", "payoffs": [3, 5]}, 1), (1,)) == [5]


def test_the_two_step_game():
    game = make_game({"name": "two_step"}, 2)
    assert game.actors([]) == [0] and game.actors([(1, None)]) == [0, 1] and [game.turns(s) for s in (0, 1)] == [2, 1]
    totals = {tuple(done): [sum(p) for p in zip(*payoffs_S, strict=True)] for done, payoffs_S in plays(game)}
    assert {totals[(0, None), second] == [7, 7] for second in joints(game, [(0, None)])} == {True}
    assert [totals[(1, None), second][0] for second in ((0, 0), (0, 1), (1, 0), (1, 1))] == [0, 1, 1, 8]
    assert payoffs_of(game, (1, None)) == [0, 0]
    assert payoffs_of(make_game({"name": "two_step", "scale": 8}, 2), (1, 1), [(1, None)]) == [1, 1]


@pytest.mark.parametrize("num_agents", [2, 3, 4, 6])
def test_halves_rewards_two_joint_actions(num_agents):
    game = make_game({"name": "halves"}, num_agents)
    half = num_agents // 2
    rewarded = [joint for joint in joints(game) if payoffs_of(game, joint) == [1.0] * num_agents]
    assert rewarded == [(0,) * half + (1,) * (num_agents - half), (1,) * half + (0,) * (num_agents - half)]
    assert sum(payoffs_of(game, joint)[0] for joint in joints(game)) == 2


def test_collaborating_needs_enough_others():
    game = make_game({"name": "collaborate", "r_syn": 5, "r_ind": 2, "r_col": -1, "enough": 2}, 3)
    assert (
        payoffs_of(game, (0, 0, 1)) == [5, 5, 2]
        and payoffs_of(game, (0, 1, 1)) == [-1, 2, 2]
        and payoffs_of(game, (1, 1, 1)) == [2] * 3
    )
    alone = make_game({"name": "collaborate"}, 3)
    assert payoffs_of(alone, (0, 0, 1)) == [0, 0, 0.6] and payoffs_of(alone, (0, 0, 0)) == [1, 1, 1]


EVERY = [
    ({"name": "matrix", "payoffs": "climbing", "scale": 11}, 2),
    ({"name": "matrix", "payoffs": PRISONERS, "rounds": 2}, 2),
    ({"name": "two_step"}, 2),
    ({"name": "halves", "rounds": 2}, 3),
    ({"name": "collaborate", "rounds": 2, "enough": 2}, 3),
]


def test_every_game_is_among_those_whose_rules_are_tested():
    assert {options["name"] for options, _ in EVERY} == set(GAMES.names())


@pytest.mark.parametrize("options,num_agents", EVERY)
def test_rules_of_every_game(options, num_agents):
    game = make_game(options, num_agents)
    paid, acted = [], set()
    for done, payoffs_S in plays(game):
        assert len(done) == game.num_stages
        for joint, payoffs in zip(done, payoffs_S, strict=True):
            assert len(payoffs) == len(joint) == num_agents
            assert all(payoff == 0 for payoff, action in zip(payoffs, joint, strict=True) if action is None)
            paid += payoffs
        acted.add(tuple(sum(joint[seat] is not None for joint in done) for seat in range(num_agents)))
    assert (min(paid), max(paid)) == pytest.approx([bound / game.config.scale for bound in game.bounds])
    assert tuple(map(max, zip(*acted, strict=True))) == tuple(map(game.turns, range(num_agents)))


@pytest.mark.parametrize(
    "text,action",
    [
        ("0", 0),
        ("1", 1),
        (" 1 .", 1),
        ("10", None),
        ("", None),
        ("two", None),
        ("not 1 but 0", 0),
        ("#### 1", 1),
        ("-1", None),
        ("1.5", None),
    ],
)
def test_a_text_names_the_last_action_in_it(text, action):
    assert make_game({"name": "halves"}, 2).action(text) == action


def test_actions_have_words():
    game = make_game({"name": "collaborate", "actions": ["act", "act alone"]}, 2)
    assert game.action("I act alone.") == 1 and game.action("We act.") == 0 and game.action("react") is None
    assert game.action("I ACT ALONE") == 1
    assert make_game({"name": "collaborate", "actions": ["act", "Act"]}, 2).action("Act") == 1


def test_naming_no_action_ends_the_game_with_the_invalid_payoff_for_all_remaining_stages():
    game = make_game({"name": "matrix", "payoffs": "happo", "rounds": 3, "scale": 2}, 2)
    assert game.outcome({0: "0", 1: "well"}, []) == ((0, None), [-1.5, -1.5])
    assert game.outcome({0: "?", 1: "?"}, [(0, 0), (0, 0)]) == ((None, None), [-0.5, -0.5])
    assert make_game({"name": "halves", "invalid": -7}, 2).outcome({0: "?", 1: "1"}, [])[1] == [-7, -7]
    assert make_game({"name": "two_step", "invalid": -7}, 2).outcome({0: "?"}, [])[1] == [-14, 0], (
        "invalid is for those who act"
    )
    assert make_game(COSTLY, 2).outcome({0: "?"}, [])[1] == [-18, -18], "an idle seat gets the lowest payoff"


@pytest.mark.parametrize(
    "options,num_agents,said",
    [
        ({}, 2, "no name; expected one of collaborate"),
        ({"name": "halve"}, 2, "Did you mean 'halves'"),
        ({"name": "halves", "round": 2}, 2, r"runner\.game\.round: game 'halves' has no such key.*Did you mean 'rounds'"),
        ({"name": "halves", "rounds": "two"}, 2, r"runner\.game\.rounds=two: .*Integer"),
        ({"name": "halves", "rounds": 0}, 2, r"runner\.game\.rounds=0: expected at least 1"),
        ({"name": "halves", "invalid": 0.5}, 2, r"invalid=0\.5: expected at most 0, the lowest payoff"),
        ({"name": "matrix", "payoffs": "happo", "invalid": 0}, 2, r"invalid=0: expected at most -1, the lowest payoff"),
        ({"name": "halves", "scale": 0}, 2, r"runner\.game\.scale=0.*above 0"),
        ({"name": "halves"}, 1, "halves is played by at least 2 agents, and agents names 1"),
        ({"name": "two_step"}, 3, "two_step is played by 2 agents, and agents names 3"),
        ({"name": "halves", "actions": ["a"]}, 2, r"actions=\['a'\]: expected 2 different words"),
        ({"name": "halves", "actions": ["a", "a"]}, 2, "expected 2 different words"),
        ({"name": "matrix", "payoffs": "xr"}, 2, "Did you mean 'xor'"),
        ({"name": "matrix", "payoffs": [[1, 2], [3]]}, 2, r"holds \[3\] where a list of 2 was expected"),
        ({"name": "matrix", "payoffs": [[1, 2], [3, 4]]}, 3, "holds 1 where a list of 2 was expected"),
        ({"name": "matrix", "payoffs": [[1, 2], [3, [4]]]}, 2, r"holds \[4\] where a number, or a list of 2 was expected"),
        ({"name": "matrix", "payoffs": [[1, 2], [3, "x"]]}, 2, "holds x where a number"),
        ({"name": "collaborate", "r_ind": 2}, 2, "expected r_col < r_ind < r_syn"),
        ({"name": "collaborate", "enough": 3}, 2, "enough=3: expected 2 to 2"),
    ],
)  # fmt: skip
def test_invalid_games_are_errors(options, num_agents, said):
    with pytest.raises(ValueError, match=said):
        make_game(options, num_agents)


def test_the_game_of_the_document_is_one(monkeypatch):
    monkeypatch.setattr(GAMES, "_entries", dict(GAMES._entries))
    blocks = re.findall(r"```python\n(.*?)```", Path("docs/runners.md").read_text(), re.DOTALL)
    (source,) = [block for block in blocks if "register_game" in block]
    exec(source, {"__name__": "own"})
    game = make_game({"name": "volunteer"}, 3)
    assert payoffs_of(game, (0, 0, 1)) == [1, 1, 0.5] and payoffs_of(game, (0, 0, 0)) == [0, 0, 0]
    assert equilibria(game) == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]


# what can be learned: exact expectations


def expected(game):
    """The mean payoff over agents of a game of one stage, as a function of each agent's probability of the action 0."""
    actions_EA = torch.tensor(joints(game))
    payoffs_E = torch.tensor([payoffs_of(game, joint) for joint in joints(game)], dtype=torch.float64).mean(-1)
    return lambda p_A: (torch.where(actions_EA == 0, p_A, 1 - p_A).prod(-1) * payoffs_E).sum()


def climb(value, start, steps=400, rate=1.0):
    """Gradient ascent on the logits of these probabilities, with exact gradients; the probabilities it ends with."""
    logits = torch.tensor(start, dtype=torch.float64).logit().requires_grad_()
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(value(logits.sigmoid()), logits)
        logits = (logits + rate * gradient).detach().requires_grad_()
    return logits.sigmoid().detach()


@pytest.mark.parametrize("num_agents,limit", [(2, 0.5), (4, 0.125), (6, 0.03125)])
def test_agents_that_share_a_policy_reach_two_over_two_to_the_n(num_agents, limit):
    """HATRPO (arXiv:2109.11251), Proposition 1."""
    value = expected(make_game({"name": "halves"}, num_agents))

    def shared(p):
        return value(p.expand(num_agents))

    grid = [float(shared(torch.tensor([k / 100], dtype=torch.float64))) for k in range(101)]
    assert max(grid) == pytest.approx(limit) and grid.index(max(grid)) == 50
    for start in (0.3, 0.8):
        ended = climb(shared, [start], steps=200, rate=0.5 / limit)
        assert float(shared(ended)) == pytest.approx(limit, abs=1e-6) and ended.item() == pytest.approx(0.5, abs=1e-2)


@pytest.mark.parametrize("num_agents", [2, 4, 6])
def test_agents_with_policies_of_their_own_reach_the_optimum(num_agents):
    value, rng = expected(make_game({"name": "halves"}, num_agents)), random.Random(0)
    start = [0.5 + rng.uniform(-0.2, 0.2) for _ in range(num_agents)]
    ended = climb(value, start, rate=16.0)
    assert float(value(ended)) > 0.99
    assert set(ended.round().tolist()[: num_agents // 2]) != set(ended.round().tolist()[num_agents // 2 :])


def equilibria(game):
    """Joint actions from which nobody gains by doing something else alone."""

    def gains(joint, seat):
        others = [(*joint[:seat], action, *joint[seat + 1 :]) for action in range(game.num_actions)]
        return max(payoffs_of(game, other)[seat] for other in others) > payoffs_of(game, joint)[seat]

    return [joint for joint in joints(game) if not any(gains(joint, seat) for seat in range(game.num_agents))]


@pytest.mark.parametrize("num_agents", [2, 3, 4])
def test_all_together_and_all_alone_are_the_equilibria_of_collaborating(num_agents):
    game = make_game({"name": "collaborate"}, num_agents)
    assert equilibria(game) == [(0,) * num_agents, (1,) * num_agents]
    assert payoffs_of(game, (0,) * num_agents)[0] > payoffs_of(game, (1,) * num_agents)[0]


def test_with_two_of_three_enough_nobody_is_left_out_in_an_equilibrium():
    game = make_game({"name": "collaborate", "enough": 2}, 3)
    assert equilibria(game) == [(0, 0, 0), (1, 1, 1)]


def test_both_actions_have_equal_value_in_the_mixed_equilibrium_of_collaborating():
    game = make_game({"name": "collaborate"}, 2)
    values = [0.6 * payoffs_of(game, (own, 0))[0] + 0.4 * payoffs_of(game, (own, 1))[0] for own in (0, 1)]
    assert values[0] == pytest.approx(values[1]), "with a peer that collaborates in r_ind / r_syn of the cases"


def test_prisoners_end_where_both_lose():
    assert equilibria(make_game({"name": "matrix", "payoffs": PRISONERS}, 2)) == [(1, 1)]
    assert equilibria(make_game({"name": "matrix", "payoffs": "happo"}, 2)) == [(0, 1), (1, 0)]


def credited(game, credit):
    """Every play of a game, and each turn's credit by one of the product's schemes, later rounds added up where they are
    to be: the actions [E, R, A] and the returns [E, R, A]."""
    done, payoffs_S = zip(*plays(game), strict=True)
    mask_ERA = torch.tensor([[[action is not None for action in joint] for joint in play] for play in done])
    scores_ERA = torch.tensor(payoffs_S, dtype=torch.float64)
    names = [str(seat) for seat in range(game.num_agents)]
    totals_E = scores_ERA.sum(1).mean(-1)
    failed_E = torch.zeros(len(done), dtype=torch.bool)
    grids = mask_ERA, scores_ERA, totals_E, mask_ERA, mask_ERA, mask_ERA.long(), failed_E
    batch = JointBatch(names, [""] * len(done), *grids, rows={})
    scheme = CREDITS.get(credit)
    made = scheme(scheme.Config(credit))
    returns_ERA = made.of(batch)
    if made.kind == "reward":
        returns_ERA = returns_to_go(returns_ERA, mask_ERA, 1.0)
    return torch.tensor(done), returns_ERA


def trained(game, credit, start, frozen=(), steps=600):
    """Exact policy gradients of each agent's own credit, all agents but the frozen ones at the same time; one probability
    an agent, of the action 0 at every stage."""
    actions_ERA, returns_ERA = credited(game, credit)
    logits_A = torch.tensor(start, dtype=torch.float64).logit()
    learning_A = torch.tensor([seat not in frozen for seat in range(game.num_agents)])
    for _ in range(steps):
        logits_A = logits_A.detach().requires_grad_()
        p_A = logits_A.sigmoid()
        log_ERA = torch.where(actions_ERA == 0, p_A, 1 - p_A).log()
        chance_E = log_ERA.sum((1, 2)).exp().detach()
        (gradient_A,) = torch.autograd.grad((chance_E[:, None, None] * returns_ERA * log_ERA).sum(), logits_A)
        logits_A = logits_A + learning_A * gradient_A
    return logits_A.detach().sigmoid()


TOGETHER, ALONE = pytest.approx(1.0, abs=0.03), pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("peer", [0.01, 0.3, 0.5])
def test_trained_against_frozen_peers_an_agent_learns_to_act_alone(rounds, peer):
    """The best answer to who collaborates in less than r_ind / r_syn = .6 of the cases, whatever it begins with."""
    game = make_game({"name": "collaborate", "rounds": rounds}, 2)
    for start in (0.3, 0.9):
        assert float(trained(game, "own", [start, peer], frozen=[1])[0]) == ALONE
    assert float(trained(game, "own", [0.3, 0.9], frozen=[1])[0]) == TOGETHER, "it is the peer that makes it so"


def test_trained_together_for_the_team_they_learn_to_collaborate():
    """With r_ind = .6 the team's reward draws together whoever begins above .3, their own one whoever begins above .6."""
    game = make_game({"name": "collaborate"}, 2)
    assert trained(game, "team", [0.5, 0.5]).tolist() == [TOGETHER] * 2
    assert trained(game, "own", [0.5, 0.5]).tolist() == [ALONE] * 2
    assert trained(game, "own", [0.65, 0.65]).tolist() == [TOGETHER] * 2
    assert trained(game, "team", [0.28, 0.28]).tolist() == [ALONE] * 2


def test_influence_ends_where_ones_own_reward_ends_in_a_repeated_game():
    """Later actions of others do not depend on earlier ones, as long as policies do not look back."""
    game = make_game({"name": "collaborate", "rounds": 2}, 2)
    for start, end in ((0.5, ALONE), (0.65, TOGETHER)):
        assert trained(game, "influence", [start, start]).tolist() == [end] * 2
        assert trained(game, "own", [start, start]).tolist() == [end] * 2
    assert trained(game, "team", [0.5, 0.5]).tolist() == [TOGETHER] * 2


# the runner


def play(script, agents=("alice", "carol"), **game):
    runner = build(**game)
    runner.check(agents)
    return runner, asyncio.run(scripted.play(runner, TASK, list(agents), scripted.scripted(script)))


def build(**game):
    cls = RUNNERS.get("game")
    brief = {"peer_template": "{agent} said {text}", "separator": " ", "instruction": "how many ?"}
    return cls(cls.Config("game", game=game, **brief))


def contents(turn):
    return [message["content"] for message in turn.observation]


def test_payoffs_are_the_scores_on_turns_and_the_actions_their_answers():
    _, record = play(lambda agent, round, seen: {"alice": "1", "carol": "0"}[agent], name="matrix", payoffs=PRISONERS)
    assert [turn.score for turn in record.turns] == [Score(4.0, "1"), Score(0.0, "0")]
    assert record.answer == "1 0" and team_score(record) == record.runner_score == Score(2.0, "1 0")
    assert [contents(turn) for turn in record.turns] == [["how many ?"]] * 2


def test_a_repeated_game_shows_what_the_others_did_and_adds_up():
    said = {("alice", 1): "0", ("carol", 1): "1", ("alice", 2): "1", ("carol", 2): "1"}
    _, record = play(lambda agent, round, seen: said[agent, round], name="matrix", payoffs="happo", rounds=2)
    assert contents(record.trajectory("alice")[1]) == ["how many ?", "0", "carol said 1 how many ?"]
    assert contents(record.trajectory("carol")[1]) == ["how many ?", "1", "alice said 0 how many ?"]
    assert [(turn.round, turn.scored.value) for turn in record.turns] == [(1, 2), (1, 2), (2, -1), (2, -1)]
    assert record.runner_score == Score(1.0, "1 1")


def test_the_second_agent_of_the_two_step_game_is_told_what_the_first_one_chose():
    runner, record = play(lambda agent, round, seen: "1", name="two_step")
    assert [(turn.agent, turn.round) for turn in record.turns] == [("alice", 1), ("alice", 2), ("carol", 2)]
    assert contents(record.trajectory("alice")[1]) == ["how many ?", "1", "how many ?"]
    assert contents(record.trajectory("carol")[0]) == ["how many ?\n\nalice said 1 how many ?"]
    assert [turn.scored.value for turn in record.turns] == [0, 8, 8] and record.runner_score == Score(8.0, "1 1")
    assert runner.most_turns(["alice", "carol"]) == {"alice": 2, "carol": 1} and runner.last_round(["a", "b"]) == 2


def test_a_game_is_told_of_earlier_stages_in_their_order(monkeypatch):
    """A game of one's own, which pays at the end for saying what was said first."""
    monkeypatch.setattr(GAMES, "_entries", dict(GAMES._entries))

    @register_game("echo")
    class Echo(Game):
        num_stages, bounds = 3, (0.0, 1.0)

        def payoffs(self, joint, earlier):
            return [float(len(earlier) == 2 and action == earlier[0][seat]) for seat, action in enumerate(joint)]

    said = {"alice": "011", "carol": "100"}
    _, record = play(lambda agent, round, seen: said[agent][round - 1], name="echo")
    assert [turn.scored.value for turn in record.turns] == [0] * 6
    said |= {"alice": "010", "carol": "101"}
    _, record = play(lambda agent, round, seen: said[agent][round - 1], name="echo")
    assert [turn.scored.value for turn in record.turns] == [0, 0, 0, 0, 1, 1] and record.runner_score == Score(
        1.0, "0 1"
    )


def test_turns_without_an_action_are_counted():
    _, record = play(
        lambda agent, round, seen: "well" if (agent, round) == ("carol", 2) else "0",
        name="matrix", payoffs="happo", rounds=3,
    )  # fmt: skip
    assert record.counts == {"no_action": 1} and record.num_rounds == 2
    assert [turn.score for turn in record.turns[2:]] == [Score(-2.0, "0"), Score(-2.0, None)]
    assert record.answer is None and record.runner_score == Score(-2.0, None)


def ultimatum(monkeypatch):
    """Alice proposes to keep all but one of ten; carol accepts, or nobody gets anything."""
    monkeypatch.setattr(GAMES, "_entries", dict(GAMES._entries))

    @register_game("ultimatum")
    class Ultimatum(Game):
        num_stages, bounds = 2, (0.0, 9.0)

        def actors(self, earlier):
            return [len(earlier)]

        def turns(self, seat):
            return 1

        def payoffs(self, joint, earlier):
            return [9.0, 1.0] if earlier and joint[1] == 1 else [0.0, 0.0]


def outcomes(records, credit):
    """What each of the agents is credited with in each episode, over all its turns."""
    batch = joint_batch(records, ["alice", "carol"], {})
    return CREDITS.get(credit)(CREDITS.get(credit).Config(credit)).of(batch).sum(1).tolist()


def scored(records):
    for record in records:
        record.score = team_score(record)
    return records


def test_an_idle_seat_is_paid_at_its_last_turn(monkeypatch):
    ultimatum(monkeypatch)
    _, record = play(lambda agent, round, seen: "1", name="ultimatum", actions=["no", "1"])
    assert [(turn.agent, turn.round, turn.score) for turn in record.turns] == [
        ("alice", 1, Score(9.0, "1")), ("carol", 2, Score(1.0, "1"))
    ]  # fmt: skip
    assert outcomes(scored([record]), "own") == [[9, 1]] and outcomes([record], "zero_sum") == [[8, -8]]
    assert record.runner_score == Score(5.0, "1")


def test_a_payoff_before_its_seats_first_turn_comes_with_it(monkeypatch):
    """Paid 1 and 2 while alice alone acts, 3 and 5 while carol does: alice has 4, carol 7."""
    ultimatum(monkeypatch)
    monkeypatch.setattr(GAMES.get("ultimatum"), "payoffs", lambda self, joint, earlier: [3, 5] if earlier else [1, 2])
    _, record = play(lambda agent, round, seen: "1", name="ultimatum")
    assert [turn.scored.value for turn in record.turns] == [4, 7] and record.runner_score == Score(5.5, "1")


def test_a_game_that_is_over_early_has_the_last_joint_action_for_its_answer(monkeypatch):
    ultimatum(monkeypatch)
    actors = lambda self, earlier: [] if earlier and earlier[0][0] == 0 else [len(earlier)]  # noqa: E731
    monkeypatch.setattr(GAMES.get("ultimatum"), "actors", actors)
    _, record = play(lambda agent, round, seen: "walk away", name="ultimatum", actions=["walk away", "offer"])
    assert record.answer == "walk away" and record.runner_score == Score(0.0, "walk away")
    assert [turn.agent for turn in record.turns] == ["alice"]


@pytest.mark.parametrize(
    "said,expected",
    [("00", [2, -2]), ("01", [-2, 2]), ("0?", [2, -2]), ("?1", [-2, 2]), ("??", [-2, -2])],
)
def test_who_names_no_action_loses_a_zero_sum_game(said, expected):
    _, record = play(lambda agent, *_: said[agent == "carol"], name="matrix", payoffs=PENNIES)
    assert outcomes(scored([record]), "zero_sum") == [expected]


def test_a_zero_sum_reward_adds_up_the_stages_of_a_game():
    """Alice wins the first stage; she names nothing in the second of three, which costs her it and the third."""
    _, record = play(lambda agent, round, seen: "0", name="matrix", payoffs=PENNIES, rounds=3)
    assert outcomes(scored([record]), "zero_sum") == [[6, -6]]
    said = {("alice", 2): "well"}
    _, record = play(lambda agent, round, seen: said.get((agent, round), "0"), name="matrix", payoffs=PENNIES, rounds=3)
    assert outcomes(scored([record]), "zero_sum") == [[2 - 4, 4 - 2]]


def test_three_seats_share_what_a_silent_one_loses():
    """Bounds -1 and 2; totals 3, 0 and 0 lead by 3, -1.5 and -1.5."""
    game = make_game({"name": "matrix", "payoffs": [[[-1, 0], [0, 0]], [[0, 0], [2, 0]]], "scale": 2}, 3)
    assert game.leads([3, 0, 0], [], 1) == [3, -1.5, -1.5]
    assert game.leads([0, 0, 0], [0], 0) == [-1.5, 0.75, 0.75]
    assert game.leads([0, 0, 0], [0, 1], 0) == [-1.5, -1.5, 3] and game.leads([0, 0, 0], [0, 1, 2], 0) == [-1.5] * 3


@pytest.mark.parametrize(
    "options",
    [{"name": "matrix", "payoffs": PENNIES}, {"name": "matrix", "payoffs": PRISONERS, "rounds": 2}, COSTLY, GENEROUS,
     {"name": "ultimatum"}, {"name": "collaborate", "scale": 2}, {"name": "matrix", "payoffs": "climbing", "scale": 11}],
    ids=str,
)  # fmt: skip
def test_naming_no_action_is_no_better_than_the_worst_legal_play(monkeypatch, options):
    """Compared with the legal plays that begin with the same stages."""
    ultimatum(monkeypatch)
    game = make_game(options, 2)
    records = []
    places = [(agent, stage) for agent in ("alice", "carol") for stage in range(1, game.num_stages + 1)]
    for said in itertools.product([*game.words, "?"], repeat=len(places)):
        script = dict(zip(places, said, strict=True))
        _, record = play(lambda agent, round, seen, script=script: script[agent, round], **options)
        records.append(record)
    scored(records)
    got = {id(record): [] for record in records}
    for credit in ("own", "zero_sum"):
        for record, outcome in zip(records, outcomes(records, credit), strict=True):
            got[id(record)].append(outcome)

    def before(record, stage):
        return [(turn.agent, turn.text) for turn in record.turns if turn.round < stage]

    silent_ones = [record for record in records if record.answer is None]
    assert 0 < len(silent_ones) < len(records)
    for record in silent_ones:
        stage, silent = record.num_rounds, {turn.agent for turn in record.turns if turn.scored.answer is None}
        same = [other for other in records if other.answer and before(other, stage) == before(record, stage)]
        assert record.runner_score.value <= min(other.runner_score.value for other in same)
        for seat in [("alice", "carol").index(agent) for agent in silent]:
            own, lead = ([got[id(other)][kind][seat] for other in same] for kind in (0, 1))
            assert got[id(record)][0][seat] <= min(own) and got[id(record)][1][seat] <= min(lead) + 1e-6
        if len(silent) == 1 and len({turn.agent for turn in record.turns}) == 2:
            assert sum(got[id(record)][1]) == pytest.approx(0, abs=1e-5)


def test_a_recorded_game_is_played_again_and_goes_on_with_another_action():
    runner, record = play(lambda agent, round, seen: "1", name="two_step")
    again = asyncio.run(scripted.play(runner, TASK, record.agents, RecordedAnswers(record)))
    assert again == record
    other = RecordedAnswers(
        record, scripted.scripted(lambda agent, round, seen: "1"), {("alice", 1, 0): record.turns[1]}
    )
    other.instead["alice", 1, 0] = type(record.turns[0])("alice", 1, record.turns[0].observation, "0")
    changed = asyncio.run(scripted.play(runner, TASK, record.agents, other))
    assert changed.runner_score == Score(7.0, "1 1")


@pytest.mark.parametrize(
    "game,said", [({"name": "two_step"}, "played by 2 agents"), ({"name": "x"}, "unknown game 'x'")]
)
def test_the_runner_refuses_a_team_that_cannot_play(game, said):
    with pytest.raises(ValueError, match=said):
        build(**game).check(["a", "b", "c"])
