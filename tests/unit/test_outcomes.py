"""An outcome is paid once: what is known only when a conversation ends, however long that was."""

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import TensorDict

from marl.batch.build import joint_batch
from marl.batch.critic_spec import UtilityCritics
from marl.batch.evidence import ballots_of, outcomes_of
from marl.learners import CREDITS, LEARNERS
from marl.learners.credit_schemes import TeamOf
from marl.learners.groups import GroupKey
from marl.learners.mixing import Advantage
from marl.learners.replay_credit import ReturnOf, team_return
from marl.learners.trajectories import returns
from marl.types import Ballot, Episode, Rule, Score, Task, Turn, Vote
from marl.utils.ragged import jagged
from tests.builders import AGENTS, FakeGroup, batch_of, branch, build_learner as build, episode, grid_of

PASS = "pass"
"""A turn that is no answer."""


def talk(rounds, team=1.0, sample=0, task="t"):
    """An episode of these rounds: a score for every agent, PASS, or None where it is silent."""
    record = Episode(Task(task, [], "1", "marl/x", lambda text: text), sample, list(AGENTS))
    for number, said in enumerate(rounds, start=1):
        for agent, score in zip(AGENTS, said, strict=True):
            if score is not None:
                record.turns.append(turn(agent, number, score, team))
    record.score = Score(team, "1")
    last = {agent: [own for own in record.trajectory(agent) if own.answers][-1:] for agent in AGENTS}
    votes = tuple(Vote(own.agent, own.round, own.text) for turns in last.values() for own in turns)
    record.ballot = Ballot(Rule.heaviest, votes)
    return record


def turn(agent, number, score, team):
    answers = score is not PASS
    return Turn(
        agent,
        number,
        [],
        str(score),
        policy=agent,
        prompt_ids=[1, 2],
        response_ids=[3],
        response_mask=[1],
        log_probs=[-1.0],
        answers=answers,
        score=Score(score if answers else team, "1"),
        outcomes=[score, 0.5] if answers else [],
    )


def batch(*records):
    joint = joint_batch(records, AGENTS, dict.fromkeys(AGENTS, 1.0))
    joint.evidence.ballots = [ballots_of(record) for record in records]
    joint.evidence.outcomes_ERAK = outcomes_of(records, joint)
    joint.critic_data.values_ERA = torch.zeros(joint.mask_ERA.shape)
    joint.critic_data.utilities_ERA = torch.zeros(joint.mask_ERA.shape)
    joint.critic_data.joint_ids = jagged([[1, 2]] * len(records) * joint.mask_ERA.shape[1], torch.long)
    return joint


def of_team(learner, joint):
    """The team's returns from every round on, for learners with a mixer."""
    actions = learner.joint(joint)
    togo = actions.rewards_B.clone()
    for b in reversed(range(len(togo))):
        if actions.next_B[b] >= 0:
            togo[b] += togo[actions.next_B[b]]
    grid = torch.zeros(actions.shape[:2])
    grid.view(-1)[actions.index_B] = togo
    return grid[..., None].expand(actions.shape)


def returns_of(learner, joint):
    """Returns [E, R, A] by which a learner's turns are compared, or to which its critics are fitted; without a discount."""
    if learner.credit.kind == "advantage":
        return learner.credit.of(joint)
    if isinstance(learner.critics, UtilityCritics):
        return of_team(learner, joint)
    if learner.critics:
        learner.assign_credit(joint)
        return joint.returns_ERA
    rewards = learner.credit.of(joint)
    return (
        learner.returns(joint, rewards)
        if hasattr(learner, "returns")
        else returns(joint, rewards, learner.credit.kind, 1)
    )


CREDIT_OPTIONS = {
    "team": [{"of": of} for of in TeamOf],
    "mixed": [{"of": of, "weight": 0.5} for of in TeamOf],
    "influence": [{"gamma": 1.0}],
}
LEARNER_OPTIONS = {"mappo": [{}, {"chain": True}], "happo": [{}, {"chain": True}]}
PAIRS = [
    pytest.param(name, credit, options, own, id="-".join([name, credit, *map(str, (options | own).values())]))
    for name in LEARNERS.names()
    for credit in CREDITS.names()
    if credit in (LEARNERS.get(name).credits or [credit])
    for own in LEARNER_OPTIONS.get(name, [{}])
    if not own or CREDITS.get(credit).kind == "reward"
    if CREDITS.get(credit).kind != "advantage" or not build(name).critics
    for options in CREDIT_OPTIONS.get(credit, [{}])
]


def is_common(name, credit):
    """True for a learner with its default credit, for MAPPO, and for GRPO with credit of kind ``advantage``."""
    return (
        credit == LEARNERS.get(name).default_credit
        or name == "mappo"
        or (name == "grpo" and CREDITS.get(credit).kind == "advantage")
    )


MOST_ARE_SLOW = [
    pytest.param(*pair.values, id=pair.id, marks=() if is_common(*pair.values[:2]) else pytest.mark.slow)
    for pair in PAIRS
]
SCORE = st.sampled_from([0.0, 0.25, 1.0])
SAID = st.one_of(SCORE, st.just(PASS), st.none())
ROUND = st.lists(SAID, min_size=2, max_size=2).filter(any)


@st.composite
def padded(draw):
    """A conversation; the same with turns that change nothing, which are passes; and where its rounds stand in that."""
    rounds = draw(
        st.lists(ROUND, min_size=1, max_size=3).filter(lambda rounds: any(s != PASS for r in rounds for s in r if s))
    )
    known = {agent for said in rounds for agent, score in enumerate(said) if score is not None}
    longer, places = [], []
    for said in rounds:
        for _ in range(draw(st.integers(0, 1))):
            longer.append([PASS if agent in known else None for agent in range(2)])
        places.append(len(longer))
        fill = draw(st.booleans())
        longer.append(
            [PASS if fill and score is None and agent in known else score for agent, score in enumerate(said)]
        )
    for _ in range(draw(st.integers(0, 2))):
        longer.append([PASS, PASS])
    return rounds, longer, places


@pytest.mark.parametrize("name,credit,options,own", MOST_ARE_SLOW)
def test_turns_that_change_nothing_change_no_return(name, credit, options, own):
    undiscounted = {"gamma": 1.0, "lam": 1.0, "whiten": False}
    known = {key: value for key, value in undiscounted.items() if key in LEARNERS.get(name).Config.__dataclass_fields__}

    @settings(deadline=None, max_examples=3, derandomize=True, database=None)
    @given(st.lists(st.tuples(padded(), SCORE), min_size=6, max_size=6))
    def check(conversations):
        if CREDITS.get(credit).kind == "advantage":  # whose alternatives are those of the same round
            conversations = [
                ((said, [*said, [PASS, PASS]], range(len(said))), team) for (said, *_), team in conversations
            ]
        got = [
            returns_of(build(name, credit, options, **own, **known), batch(*episodes_of(conversations, which)))
            for which in (0, 1)
        ]
        for e, ((said, _, places), _) in enumerate(conversations):
            spoke = torch.tensor([[score is not None for score in scores] for scores in said])
            plain, longer = got[0][2 * e, : len(said)][spoke], got[1][2 * e, list(places)][spoke]
            torch.testing.assert_close(longer, plain, atol=1e-5, rtol=0)

    check()


def episodes_of(conversations, which):
    """Each as the first of two samples of its task."""
    for number, (conversation, team) in enumerate(conversations):
        yield talk(conversation[which], team, task=f"t{number}")
        yield talk([[0.0, 1.0]], team=0.0, sample=1, task=f"t{number}")


def long_and_short(early, late):
    """Four samples that are all right: two end in round 1, two in round 3."""
    return [talk([early] if sample < 2 else [late, late, early], sample=sample) for sample in range(4)]


@pytest.mark.parametrize("said", [[1.0, 1.0], [PASS, PASS]])
@pytest.mark.parametrize(
    "name,credit,options",
    [
        ("grpo", "team", {"of": TeamOf.final}),
        ("grpo", "team", {"of": TeamOf.answer}),
        ("magrpo", "team", {"of": TeamOf.answer}),
        ("vdn", "team", {"of": TeamOf.answer}),
        ("rae", "team", {"of": TeamOf.answer}),
    ],
)
def test_long_and_short_conversations_have_the_same_return(name, credit, options, said):
    joint = batch(*long_and_short(said, said))
    got = returns_of(build(name, credit, options), joint)
    assert (got[joint.mask_ERA] == 1).all()
    if name == "grpo":
        build(name, credit, options).assign_credit(joint)
        assert not any(rows["advantages"].values().any() for rows in joint.rows.values())


@pytest.mark.parametrize(
    "credit,options,expected",
    [
        ("own", {}, [[0.5, 0], [0, 0], [0.25, 1]]),
        ("team", {"of": TeamOf.round}, [[0.5, 0], [0, 0], [0.25, 1]]),
        ("team", {"of": TeamOf.final}, [[0, 0], [0, 0], [0.25, 0.25]]),
        ("team", {"of": TeamOf.answer}, [[0, 0], [0, 0], [1, 1]]),
        ("mixed", {"of": TeamOf.answer, "weight": 2.0}, [[0.5, 0], [0, 0], [2.25, 3]]),
        ("mixed", {"of": TeamOf.round, "weight": 2.0}, [[1.5, 0], [0, 0], [0.75, 3]]),
        ("joint", {}, [[0.75, 0], [0, 0.75], [0.75, 0.75]]),
        ("zero_sum", {}, [[0, 0], [0, 0], [0, 0]]),
        ("shapley", {}, [[0, 0], [0, 0], [0.25, 0]]),
        ("influence", {"gamma": 1.0}, [[0.375, 0], [0, 0.25], [0.25, 1]]),
    ],
)
def test_a_critic_among_the_agents(credit, options, expected):
    """a answers, b criticises, a answers again while b says something; the team is right. b never answers."""
    scheme = CREDITS.get(credit)
    record = talk([[0.5, None], [None, PASS], [0.25, PASS]])
    assert scheme(scheme.Config(name=credit, **options)).assign(batch(record))[0].tolist() == expected


def test_passing_gives_no_reward_to_an_agent_that_answers():
    joint = batch(talk([[1.0, 0.0], [PASS, 1.0], [PASS, PASS]]))
    assert CREDITS.get("own")(CREDITS.get("own").Config("own")).assign(joint)[0].tolist() == [[1, 0], [0, 1], [0, 0]]


def test_shapley_is_credited_at_an_agents_last_turn():
    """Its vote was given in round 1: who passes afterwards is worth what it said then."""
    joint = batch(talk([[1.0, 0.0], [PASS, None]]))
    shapley = CREDITS.get("shapley")
    assert shapley(shapley.Config("shapley")).assign(joint)[0].tolist() == [[0, -0.25], [0.75, 0]]


def test_zero_sum_compares_last_answers_and_credits_last_turns():
    joint = batch(talk([[1.0, 0.25], [PASS, None]]))
    zero = CREDITS.get("zero_sum")
    assert zero(zero.Config("zero_sum")).assign(joint)[0].tolist() == [[0, -0.75], [0.75, 0]]


def test_zero_sum_compares_with_the_mean_of_the_others():
    """1, .5 and 0 among three: 1 - .25, .5 - .5, 0 - .75."""
    record = talk([[1.0, 0.5]])
    third = replace(record.turns[0], agent="c", score=Score(0.0, "1"))
    record.agents, record.turns = ["a", "b", "c"], [*record.turns, third]
    joint = joint_batch([record], record.agents, {})
    zero = CREDITS.get("zero_sum")
    assert zero(zero.Config("zero_sum")).assign(joint)[0].tolist() == [[0.75, 0, -0.75]]


@pytest.mark.parametrize(
    "options,expected",
    [
        ({"of": TeamOf.round}, [0.5, 1.0, 0.0]),
        ({"of": TeamOf.final}, [0, 0, 1.0]),
        ({"of": TeamOf.answer}, [0, 0, 0.75]),
    ],
)
def test_the_teams_outcome_is_credited_in_its_last_round_only(options, expected):
    """a's last turn is in round 1, b's in round 3: with a payment at each the team would be paid twice."""
    team = CREDITS.get("team")
    record = talk([[1.0, 0.0], [None, 1.0], [None, PASS]], team=0.75)
    assert team(team.Config("team", **options)).of_team(batch(record))[0].tolist() == expected


def test_a_team_that_never_answers_gets_its_score_once():
    joint = batch(talk([[PASS, PASS], [PASS, None]], team=0.5))
    for name, options in [("own", {}), *(("team", {"of": of}) for of in TeamOf)]:
        scheme = CREDITS.get(name)(CREDITS.get(name).Config(name, **options))
        assert scheme.assign(joint)[0].tolist() == [[0, 0.5], [0.5, 0]], name
        assert scheme.of_team(joint)[0].tolist() == [0, 0.5], name


def test_untrained_last_turns_hand_the_outcome_back():
    """Round 1 alone is trained: what the team reached in round 2 comes to it, once."""
    records = [episode("t", 0, [[0, 1], [0, 1]]), episode("t", 1, [[0], [0]])]
    records[1].score = Score(0.0, "1")
    joint = batch_of(*records, train_rounds=[1])
    build("grpo", "team", {"of": TeamOf.answer}, std=False).assign_credit(joint)
    assert joint.rows["a"]["advantages"].values().tolist() == [0.5, -0.5]


def test_the_return_of_a_replay_leaves_out_what_is_no_answer():
    assert team_return(talk([[0.5, 0.25], [1.0, PASS], [PASS, PASS]], team=0.0), ReturnOf.final) == 1.0
    assert team_return(talk([[PASS, PASS]], team=0.75), ReturnOf.final) == 0.75


def test_incentives_pass_over_passes():
    """b passes in round 2: no peer of a's there, nothing gained by b."""
    scheme = CREDITS.get("own")(CREDITS.get("own").Config("own", alpha0=2.0, alpha1=4.0, beta0=8.0, beta1=16.0))
    plain = CREDITS.get("own")(CREDITS.get("own").Config("own"))
    joint = batch(talk([[1.0, 0.0], [0.0, PASS]], team=1.0))
    assert (scheme.of(joint) - plain.of(joint))[0].tolist() == [[0.0, -8.0], [-2.0, 0.0]]


def ended_early(rounds, sample=0, score=-1.0):
    """An episode that overflowed after these rounds: each agent's last turn is worth the score, if it is an answer."""
    record = talk(rounds, team=score, sample=sample)
    record.failure, record.ballot = "overflow", None
    for agent in AGENTS:
        for turn in record.trajectory(agent)[-1:]:
            turn.score = Score(score, None)
    return record


@pytest.mark.parametrize(
    "credit,options,expected",
    [
        ("own", {}, [[1, -1], [0, 0], [-1, 0]]),
        ("team", {"of": TeamOf.round}, [[1, -1], [0, 0], [-1, 0]]),
        ("mixed", {"of": TeamOf.answer, "weight": 0.5}, [[1, -1.5], [0, 0], [-1.5, 0]]),
        ("team", {"of": TeamOf.final}, [[0, -1], [0, 0], [-1, 0]]),
        ("team", {"of": TeamOf.answer}, [[0, -1], [0, 0], [-1, 0]]),
        ("shapley", {}, [[0, -0.5], [0, 0], [-0.5, 0]]),
        ("counterfactual", {}, [[0, -1], [0, 0], [-1, 0]]),
        ("zero_sum", {}, [[0, -2], [0, 0], [-2, 0]]),
        ("joint", {}, [[-1, -1], [-1, 0], [-1, 0]]),
    ],
)
def test_an_early_end_is_charged_once_to_each_agent(credit, options, expected):
    """a answers, says something, and something again; b answers in round 1 alone. A whole sample is worth 1."""
    scheme = CREDITS.get(credit)
    joint = batch(ended_early([[1.0, 1.0], [PASS, None], [PASS, None]]), talk([[1.0, 1.0]], team=1.0, sample=1))
    assert joint.failed_E.tolist() == [True, False]
    got = scheme(scheme.Config(name=credit, **options)).assign(joint)
    assert got[0].tolist() == expected
    if options == {"of": TeamOf.round}:
        assert scheme(scheme.Config(name=credit, **options)).of_team(joint)[0].tolist() == [1.0, 0.0, -1.0]
    assert team_return(ended_early([[1.0, 1.0]]), ReturnOf.final) == -1.0


def test_a_right_answer_before_a_failure_is_no_change_to_a_wrong_one():
    """Both are right in all rounds; what the failure is worth stands at the last ones alone."""
    incentives = {"alpha0": 2.0, "alpha1": 4.0, "beta0": 8.0, "beta1": 16.0}
    joint = batch(ended_early([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]))
    own = CREDITS.get("own")
    assert own(own.Config("own", **incentives)).of(joint)[0].tolist() == [[1, 1], [1, 1], [-1, -1]]


def test_shares_of_a_failure_sum_to_it():
    joint = batch(ended_early([[1.0, None], [0.0, PASS]], score=-3.0))
    shapley = CREDITS.get("shapley")
    assert shapley(shapley.Config("shapley")).assign(joint)[0].tolist() == [[0, 0], [-1.5, -1.5]]


@pytest.mark.parametrize("name,credit,options,own", PAIRS)
def test_every_learner_handles_episodes_that_ended_early(name, credit, options, own):
    joint = batch(ended_early([[1.0, None], [0.0, PASS]]), talk([[1.0, 0.0]], sample=1), ended_early([[1.0, 0.5]], 2))
    assert torch.isfinite(returns_of(build(name, credit, options, **own), joint)).all()


class Moved(FakeGroup):
    """Workers whose every token has become more likely."""

    async def compute_log_prob(self, rows):
        old = rows["old_log_probs"]
        moved = torch.nested.nested_tensor_from_jagged(old.values() + 0.3, old.offsets())
        return TensorDict({"log_probs": moved}, batch_size=[len(rows)])


def beside(scores, trained):
    """Two samples of three rounds; in the first, a's answer of round 1 was kept among these."""
    record = branch(talk([[1.0, 0.0], [0.0, 1.0], [None, 0.5]]), "a", 1, scores)
    for turn in record.turns:
        turn.trained = turn.kept or trained
    joint = batch(record, talk([[0.25, 1.0], [1.0, 0.5], [0.0, 0.25]], team=0.5, sample=1))
    for rows in joint.rows.values():
        rows["old_log_probs"] = rows["rollout_log_probs"]
    v_ERA, q_ERA = torch.full((2, *joint.mask_ERA.shape), 10.0 * sum(scores))
    v_ERA[:, :3], q_ERA[:, :3] = torch.linspace(0, 1, 12).view(2, 3, 2), torch.linspace(1, -1, 12).view(2, 3, 2)
    joint.critic_data.values_ERA, joint.critic_data.utilities_ERA = v_ERA, q_ERA
    return joint


def later_advantages(learner, scores, trained, steps=3):
    """Those that the policies are updated with, of the turns after round 1, in each of some steps."""
    advantages = []
    for _ in range(steps):  # policies take turns in being the first
        joint = beside(scores, trained)
        learner.assign_credit(joint)
        groups = {policy: Moved() for policy in joint.rows}
        asyncio.run(learner.update(joint, groups))
        for policy, group in groups.items():
            (joint.rows[policy],) = group.rows
        advantages.append(sum(grid_of(joint, policy) for policy in joint.rows)[:, 1:3])
    return torch.stack(advantages)


OTHER_OPTIONS = {
    "grpo": [{"group_by": [GroupKey.task]}, {"estimator": "rloo"}],
    "vdn": [{"advantage": Advantage.group}],
    "qmix": [{"advantage": Advantage.group}],
}


@pytest.mark.parametrize(
    "name,credit,options,own",
    [
        *MOST_ARE_SLOW,
        *((name, LEARNERS.get(name).default_credit, {}, own) for name in OTHER_OPTIONS for own in OTHER_OPTIONS[name]),
    ],
)
def test_what_was_not_kept_moves_no_later_round(name, credit, options, own):
    """An alternative is compared with its set, and nothing after that is due to it; whitening a policy's batch aside."""
    plain = {"whiten": False} if "whiten" in LEARNERS.get(name).Config.__dataclass_fields__ else {}
    sets = [([0.5, 0.0], True), ([1.0, -3.0, 0.25], True), ([0.5, 7.0], False)]
    first, *others = [later_advantages(build(name, credit, options, **own, **plain), *given) for given in sets]
    assert first.any()
    for other in others:
        torch.testing.assert_close(other, first, atol=1e-6, rtol=0)


def test_the_best_of_a_tree_is_not_punished_for_what_came_after_it():
    record = branch(episode("t", 0, [[1.0, 0.5], []]), "a", 1, [0.0])
    record.failure, record.ballot, record.score = "overflow", None, Score(-1.0, None)
    for name in ("own", "team", "shapley", "zero_sum"):
        scheme = CREDITS.get(name)(CREDITS.get(name).Config(name))
        assert scheme.of(batch_of(record))[0, [0, 2], 0].tolist() == [1.0, 0.0], name
