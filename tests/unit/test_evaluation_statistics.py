"""Numbers of an evaluation, against literals by hand and enumerations."""

import itertools
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from marl.config.errors import ConfigError
from marl.evaluation import evaluate, statistics
from marl.evaluation.statistics import compared, ks_up_to, majority_at_k, pass_at_k, sign_flip_p
from marl.types import Ballot, Episode, Rule, Score, Task, Turn, Vote
from marl.utils.intervals import paired, wilson


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    assert pass_at_k(4, 1, 2) == 0.5 and pass_at_k(5, 0, 3) == 0 and pass_at_k(3, 2, 2) == 1
    for n, c, k in ((6, 2, 3), (7, 3, 1), (5, 4, 5)):
        right = [i < c for i in range(n)]
        subsets = list(itertools.combinations(right, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_majority_at_k_by_hand():
    answers, right = ["4", "4", "5", None], [True, True, False, False]
    assert majority_at_k(answers, right, 1) == 0.5
    # pairs: 44 -> 1; 45 twice -> a half each; 4- twice -> 1 each; 5- -> 0
    assert majority_at_k(answers, right, 2) == pytest.approx((1 + 0.5 * 2 + 2) / 6)
    assert majority_at_k(answers, right, 4) == 1.0
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    many = majority_at_k(["4"] * 12 + ["5"] * 12, [True] * 12 + [False] * 12, 12)
    assert many == pytest.approx(0.5, abs=0.05), "drawn, where there are millions of subsets"


def test_ks():
    assert [ks_up_to(n) for n in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]


def test_wilsons_interval_by_hand():
    """Of 0 of 20 it ends at z^2 / (20 + z^2); of 10 of 20 it is the quadratic's two roots (Brown, Cai and DasGupta, 2001)."""
    assert wilson(0.0, 20) == pytest.approx((0.0, 3.8415 / 23.8415), abs=1e-4)
    assert wilson(0.5, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)
    assert wilson(1.0, 20) == pytest.approx((1 - 3.8415 / 23.8415, 1.0), abs=1e-4), (
        "a perfect score says little of 20 tasks"
    )


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("tasks", [11, 20, 50, 200])
def test_coverage_of_an_accuracy(tasks, share):
    """Exactly, over all numbers of right answers: a percentile bootstrap covers .615 of 20 tasks at .05."""
    chances = [math.comb(tasks, c) * share**c * (1 - share) ** (tasks - c) for c in range(tasks + 1)]
    covered = [low <= share <= high for low, high in (wilson(c / tasks, tasks) for c in range(tasks + 1))]
    assert sum(p for p, inside in zip(chances, covered, strict=True) if inside) > 0.89


@pytest.mark.parametrize("share, alike", [(0.05, 1.0), (0.5, 0.3), (0.5, 5.0), (0.9, 1.0)])
@pytest.mark.parametrize("tasks, samples", [(11, 4), (20, 16)])
def test_coverage_where_tasks_have_several_samples(tasks, samples, share, alike):
    """Some tasks are easy and some hard: their shares are of a beta distribution."""
    rng = np.random.default_rng(0)
    easy = rng.beta(share * alike, (1 - share) * alike, size=(2000, tasks))
    means = (rng.binomial(samples, easy) / samples).mean(axis=1)
    covered = [low <= share <= high for low, high in (wilson(mean, tasks) for mean in means)]
    assert sum(covered) / len(covered) > 0.9


@pytest.mark.parametrize("better, worse", [(0.05, 0.0), (0.1, 0.1), (0.3, 0.1), (0.02, 0.02)])
@pytest.mark.parametrize("tasks", [11, 20, 50])
def test_coverage_of_a_difference(tasks, better, worse):
    draws = np.random.default_rng(0).random((2000, tasks))
    differences = (draws < better) * 1.0 - ((draws >= better) & (draws < better + worse)) * 1.0
    covered = [low <= better - worse <= high for low, high in map(paired, differences.tolist())]
    assert sum(covered) / len(covered) > 0.93


def test_teams_that_are_right_on_the_same_tasks_may_differ_on_others():
    """Bonett and Price's for 0 and 0 of 20: 0 -+ z sqrt(2 / 22 / 22)."""
    assert paired([0.0] * 20) == pytest.approx((-0.126, 0.126), abs=1e-3) and paired([1.0]).high == 1.0


def test_the_test_is_mcnemars_for_single_samples():
    for better, worse in ((5, 1), (9, 2), (3, 3), (2, 7)):
        n, more = better + worse, max(better, worse)
        exact = min(1.0, 2 * sum(math.comb(n, i) for i in range(more, n + 1)) / 2**n)
        assert sign_flip_p([1.0] * better + [-1.0] * worse + [0.0] * 7) == pytest.approx(exact, abs=1e-12)
    assert sign_flip_p([0.0, 0.0]) == 1.0
    drawn, exact = sign_flip_p([1.0] * 30 + [-1.0] * 10), 2 * sum(math.comb(40, i) for i in range(30, 41)) / 2**40
    assert drawn == pytest.approx(exact, abs=0.002)


def test_a_comparison_is_paired():
    a, b = [1.0, 1.0, 0.0, 1.0] * 25, [1.0, 0.0, 0.0, 1.0] * 25
    result = compared(a, b)
    assert result["difference"] == 0.25 and result["p"] < 1e-3 and result["interval"].low > 0.15
    assert compared(b, a)["difference"] == -0.25 and compared(a, a)["p"] == 1.0


def turn(agent, round, answer, truth, tokens=2):
    text = f"#### {answer}"
    return Turn(
        agent, round, [], text, prompt_ids=[1] * 5, response_ids=[2] * tokens, response_mask=[1] * tokens,
        log_probs=[-0.5] * tokens, score=Score(float(answer == truth), answer),
    )  # fmt: skip


def episode(task, sample, first, last, failure=None):
    """Two rounds of a, b and c, who vote in the second; the truth is 4."""
    known = Task(task, [], "4", "x", lambda text: text.removeprefix("#### "))
    record = Episode(known, sample, ["a", "b", "c"], failure=failure)
    for round, answers in ((1, first), (2, last)):
        record.turns += [turn(agent, round, answer, "4") for agent, answer in zip("abc", answers, strict=True)]
    record.answer = max(sorted(set(last)), key=last.count)
    record.score = Score(0.0 if failure else float(record.answer == "4"), record.answer)
    record.ballot = Ballot(Rule.heaviest, tuple(Vote(a, 2, answer) for a, answer in zip("abc", last, strict=True)))
    return record


def four_episodes():
    return [
        episode("t0", 0, "444", "445"),
        episode("t0", 1, "455", "555"),
        episode("t1", 0, "555", "445"),
        episode("t1", 1, "444", "444", failure="overflow"),
    ]


def test_every_number_of_four_episodes_by_hand():
    found = statistics.numbers_of(four_episodes(), seconds=2.0, measures=statistics.MEASURES)
    assert found["accuracy"] == 0.5 and found["failed"] == 1 and found["interval"] == wilson(0.5, 2)
    assert found["pass@k"] == {"1": 0.5, "2": 1.0} and found["majority@k"] == {"1": 0.5, "2": pytest.approx(0.75)}
    # round 1: 3 + 1 + 0 right of 12 answers, and the failed episode's three were right, as far as it went
    assert found["by_round"] == {"1": pytest.approx(7 / 12), "2": pytest.approx(7 / 12)}
    assert found["by_agent"]["c"]["final"] == 0 and found["by_agent"]["a"]["final"] == 0.5
    assert found["by_agent"]["a"]["by_round"] == {"1": 0.75, "2": 0.75}
    # without a: 45 is a tie, 55 wrong, 45 a tie, failed; without c: 44 and 44 are right
    assert found["vote_without"] == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert found["similarity"] == 0.5 and found["perplexity"]["a"] == pytest.approx(math.exp(0.5))
    assert found["cost"]["sampled_tokens"] == 48 and found["cost"]["read_tokens"] == 120
    assert found["cost"]["sampled_tokens_per_second"] == 24 and found["cost"]["sampled_tokens_per_episode"] == 12


def test_a_failed_episode_is_wrong_whatever_it_said():
    good, failed = episode("t", 0, "444", "444"), episode("t", 1, "444", "444", failure="error")
    assert statistics.accuracy_T([good, failed]) == [0.5]
    assert statistics.majority_of([failed], 1) == 0 and statistics.similarity(failed) == 0
    assert statistics.decided_without(failed, "a") == 0 and statistics.decided_without(good, "a") == 1


@pytest.mark.parametrize("of_an_endpoint", [False, True])
def test_no_vote_is_held_at_tokens_that_an_endpoint_hides(monkeypatch, of_an_endpoint):
    """The budget would be that of the other agents alone."""
    turns = [turn("a", 1, "4", "4", tokens=6), turn("b", 1, "4", "4", tokens=0 if of_an_endpoint else 6)]
    turns[1].billed_tokens = 30 if of_an_endpoint else 0
    episode = SimpleNamespace(turns=turns)
    alone = ([SimpleNamespace(turns=[turn("a", 1, "4", "4", tokens=4)])], 1.0)
    monkeypatch.setattr(evaluate, "sampled_alone", lambda *_: alone)
    monkeypatch.setattr(evaluate, "voted", lambda team, tasks, agent, answers, *_: {"answers": answers})
    found = SimpleNamespace(numbers={"cost": statistics.cost_of([episode], 1.0)})
    told = evaluate.tokens(SimpleNamespace(controller=SimpleNamespace(agents=["a", "b"])), [], [episode], found)
    if of_an_endpoint:
        assert all("returns no token ids" in told[agent]["reason"] for agent in ("a", "b"))
    else:
        assert told == {"a": {"answers": 3}, "b": {"answers": 3}}


@pytest.mark.parametrize(
    "n,do_sample,temperature,refused",
    [(4, False, 1.0, True), (4, True, 0, True), (4, True, 0.7, False), (1, True, 0, False), (1, False, 0, False)],
)
def test_samples_that_would_all_be_the_same_are_refused(n, do_sample, temperature, refused):
    given = SimpleNamespace(n=n, do_sample=do_sample, temperature=temperature)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(val_kwargs=given)))
    team = SimpleNamespace(setup=SimpleNamespace(config=config))
    with pytest.raises(ConfigError, match=f"n={n}.*decodes greedily") if refused else nullcontext():
        evaluate.must_vary(team)
