"""Credit schemes on episodes made by hand: what they pay, and for what they ask."""

import math

import pytest
import torch
from omegaconf import OmegaConf

from marl.batch.build import joint_batch
from marl.batch.evidence import ballots_of
from marl.config.errors import ConfigError
from marl.config.values import check_values
from marl.learners import CREDITS, LEARNERS
from marl.learners.counterfactual_credit import ballot_score
from marl.learners.credit_schemes import TeamOf
from marl.learners.groups import GroupKey, WeightBy
from marl.learners.replay_credit import ReturnOf, team_return
from marl.preflight.compatibility import check_facts, check_incentives, choose_credit
from marl.preflight.prepare import prepare
from marl.run_setup import Setup
from marl.runners import RUNNERS, Decide
from marl.runners.debate import Order
from marl.runners.tree import Train
from marl.types import Ballot, Rule, Score, Vote
from marl.utils import votes
from tests.builders import DEBATE, batch_of, build_learner as build, episode, play, scheme


def test_mixed_is_own_and_a_weight_of_the_teams():
    batch = batch_of(episode("t", 0, DEBATE))
    assert scheme("mixed", weight=0.5).assign(batch)[0].tolist() == [[1.25, 0.25], [0.25, 1.25]]
    assert scheme("mixed", weight=2.0, of=TeamOf.answer).assign(batch)[0].tolist() == [[1.0, 0.0], [2.0, 3.0]]
    assert torch.equal(scheme("mixed", weight=0).assign(batch), scheme("own").assign(batch))


def test_joint_gives_every_turn_the_sum_of_all_scores():
    pioneer, observer = episode("t", 0, [[0.25, None], [None, 1.0]]), episode("t", 1, [[1.0, None], [None, 0.5]])
    got = scheme("joint").assign(batch_of(pioneer, observer))
    assert got.tolist() == [[[1.25, 0], [0, 1.25]], [[1.5, 0], [0, 1.5]]]
    batch = batch_of(pioneer, observer)
    build("grpo", "joint", std=False).assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == [-0.125, 0.125], (
        "a turn's return, and nothing is added to it"
    )


@pytest.mark.parametrize("name", CREDITS.names())
def test_incentives_are_added_to_any_credit(name):
    """a goes from right to wrong beside a wrong peer, b from wrong to right beside a right one."""
    batch = batch_of(episode("t", 0, DEBATE), episode("t", 1, [[1.0, None], [None, 1.0]]))
    plain = scheme(name).of(batch)
    added = scheme(name, alpha0=2.0, alpha1=4.0, beta0=8.0, beta1=16.0).of(batch) - plain
    expected = torch.tensor([[[16.0, -8.0], [-2.0, 4.0]], [[0, 0], [0, 0]]]).double()
    torch.testing.assert_close(added, expected, atol=1e-5, rtol=0)
    assert torch.equal(scheme(name, alpha0=0.0).of(batch), plain)


def test_incentives_are_added_before_returns_are_summed():
    """``reward``: what round 2 is paid is part of round 1's return. ``return``: it is not."""
    batch = [batch_of(episode("t", 0, DEBATE), episode("t", 1, [[0.0, 0.0], [0.0, 0.0]])) for _ in range(2)]
    for one, name in zip(batch, ("own", "influence"), strict=True):
        build(
            "grpo", name, {"alpha1": 4.0, **({"gamma": 0.0} if name == "influence" else {})}, std=False
        ).assign_credit(one)
    reward, ended = (one.rows["b"]["advantages"].values().tolist() for one in batch)
    assert reward[0] == 2.5 and ended[0] == 0.0, "b: score 0, then 1 + 4; the other sample got nothing"
    assert reward[1] == ended[1] == 2.5


def test_resolving_auto_keeps_the_incentives(compose_config, cold_assets):
    words = ("learner=mappo", "credit=auto", "credit.alpha1=2", "credit.beta0=-1")
    config = prepare(compose_config(f"assets={cold_assets}", *words)).config
    assert (config.credit.name, config.credit.alpha1, config.credit.beta0) == ("team", 2.0, -1.0)


def vote(agent, answer, score=0.0, weight=1.0, round=1):
    return Vote(agent, round, answer, weight, score)


@pytest.mark.parametrize(
    "rule,votes,expected",
    [
        (Rule.heaviest, [], -1.0),
        (Rule.heaviest, [("4", 1.0, 1), ("5", 0.0, 1)], 0.5),
        (Rule.heaviest, [("4", 1.0, 1), ("5", 0.0, 1), ("5", 0.0, 1)], 0.0),
        (Rule.heaviest, [("4", 1.0, 3), ("5", 0.0, 1), ("5", 0.0, 1)], 1.0),
        (Rule.heaviest, [(None, 0.25, 1), ("4", 1.0, 1)], 1.0),
        (Rule.heaviest, [(None, 0.25, 1)], -1.0),
        (Rule.heaviest, [("4", 1.0, 1), ("4", 0.5, 1), ("5", 0.0, 1)], 1.0),
        (Rule.heaviest, [("4", 1.0, -0.5), ("4", 1.0, -0.5), ("5", 0.0, -0.6)], 1.0),
        (Rule.heaviest, [("4", 1.0, -1), ("4", 1.0, -1), ("5", 0.0, -1)], 1.0),
        (Rule.heaviest, [("4", 1.0, -1), ("4", 1.0, -1), ("5", 0.0, 1)], 0.0),
        (Rule.heaviest, [("4", 1.0, -1), (None, 0.0, -2)], 1.0),
        (Rule.agreed, [("4", 1.0, 1), ("4", 1.0, 1)], 1.0),
        (Rule.agreed, [("4", 1.0, 1), ("5", 0.0, 1)], -1.0),
        (Rule.agreed, [(None, 1.0, 1), (None, 1.0, 1)], -1.0),
        (Rule.last, [("5", 0.0, 9), ("4", 1.0, 1)], 1.0),
        (Rule.last, [("4", 1.0, 1), (None, 0.0, 1)], -1.0),
    ],
)
def test_scores_of_ballots(rule, votes, expected):
    cast = tuple(vote(str(i), answer, score, weight) for i, (answer, score, weight) in enumerate(votes))
    assert ballot_score(Ballot(rule, cast, no_answer=-1.0), cast) == expected


def decided(rule, *answers, accuracy=None, **options):
    """A single-turn episode in which agents a, b, c give these answers to a question whose answer is 4."""
    names = "abcdefgh"[: len(answers)]
    runner = RUNNERS.get("single_turn")
    runner = runner(runner.Config(name="single_turn", decide=rule))
    record = play(
        runner, lambda agent, round: answers[names.index(agent)], agents=tuple(names), accuracy=accuracy, **options
    )
    for turn in record.turns:
        turn.score = Score(float(turn.text == "4"), turn.text)
        turn.policy, turn.prompt_ids, turn.response_ids, turn.response_mask, turn.log_probs = (
            turn.agent,
            [1],
            [2],
            [1],
            [0.0],
        )
    record.score = Score(float(record.answer == "4"), record.answer)
    return record


@pytest.mark.parametrize("rule", Decide)
@pytest.mark.parametrize(
    "answers", [("4", "5", "5"), ("4", "4", "5"), ("none", "4", "5"), ("4", "4", "4"), ("none",) * 3]
)
def test_a_ballot_holds_what_was_decided_on(rule, answers):
    """The rule on the recorded votes gives the team's answer again; the scores are those of the turns."""
    record = decided(rule, *answers, accuracy={"a": 0.9, "b": 0.3, "c": 0.3})
    (ballot,) = ballots_of(record, no_answer=-1.0)
    assert [(v.agent, v.round, v.answer) for v in ballot.votes] == [
        (agent, 1, None if answer == "none" else answer) for agent, answer in zip("abc", answers, strict=True)
    ]
    assert [v.score for v in ballot.votes] == [float(answer == "4") for answer in answers]
    known = {v.answer for v in ballot.votes if v.score == ballot_score(ballot, ballot.votes)}
    if record.answer is None:
        assert ballot_score(ballot, ballot.votes) == -1.0
    elif ballot_score(ballot, ballot.votes) in (0.0, 1.0):
        assert record.answer in known
    else:
        assert len(set(answers)) > 1, "a tie"


def voted(rule, *samples):
    """The batch of single-turn episodes on one task, with these answers each."""
    records = [decided(rule, *answers) for answers in samples]
    names = records[0].agents
    batch = joint_batch(records, names, dict.fromkeys(names, 1.0))
    batch.evidence.ballots = [ballots_of(record) for record in records]
    return batch


def shares(rule, *answers):
    return scheme("shapley").assign(voted(rule, answers))[0, 0].tolist()


def test_shapley_divides_a_decisions_score():
    """4 4 5 by majority: v(a) = v(b) = v(ab) = v(abc) = 1, v(ac) = v(bc) = .5, v(c) = 0."""
    got = shares(Decide.majority, "4", "4", "5")
    assert got == pytest.approx([7 / 12, 7 / 12, -1 / 6]) and sum(got) == pytest.approx(1.0)
    assert shares(Decide.majority, "4", "4", "none") == [0.5, 0.5, 0.0], "who abstains is a dummy"
    assert shares(Decide.last, "4", "5", "4") == pytest.approx([1 / 3, -1 / 6, 5 / 6])
    assert shares(Decide.unanimous, "4", "4", "5") == pytest.approx([1 / 3, 1 / 3, -2 / 3]), "c alone stops them"
    assert shares(Decide.majority, *["4"] * 8) == pytest.approx([1 / 8] * 8, abs=0.04), "in a sample of orders"


def test_shapley_is_credited_at_the_last_vote_and_sums_to_the_decision():
    batch = batch_of(episode("t", 0, [[0.0, 1.0], [1.0, None]]), episode("t", 1, [[1.0, 0.0], [None, 0.0]]))
    got = scheme("shapley").assign(batch)
    assert got.tolist() == [[[0, 0.5], [0.5, 0]], [[0, 0], [0, 0]]]
    for credit, ballots in zip(got, batch.evidence.ballots, strict=True):
        assert float(credit.sum()) == ballot_score(ballots[-1], ballots[-1].votes)


def test_counterfactual_by_hand():
    """Samples of one task: a says 4, 4, 5 and b 5, 4, 5; the sole 4 ties with a 5: .5.

    a in sample 0, beside b's 5: Q = .5 for 4, 0 for 5; mean 1/3. In sample 1, beside 4: 1 and .5. In sample 2, beside 5.
    """
    got = scheme("counterfactual").assign(voted(Decide.majority, ("4", "5"), ("4", "4"), ("5", "5")))[:, 0]
    a = [0.5 - 1 / 3, 1 - 2.5 / 3, 0 - 1 / 3]
    b = [0.5 - 2 / 3, 1 - 2 / 3, 0 - 0.5 / 3]
    torch.testing.assert_close(got, torch.tensor([a, b]).double().T)


def test_counterfactual_of_a_vote_that_changes_nothing_is_exactly_zero():
    got = scheme("counterfactual").assign(voted(Decide.last, ("4", "5"), ("5", "5"), ("7", "5")))
    assert (got == 0).all(), "only the last one decides, and it always says the same"
    got = scheme("counterfactual").assign(voted(Decide.last, ("4", "4"), ("5", "5"), ("7", "5")))
    torch.testing.assert_close(got[:, 0], torch.tensor([[0, 2 / 3], [0, -1 / 3], [0, -1 / 3]]).double())


def test_an_alternative_brings_its_own_weight():
    """By score, a right answer outweighs two wrong ones: b's 4 would have decided beside 5 and 6."""
    got = scheme("counterfactual").assign(voted(Decide.verifier, ("5", "4", "6"), ("5", "5", "6")))[:, 0]
    torch.testing.assert_close(got[:, 1], torch.tensor([0.5, -0.5]).double())


def test_earlier_rounds_vote_on_what_they_would_have_decided():
    """a says 1 then 0, b says 0 then 1. Round 1 is a ballot of its own: a's 1 beside b's 0 is worth .5, its 0 nothing."""
    one, two = episode("t", 0, DEBATE), episode("t", 1, [[0.0, 0.0], [0.0, 0.0]])
    batch = batch_of(one, two)
    assert [[vote.round for vote in ballot.votes] for ballot in batch.evidence.ballots[0]] == [[1, 1], [2, 2]]
    got = scheme("counterfactual").assign(batch)
    assert got[0].tolist() == [[0.25, 0.0], [0.0, 0.25]]
    assert got[1].tolist() == [[-0.25, 0.0], [0.0, -0.25]]
    late = scheme("counterfactual", earlier_rounds=False).assign(batch)
    assert late[0].tolist() == [[0.0, 0.0], [0.0, 0.25]]


def test_who_stopped_early_stands_by_its_answer():
    """b speaks in round 1 alone, and votes with that; a's first answer meets it in a ballot after round 1."""
    record = episode("t", 0, [[0.0, 1.0, 0.5], [1.0]])
    ballots = ballots_of(record, no_answer=-3.0)
    assert [[(v.agent, v.round, v.score) for v in ballot.votes] for ballot in ballots] == [
        [("a", 1, 0.0), ("b", 1, 1.0)], [("a", 2, 1.0), ("b", 1, 1.0)], [("a", 3, 0.5), ("b", 1, 1.0)],
    ]  # fmt: skip
    assert {ballot.no_answer for ballot in ballots} == {-3.0}
    record.turns[0].answers = False
    assert len(ballots_of(record)) == 2, "what is no answer has no vote"
    record.ballot = Ballot(Rule.last, (vote("b", "1.0"),))
    assert len(ballots_of(record)) == 1, "nor has who does not vote"


@pytest.fixture(scope="module")
def checked(compose_config):
    """Check what the classes say of the quick start with another credit and other values."""
    plain = compose_config("learner.std=true", "learner.gamma=1", "learner.estimator=null")

    def checked(credit, **changes):
        config = OmegaConf.create(plain)
        config.credit = OmegaConf.structured(CREDITS.get(credit).Config(name=credit))
        for key, value in changes.items():
            OmegaConf.update(config, key.replace("__", "."), value)
        check_values(config)
        check_facts(Setup.of(config))

    return checked


@pytest.mark.parametrize("name", ["shapley", "counterfactual"])
def test_without_a_vote_the_error_says_what_to_use(name, checked):
    batch = batch_of(episode("t", 0, DEBATE))
    batch.evidence.ballots = [[]]
    with pytest.raises(ValueError, match=rf"credit={name}.*task t.*marl\.runners\.decide.*credit\.of=answer"):
        scheme(name).assign(batch)
    chain = RUNNERS.get("chain").Config(name="chain")
    with pytest.raises(ConfigError, match=rf"credit={name}.*runner=chain takes no vote.*debate or voting"):
        checked(name, runner=chain)
    checked(name)


@pytest.mark.parametrize(
    "credit,changes,said",
    [
        (
            "replay",
            {"learner": LEARNERS.get("mappo").Config("mappo", gamma=1.0, lam=1.0)},
            "learner=mappo.*learner=grpo",
        ),
        ("replay", {"algorithm__adv_estimator": "rloo"}, "credit=replay.*adv_estimator=rloo.*use null and false"),
        ("counterfactual", {"algorithm__use_kl_in_reward": True}, "use_kl_in_reward=True.*use null and false"),
        ("counterfactual", {"actor_rollout_ref__rollout__n": 1}, "rollout.n=1: credit=counterfactual.*at least 2"),
        ("replay", {"credit__alternatives": 1}, "credit.alternatives=1.*at least 2"),
        ("replay", {"credit__share": 0.0}, "credit.share=0.*above 0"),
    ],
)
def test_unmet_requirements_of_a_credit_are_errors(checked, credit, changes, said):
    with pytest.raises(ConfigError, match=said):
        checked(credit, **changes)


@pytest.mark.parametrize(
    "runner,options,said",
    [
        *((name, {}, "no two agents") for name in ("chain", "critique", "router", "self_play", "tree")),
        ("multi_turn", {}, "no two agents"),
        ("pioneer_observer", {}, "no two agents"),
        ("debate", {"order": Order.sequential}, "no two agents"),
        ("debate", {"num_rounds": 1}, "nobody answers in a second round"),
        ("single_turn", {}, "nobody answers in a second round"),
        ("voting", {}, "nobody answers in a second round"),
        ("debate", {}, None),
        ("voting", {"ballot": True}, None),
        ("summary", {}, None),
    ],
)
def test_incentives_without_effect_are_refused(compose_config, runner, options, said):
    config = compose_config("learner.std=true", "learner.gamma=1", "learner.estimator=null")
    config.credit = OmegaConf.structured(CREDITS.get("own").Config("own", beta1=0.5))
    config.runner = RUNNERS.get(runner).Config(name=runner, **options)
    if said is None:
        return check_incentives(Setup.of(config))
    with pytest.raises(ConfigError, match=rf"credit.beta1=0.5: .*runner={runner} {said}.*set credit.beta1=0, or use"):
        check_incentives(Setup.of(config))
    config.credit.beta1 = 0.0
    check_incentives(Setup.of(config))


def test_incentives_of_one_agent_are_refused(compose_config):
    config = compose_config("credit=own", "credit.alpha0=1")
    check_incentives(Setup.of(config))
    del config.agents.carol
    with pytest.raises(ConfigError, match="credit.alpha0=1.*no two agents"):
        check_incentives(Setup.of(config))


def test_replay_compares_within_an_episode_and_takes_a_single_sample(checked):
    checked("replay", actor_rollout_ref__rollout__n=1)


def test_replay_credits_a_turn_by_its_own_outcome():
    record = episode("t", 0, DEBATE)
    record.turns[0].outcomes, record.turns[1].outcomes = [1.0, 0.0, 0.5], [0.25]
    record.turns[2].outcomes, record.turns[3].outcomes = [0.0, 1.0], []
    batch = batch_of(record)
    assert batch.evidence.outcomes_ERAK.shape == (1, 2, 2, 3) and math.isnan(batch.evidence.outcomes_ERAK[0, 1, 1, 0])
    got = scheme("replay").assign(batch)
    assert got[0].tolist() == [[0.75, -1.0], [0.0, 0.0]]
    build("grpo", "replay").assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == [0.75, 0.0, 0.0], "as it is"
    for turn in record.turns:
        turn.outcomes = []
    with pytest.raises(ValueError, match="credit=replay needs other answers' returns"):
        scheme("replay").assign(batch_of(record))


def test_the_return_of_an_episode_is_that_of_the_team_credit():
    for scores in (DEBATE, [[1.0, 0.25], [0.0, None]]):
        record = episode("t", 0, scores)
        record.score = Score(0.75, "x")
        batch = batch_of(record)
        for of in ("final", "answer"):
            added = scheme("team", of=TeamOf[of]).assign(batch)[0, :, 0].sum()
            assert team_return(record, ReturnOf[of]) == float(added)


def test_a_length_penalty_makes_no_peer_wrong():
    """a is right twice, the first time at such length that 1 - .6 is left; b follows it: b was persuaded by a right peer."""
    record = episode("t", 0, [[1.0, 1.0], [0.0, 1.0]])
    record.turns[0].score = Score(1.0, "1", penalty=0.6)
    batch = batch_of(record)
    assert batch.scores_ERA[0, 0, 0].item() == pytest.approx(0.4)
    assert not scheme("own", alpha0=1.0).incentives(batch).any()
    assert scheme("own", alpha1=1.0).incentives(batch)[0].tolist() == [[0.0, 0.0], [0.0, 1.0]]


TREE = {train: RUNNERS.get("tree").Config(name="tree", train=train) for train in Train}


@pytest.mark.parametrize("credit", ["mixed", "team", "influence", "joint"])
def test_a_credit_that_alternatives_would_not_get_is_refused(checked, credit):
    with pytest.raises(ConfigError, match=rf"credit={credit}: runner=tree compares.*no effect.*credit=own"):
        checked(credit, runner=TREE[Train.siblings])
    checked(credit, runner=TREE[Train.path])
    checked("own", runner=TREE[Train.siblings])


@pytest.mark.parametrize("train,expected", [(Train.siblings, "own"), (Train.path, "mixed")])
def test_auto_credit_of_alternatives_is_their_own_score(compose_config, train, expected):
    config = compose_config("learner=at_grpo", "credit=auto", "runner=tree", f"runner.train={train.name}")
    choose_credit(config)
    assert config.credit.name == expected


@pytest.mark.parametrize(
    "cast,winners",
    [
        ({"a": [0.1, 0.2], "b": [0.3]}, ["a", "b"]),
        ({"a": [0.1] * 10, "b": [1.0]}, ["a", "b"]),
        ({"a": [0.1, 0.2], "b": [0.3 + 1e-6]}, ["b"]),
        ({"a": [1e-12, 2e-12], "b": [3.1e-12]}, ["b"]),
        ({"a": [-0.1, -0.7], "b": [-0.1]}, ["a"]),
        ({"a": [-0.3, -0.1, 0.2], "b": [0.4]}, ["a"]),
        ({"a": [0.0], "b": [0.0]}, ["a", "b"]),
        ({}, []),
    ],
)
def test_weights_whose_sums_differ_by_rounding_tie(cast, winners):
    """From the lowest weight, -.7, a has .6 + 0 and b .6: more votes win; from -.3, a has 0 + .2 + .5 and b .7: likewise."""
    answers, weights = (
        zip(*[(answer, weight) for answer, own in cast.items() for weight in own], strict=True) if cast else ([], [])
    )
    assert votes.heaviest(answers, weights) == winners


@pytest.mark.parametrize(
    "credit,runner,changes,warns",
    [
        ("own", {"stop_on_consensus": True}, {}, True),
        ("own", {"leave_word": "BYE"}, {}, True),
        ("team", {"stop_on_consensus": True}, {}, True),
        ("mixed", {"stop_on_consensus": True}, {"credit__of": "answer"}, True),
        ("joint", {"stop_on_consensus": True}, {}, True),
        ("own", {}, {}, False),
        ("own", {"stop_on_consensus": True}, {"learner__gamma": 0.0}, False),
        ("team", {"stop_on_consensus": True}, {"credit__of": "final"}, False),
        ("influence", {"stop_on_consensus": True}, {}, False),
        ("zero_sum", {"stop_on_consensus": True}, {}, False),
    ],
)
def test_credit_by_which_an_early_end_costs_is_warned_of(checked, caplog, credit, runner, changes, warns):
    checked(credit, runner=RUNNERS.get("debate").Config(name="debate", **runner), **changes)
    said = f"credit={credit} adds up the scores"
    assert (said in caplog.text) == warns == ("credit.of=final" in caplog.text)


@pytest.mark.parametrize(
    "runner,changes,warns",
    [
        ({"stop_on_consensus": True}, {}, True),
        ({"stop_on_consensus": True}, {"learner__weight_by": WeightBy.episode}, False),
        ({"stop_on_consensus": True}, {"learner__group_by": [*GroupKey]}, False),
        ({}, {}, False),
    ],
)
def test_groups_in_which_long_conversations_count_more_are_warned_of(checked, caplog, runner, changes, warns):
    """As under ``learner=dr_mas``."""
    groups = {"learner__group_by": [GroupKey.task, GroupKey.agent]} | changes
    checked("zero_sum", runner=RUNNERS.get("debate").Config(name="debate", **runner), **groups)
    assert ("learner.weight_by=episode" in caplog.text) == warns
    assert ("learner.group_by=[task, agent] compares turns of all rounds" in caplog.text) == warns


def test_an_early_agreement_earns_less_where_answers_add_up():
    """Two right answers at once, or the same after three rounds in which a was right throughout: 1 and 3 against 1."""
    records = [episode("t", 0, [[1], [1]]), episode("t", 1, [[1, 1, 1], [0, 0, 1]])]
    for name, options, expected in (("own", {}, [1.0, 3.0]), ("team", {"of": TeamOf.final}, [1.0, 1.0])):
        batch = batch_of(*records)
        build("grpo", name, options).assign_credit(batch)
        assert batch.returns_ERA[:, 0, 0].tolist() == expected
