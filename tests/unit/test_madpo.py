"""Multi-agent DPO: joint pairs of a team, and one margin of all agents within the sigmoid."""

import asyncio
import math

import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import logsigmoid

from marl.methods.choice import joint_contrasts
from marl.methods.losses import PreferenceLoss, share_margins
from tests.builders import episode
from tests.method_rows import method, rows_of, two_pairs

SPEAKERS = {"a": ["a"], "b": ["b"]}


def of_b():
    """Pair 7: chosen .2 less rejected -.1 gives .3; pair 8, of b alone: -.4 less .1 gives -.5."""
    log_probs, reference = [[-0.3, -0.5], [-1.1], [-1.4], [-0.9]], [[-0.5, -0.5], [-1.0], [-1.0], [-1.0]]
    return rows_of(log_probs, [[1, 1], [1], [1], [1]], [7, 7, 8, 8], [0, 1, 0, 1], reference)


def test_margins_of_all_policies_add_up_and_the_mean_is_over_all_pairs():
    """Pair 7: -.8 + .3, pair 8: -.5 of b alone, pair 9: 1 of a alone."""
    rows = {"a": two_pairs(), "b": of_b()}
    share_margins(rows)
    torch.testing.assert_close(rows["a"]["margin"], torch.tensor([-0.5, -0.5, 1, 1]).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(rows["b"]["margin"], torch.tensor([-0.5] * 4).double(), atol=1e-6, rtol=0)
    assert rows["a"]["pairs"].tolist() == rows["b"]["pairs"].tolist() == [3] * 4
    slopes = [0.5 / (1 + math.exp(0.5 * margin)) / 3 for margin in (-0.5, 1)]
    expected = [-slopes[0], -slopes[0], 0, slopes[0], -slopes[1], -slopes[1], slopes[1]]
    found = method("madpo", beta=0.5).gradients(rows["a"]).values()
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-7, rtol=1e-5)


def test_measures_are_the_teams_margin_and_the_agents_own_rewards():
    rows = {"a": two_pairs(), "b": of_b()}
    share_margins(rows)
    found = method("madpo", beta=0.5).measure(rows["a"])
    assert found["loss"] == pytest.approx((math.log(1 + math.exp(0.25)) + math.log(1 + math.exp(-0.5))) / 2)
    assert found["preference_margin"] == pytest.approx(0.5 * 0.25) and found["preference_accuracy"] == 0.5
    assert found["chosen_reward"] == pytest.approx(-0.025) and found["rejected_reward"] == pytest.approx(-0.075)


def test_what_agents_of_a_shared_policy_say_alike_counts_once_in_a_row():
    """Beta would be twice as large."""
    row = {"prompt": "2 + 2", "chosen": "4", "rejected": {"a": "5", "b": "5", "c": "6"}}
    shared = {agent: ["team"] for agent in "abc"}
    (example,) = method("madpo").of_row(row, shared)
    assert [[turn.text for turn in side] for side in example.sides] == [["4", "4"], ["5", "6"]]
    (example,) = method("madpo").of_row(row, {"a": ["a"], "b": ["b"]})
    assert [len(side) for side in example.sides] == [2, 2]


TOKENS = {"a": [[0, 2], [1], [2, 2], [0]], "b": [[1], [2, 0], [0], [1, 1]]}


@pytest.mark.parametrize(("loss", "reference"), [("sigmoid", True), ("sigmoid", False), ("ipo", True), ("hinge", True)])
def test_two_policies_descend_the_joint_loss(loss, reference):
    """Categorical policies, whose logits autograd differentiates through the loss as its paper writes it."""
    torch.manual_seed(1)
    logits = {name: torch.randn(3, dtype=torch.float64, requires_grad=True) for name in TOKENS}
    first = {name: torch.randn(3, dtype=torch.float64) for name in TOKENS}
    madpo = method("madpo", beta=0.7, loss=PreferenceLoss(loss), reference=reference)
    rows, says = {}, {}
    for name, tokens in TOKENS.items():
        said = [logits[name].log_softmax(-1)[own] for own in tokens]
        held = [first[name].log_softmax(-1)[own].tolist() for own in tokens]
        masks = [[1] * len(own) for own in tokens]
        rows[name] = rows_of(
            [own.tolist() for own in said], masks, [0, 0, 1, 1], [0, 1, 0, 1], held if reference else None
        )
        says[name] = [own.sum() - (sum(held[i]) if reference else 0) for i, own in enumerate(said)]
    h = sum(torch.stack([own[0] - own[1], own[2] - own[3]]) for own in says.values())
    exact = {"sigmoid": -logsigmoid(0.7 * h), "ipo": (h - 1 / 1.4) ** 2, "hinge": torch.relu(1 - 0.7 * h)}[loss].mean()
    expected = torch.autograd.grad(exact, list(logits.values()), retain_graph=True)
    share_margins(rows)
    for (name, own), wanted in zip(logits.items(), expected, strict=True):
        said = torch.cat([own.log_softmax(-1)[tokens] for tokens in TOKENS[name]])
        found = torch.autograd.grad((madpo.gradients(rows[name]).values() * said).sum(), own)[0]
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
        assert madpo.measure(rows[name])["loss"] == pytest.approx(float(exact), rel=1e-5)


def test_for_one_agent_it_is_dpo():
    rows, dpo = {"a": two_pairs()}, method("dpo", beta=0.3)
    share_margins(rows)
    madpo = method("madpo", beta=0.3)
    assert madpo.measure(rows["a"]) == dpo.measure(two_pairs())
    assert torch.equal(madpo.gradients(rows["a"]).values(), dpo.gradients(two_pairs()).values())


class Workers:
    """Placeholder for a policy's workers: a step adds 1 to every log-prob of the chosen sides."""

    def __init__(self, calls, rows):
        self.calls, self.rows, self.shift = calls, rows, 0.0

    def said(self, shift):
        side_T = self.rows["side"].repeat_interleave(self.rows["responses"].offsets().diff())
        values = self.rows["ref_log_prob"].values() + shift * (side_T == 0)
        column = torch.nested.nested_tensor_from_jagged(values, offsets=self.rows["responses"].offsets())
        return TensorDict({"log_probs": column}, batch_size=[len(self.rows)])

    async def compute_log_prob(self, rows):
        await asyncio.sleep(0)
        self.calls.append("read")
        return self.said(self.shift)

    async def compute_ref_log_prob(self, rows):
        return self.said(0.0)

    async def descend(self, rows, last):
        self.calls.append("last" if last else "step")
        self.shift += 1.0
        return {"loss": -1.0}


def test_no_policy_moves_before_all_are_read():
    """Margins are 0 at first; after one step 2 + 1 (pair 7), 1 (pair 8) and 2 (pair 9)."""
    rows, calls = {"a": two_pairs(), "b": of_b()}, []
    policies = {name: Workers(calls, own.clone()) for name, own in rows.items()}
    madpo = method("madpo", epochs=2)
    found = asyncio.run(madpo.update(rows, policies))
    assert calls == ["read", "read", "step", "step", "read", "read", "last", "last"]
    assert found["a"]["preference_margin"] == pytest.approx(0.1 * (4 + 2) / 2)
    assert found["b"]["preference_margin"] == pytest.approx(0.1 * (4 + 1) / 2)
    assert found["a"]["trained_tokens"] == 6
    evaluated = asyncio.run(madpo.evaluate(rows, policies))
    assert evaluated["a"]["preference_margin"] == pytest.approx(2 * found["a"]["preference_margin"])
    assert asyncio.run(madpo.update({}, policies)) == {}, "a step without contrast"


def written(*scores, task="t"):
    """Episodes of two agents with one turn each, and the team's score."""
    records = []
    for sample, score in enumerate(scores):
        record = episode(task, sample, [[0], [1]])
        for turn in record.turns:
            turn.text = f"{turn.agent}{sample}"
        object.__setattr__(record.score, "value", score)
        records.append(record)
    return records


def texts(pairs):
    return ["".join(turn.text for turn in side) for pair in pairs for side in pair.sides]


def test_a_pair_is_what_all_agents_said_in_two_episodes():
    records = written(0.0, 1.0, 0.5, 0.0)
    pairs, without = joint_contrasts(records + written(1.0, 1.0, task="u"), SPEAKERS, False, None)
    assert texts(pairs) == ["a1b1", "a3b3", "a2b2", "a0b0"] and without == 1
    assert [[turn.policy for turn in side] for side in pairs[0].sides] == [["a", "b"], ["a", "b"]]


def test_the_pairs_of_the_widest_difference_may_repeat_an_episode():
    pairs, _ = joint_contrasts(written(0.0, 1.0, 0.5), SPEAKERS, False, 2)
    assert texts(pairs) == ["a1b1", "a0b0", "a1b1", "a2b2"]
    assert len(joint_contrasts(written(0.0, 1.0, 0.5), SPEAKERS, False, 9)[0]) == 3


def test_a_team_that_did_not_play_to_its_end_is_no_pair():
    records = written(0.0, -1.0)
    records[0].failure = "overflow"
    assert joint_contrasts(records, SPEAKERS, False, None) == ([], 1)


def test_teams_without_contrast_are_no_pair():
    cut, same, other = written(1.0, 0.0), written(1.0, 0.0), written(1.0, 0.0)
    cut[1].turns[0].stop_reason, cut[1].turns[0].trained = "length", False  # as a run marks it
    for turn in [turn for record in same for turn in record.turns]:
        turn.text = "so"
    other[1].turns[1].observation = [{"role": "user", "content": "2"}]
    for records in (cut, same, written(1.0, 1.0)):
        assert joint_contrasts(records, SPEAKERS, False, None) == ([], 1)
    assert joint_contrasts(other, SPEAKERS, True, None) == ([], 2)
    assert len(joint_contrasts(other, SPEAKERS, False, None)[0]) == 1


def test_agents_that_are_not_trained_are_no_part_of_it():
    records = written(1.0, 0.0)
    records[1].turns[1].stop_reason = "length"
    found = method("madpo").of_episodes(records, {"a": ["a"]})
    assert texts(found.examples) == ["a0", "a1"]
    assert found.metrics == {"method/pairs": 1.0, "method/tasks_without_contrast": 0.0}


def test_a_row_is_one_pair_of_what_all_say():
    row = {"prompt": "2", "chosen": {"a": "4", "b": "four"}, "rejected": {"a": "5", "b": "five"}}
    assert texts(method("madpo").of_row(row, SPEAKERS)) == ["4four", "5five"]
    assert texts(method("madpo").of_row(row | {"agent": "b"}, SPEAKERS)) == ["four", "five"]
    assert method("madpo").of_row(row | {"rejected": row["chosen"]}, SPEAKERS) == []
