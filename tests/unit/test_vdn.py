"""VDN on batches made by hand: what is mixed, what it is fitted to, and what actors are paid."""

import pytest
import torch

from marl.batch.build import pad_rows, rows_of
from marl.batch.critic_spec import UtilityCritics
from marl.batch.joint import Alternatives
from marl.batch.utility_inputs import SHARED, JointStates, UtilityTurns
from marl.batch.values import gradient_rows, place_utilities, place_values
from marl.cluster.workers.critic_worker import critic_loss
from marl.learners import LEARNERS
from marl.learners.mixing import Advantage, JointActions, pairs_within
from marl.learners.trajectories import whitened
from marl.utils.ragged import jagged
from tests.builders import AGENTS, TableCritic, batch_of, build_learner as build, episode, fit, read, two_rounds


def test_turns_are_read_before_and_after_their_answers():
    """Prompts of two tokens, an answer of one token in round 1 and of two in round 2; nothing extends anything here."""
    records = [episode("t", 0, [[1, 0], [0, 1]])]
    batch = batch_of(*records)
    rows = UtilityTurns(shared=False).rows(records, batch)
    assert list(rows) == ["a", "b"]
    assert [row.tolist() for row in rows["a"]["input_ids"].unbind()] == [[1, 2, 3], [1, 2, 3, 3]]
    assert [row.tolist() for row in rows["a"]["read_at"].unbind()] == [[1, 2], [1, 3]]
    assert [row.tolist() for row in rows["a"]["answered"].unbind()] == [[0, 1], [0, 1]]
    assert [row.tolist() for row in rows["b"]["turn_index"].unbind()] == [[1, 1], [3, 3]]


def test_turns_that_extend_one_another_share_a_row():
    records = [episode("t", 0, [[1, 0], [None, None]])]
    first, second = records[0].turns
    second.prompt_ids = [*first.prompt_ids, *first.response_ids, 8, 9]
    (rows,) = UtilityTurns(shared=False).rows(records, batch_of(*records)).values()
    assert rows["input_ids"].values().tolist() == [1, 2, 3, 8, 9, 3, 3]
    assert rows["read_at"].values().tolist() == [1, 2, 4, 6]


def test_a_shared_utility_reads_everybodys_turns():
    batch, records = two_rounds()
    (name,) = rows = UtilityTurns(shared=True).rows(records, batch)
    assert name == SHARED and sorted(set(rows[name]["turn_index"].values().tolist())) == list(range(8))


def test_a_critic_with_a_tokenizer_of_its_own_reads_texts():
    records = [episode("t", 0, [[1], [None]])]
    reader = UtilityTurns(False, encode=lambda observation: [7, 7, 7], answer=lambda text: [int(text), 0])
    (rows,) = reader.rows(records, batch_of(*records)).values()
    assert rows["input_ids"].values().tolist() == [7, 7, 7, 1, 0] and rows["read_at"].values().tolist() == [2, 4]


def test_values_go_to_one_grid_and_utilities_to_the_other_and_derivatives_back():
    batch, records = two_rounds()
    rows = UtilityTurns(False).rows(records, batch)["b"]
    v_ERA, q_ERA = torch.zeros(2, *batch.mask_ERA.shape).unbind()
    numbers = torch.arange(1.0, 9.0)
    place_utilities(
        rows, torch.nested.nested_tensor_from_jagged(numbers, offsets=rows["read_at"].offsets()), v_ERA, q_ERA
    )
    assert v_ERA[..., 1].tolist() == [[1, 3], [5, 7]] and q_ERA[..., 1].tolist() == [[2, 4], [6, 8]]
    assert not v_ERA[..., 0].any() and not q_ERA[..., 0].any()
    assert torch.equal(gradient_rows(rows, v_ERA, q_ERA)["gradients"].values(), numbers)


def test_ranks_and_padding_do_not_change_the_gradient():
    """verl gives each rank a part of the rows, and takes the mean of their gradients; rows that fill up are masked out."""
    records = [episode("t", i, [[1], [None]]) for i in range(3)]
    batch = batch_of(*records)
    rows = gradient_rows(UtilityTurns(False).rows(records, batch)["a"], *torch.randn(2, 3, 1, 2).unbind())
    values = torch.randn(len(rows["input_ids"].values()))

    def gradient(parts, ranks):
        total = torch.zeros(())
        scale = torch.ones((), requires_grad=True)
        for part, own in parts:
            part = part.copy()
            part["dp_size"] = torch.tensor(ranks)
            ragged = torch.nested.nested_tensor_from_jagged(scale * own, offsets=part["input_ids"].offsets())
            loss, _ = critic_loss(None, {"values": ragged}, part)
            total = total + torch.autograd.grad(loss, scale)[0]
        return float(total) / ranks

    class Part(dict):
        copy = dict.copy

    def part_of(table):
        return Part({key: table[key] for key in ("input_ids", "read_at", "gradients", "value_mask")})

    whole = gradient([(part_of(rows), values)], ranks=1)
    padded = pad_rows(rows, 4)
    padded_values = torch.cat([values, values[-len(rows["input_ids"].unbind()[-1]) :]])
    halves, start = [], 0
    for index in ([0, 1], [2, 3]):
        part = rows_of(padded, index)
        end = start + len(part["input_ids"].values())
        halves.append((part_of(part), padded_values[start:end]))
        start = end
    assert gradient(halves, ranks=2) == pytest.approx(whole, abs=1e-6) and abs(whole) > 1e-3


def test_states_hold_the_joint_observation_before_each_round():
    records = [episode("t", 0, [[1, 0], [0, None]])]
    for turn in records[0].turns:
        turn.text = f"{turn.agent}{turn.round}"

    class Words:
        bos_token_id = None

        def encode(self, text, **_):
            words.append(text)
            return [len(words)]

    words: list[str] = []
    states = JointStates(Words()).ids(records, batch_of(*records))
    texts = ["".join(words[i - 1] for i in row.tolist()) for row in states.unbind()]
    assert texts == ["\n\na\n\nb", "\n\na said\na1\n\nb said\nb1\n\na"], (
        "nothing of the same round, and who is to speak"
    )


@pytest.mark.parametrize("name", ["vdn", "qmix"])
def test_a_joint_action_is_what_trained_agents_say_in_a_round(name):
    """Round 2 of the first episode has nobody who is trained: it is stepped over, and its reward is carried back."""
    records = [episode("t", 0, [[1, None, 0], [0, 1, None]]), episode("u", 0, [[1], [1]])]
    batch = batch_of(*records)
    batch.trained_ERA[0, 1, 1] = False
    joint = build(name, "team", gamma=0.5).joint(batch)
    assert joint.index_B.tolist() == [0, 2, 3] and joint.next_B.tolist() == [1, -1, -1]
    assert joint.mask_BA.tolist() == [[True, True], [True, False], [True, True]]
    assert joint.rewards_B.tolist() == [0.5 + 0.5 * 1.0, 0.0, 1.0]
    assert joint.targets(torch.tensor([10.0, 20.0, 30.0]), 0.5).tolist() == [1.0 + 0.5**2 * 20, 0.0, 1.0], (
        "two rounds on"
    )
    assert joint.keys_B == [("t", 0), ("t", 2), ("u", 0)]
    numbers = torch.arange(12.0).view(2, 3, 2)
    assert joint.from_grid(numbers).tolist() == [[0, 1], [4, 0], [6, 7]]
    assert joint.to_grid(joint.from_grid(numbers) + 1)[0].tolist() == [[1, 2], [0, 0], [5, 0]]


def test_alternatives_are_no_joint_action():
    records = [episode("t", 0, [[1], [0]])]
    batch = batch_of(*records)
    batch.spoken_ERA = batch.trained_ERA = torch.ones(1, 2, 2, dtype=torch.bool)
    batch.alternatives = Alternatives(torch.full((1, 2, 2), -1), num_rounds=1)
    joint = JointActions.of(batch, torch.ones(1, 2), 1.0)
    assert joint.index_B.tolist() == [0] and joint.rewards_B.tolist() == [1.0]


def test_the_kl_penalties_are_subtracted_from_the_teams_reward():
    records = [episode("t", 0, [[1], [1]])]
    batch = batch_of(*records)
    for name, penalty in {"a": 0.25, "b": 0.5}.items():
        batch.rows[name]["kl_penalty"] = jagged([[penalty]], torch.float32)
    assert build("vdn", "team").joint(batch).rewards_B.tolist() == [0.25]


def test_advantages_are_q_minus_v():
    """With a sum every weight is 1. Silent agents get nothing."""
    records = [episode("t", 0, [[1, 0], [0, None]])]
    numbers = {"a": [0.5, 2.0, 1.0, -1.0], "b": [3.0, 3.25]}
    batch, _ = read(batch_of(*records), records, numbers)
    build("vdn", "team", whiten=False).assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == [1.5, -2.0, -2.0]
    assert batch.rows["b"]["advantages"].values().tolist() == [0.25]


def test_advantages_against_the_answers_of_other_samples():
    """Three samples of one task in one round; a's answers are worth 1, 2 and 6, b is silent in the last."""
    records = [episode("t", i, [[0], [0 if i < 2 else None]]) for i in range(3)]
    numbers = {"a": [9.0, 1.0, 9.0, 2.0, 9.0, 6.0], "b": [9.0, 4.0, 9.0, 3.0]}
    batch, _ = read(batch_of(*records), records, numbers)
    build("vdn", "team", whiten=False, advantage=Advantage.group).assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])
    assert batch.rows["b"]["advantages"].values().tolist() == pytest.approx([1.0, -1.0])
    alone = [episode("t", 0, [[0], [None]])]
    batch, _ = read(batch_of(*alone), alone, {"a": [1.0, 5.0]})
    build("vdn", "team", whiten=False, advantage=Advantage.group).assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == [0.0], "a group of one is compared with nothing"


@pytest.mark.parametrize("advantage,expected", [("group", [1 - 4, 2 - 3.5]), ("gradient", [0.5, 1.0])])
def test_truncated_turns_are_compared_but_not_trained(advantage, expected):
    """a's answers are worth 1, 2 and 6, the last cut off, and no row; b was never trained."""
    records = [episode("t", i, [[0], [0]]) for i in range(3)]
    records[2].turns[0].trained = False
    for record in records:
        record.turns[1].trained = False
    batch, critics = read(batch_of(*records), records, {"a": [0.5, 1.0, 1.0, 2.0, 9.0, 6.0]})
    assert list(batch.rows) == ["a"] and len(batch.rows["a"]) == 2
    learner = build("vdn", "team", whiten=False, advantage=Advantage[advantage], mixer_epochs=1)
    learner.assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == pytest.approx(expected)
    fit(learner, batch, critics)
    assert critics["a"].gradients.count_nonzero() == 6, "the utilities hear of it too"


def test_pairs_are_of_the_same_key_and_never_of_one_with_itself():
    pairs = sorted(map(tuple, pairs_within(["t", "u", "t", "v", "t"]).tolist()))
    assert pairs == [(0, 2), (0, 4), (2, 0), (2, 4), (4, 0), (4, 2)]


def test_whitening_is_per_policy_and_a_single_turn_is_compared_with_nothing():
    batch, records = two_rounds()
    read(batch, records)
    build("vdn", "team").assign_credit(batch)
    for rows in batch.rows.values():
        turns = torch.stack([row[0] for row in rows["advantages"].unbind()])
        assert float(turns.mean()) == pytest.approx(0, abs=1e-6) and float(turns.std()) == pytest.approx(1, abs=1e-3)
    assert whitened(torch.tensor([3.0]), torch.ones(1)).tolist() == [0.0]


def test_the_fit_descends_on_the_teams_error_and_v_follows_q():
    """One round: y = 1, Q_tot = 3 - 1 = 2. dL/dq_i = 2 (Q_tot - y), and dL/dv_i = 2 (v_i - q_i) / turns."""
    records = [episode("t", 0, [[1], [1]])]
    batch, critics = read(batch_of(*records), records, {"a": [0.0, 3.0], "b": [1.0, -1.0]})
    metrics = fit(build("vdn", "team", mixer_epochs=1), batch, critics)
    assert critics["a"].gradients.tolist() == [-3.0, 2.0] and critics["b"].gradients.tolist() == [2.0, 2.0]
    assert critics["a"].calls == ["renew", "last", "values"], "one round has nothing to bootstrap from"
    assert metrics["a"]["q_tot_loss"] == 1.0 and metrics["b"]["grad_norm"] == 1.0
    assert metrics["a"]["loss"] == metrics["a"]["q_tot_loss"] + metrics["a"]["v_loss"]
    assert batch.critic_data.utilities_ERA[0, 0].tolist() == [2.0, -2.0], "credit is given by what was fitted"


def test_every_pass_follows_a_forward_of_its_own():
    records = [episode("t", 0, [[1], [1]]), episode("u", 0, [[0], [0]])]
    batch, critics = read(batch_of(*records), records)
    fit(build("vdn", "team", mixer_epochs=3), batch, critics)
    assert critics["a"].calls == ["renew", "step", "values", "step", "values", "last", "values"]
    for _ in range(50):
        metrics = fit(build("vdn", "team"), batch, critics)
    assert metrics["a"]["q_tot_loss"] < 1e-6 and metrics["a"]["v_loss"] < 1e-6


def test_later_rounds_are_valued_by_targets_that_stay_until_they_are_renewed():
    records = [episode("t", 0, [[0, 1], [0, 1]])]
    batch, critics = read(batch_of(*records), records, {"a": [0.0, 0.0, 0.0, 4.0], "b": [0.0, 0.0, 0.0, 2.0]})
    learner = build("vdn", "team", gamma=0.5, mixer_epochs=1, target_update_every=2)
    fit(learner, batch, critics)
    # y = 0 + .5 (4 + 2) in round 1, 1 in round 2; L is a mean over the two
    assert critics["a"].gradients[1] == -3.0 and critics["a"].gradients[3] == 5.0
    kept = critics["a"].target.clone()
    assert critics["a"].numbers[3] != kept[3]
    fit(learner, batch, critics)
    assert torch.equal(critics["a"].target, kept), "not renewed yet"
    assert (
        critics["a"].gradients[1]
        == critics["a"].numbers[1]
        + 0.5 * critics["a"].gradients[1]
        + critics["b"].numbers[1]
        + 0.5 * critics["b"].gradients[1]
        - 3.0
    )
    present = critics["a"].numbers.clone()
    fit(learner, batch, critics)
    assert torch.equal(critics["a"].target, present), "every second step"


def test_an_additive_team_reward_is_decomposed():
    """Payoffs 1 - 2 x_1 + 3 x_2: fitted on all joint actions, the utilities differ by exactly what each agent adds."""
    scores = {(x, y): 1.0 - 2 * x + 3 * y for x in (0, 1) for y in (0, 1)}
    records = [episode("t", i, [[score], [score]]) for i, score in enumerate(scores.values())]
    batch, critics = read(batch_of(*records), records)
    # the same answer has the same utility, whatever the other agent said
    tie = {"a": torch.tensor([0, 0, 1, 1]), "b": torch.tensor([0, 1, 0, 1])}

    class Tied(TableCritic):
        async def descend(self, rows, last):
            gradients, group = rows["gradients"].values()[1::2], tie[self.name]
            summed = torch.zeros(2).index_add(0, group, gradients)
            self.numbers[1::2] -= self.lr * summed[group]
            return {}

    for name, critic in critics.items():
        critic.__class__, critic.name = Tied, name
        critic.numbers[:] = 0.0
        place_values(batch, name, critic._ragged(critic.numbers))
    learner = build("vdn", "team", mixer_epochs=200)
    metrics = fit(learner, batch, critics)
    assert metrics["a"]["q_tot_loss"] < 1e-9
    q_EA = batch.critic_data.utilities_ERA[:, 0]
    assert float(q_EA[2, 0] - q_EA[0, 0]) == pytest.approx(-2, abs=1e-4)
    assert float(q_EA[1, 1] - q_EA[0, 1]) == pytest.approx(3, abs=1e-4)


def test_a_batch_without_critic_inputs_is_an_error():
    batch, _ = two_rounds()
    with pytest.raises(ValueError, match="holds no utilities"):
        build("vdn", "team").assign_credit(batch)
    assert fit(build("vdn", "team"), batch, {}) == {}


def test_facts():
    vdn = LEARNERS.get("vdn")
    assert (vdn.default_credit, vdn.credits, vdn.reads_joint) == ("team", ("team",), False)
    own = build("vdn", "team")
    assert own.critics == UtilityCritics(shared=False) and own.fits_first and not own.compares_samples
    assert build("vdn", "team", share_utilities=True).critics == UtilityCritics(shared=True)
    assert build("vdn", "team", advantage=Advantage.group).compares_samples
    assert AGENTS == ("a", "b")
