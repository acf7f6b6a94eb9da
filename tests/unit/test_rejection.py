"""A token that ``algorithm.rollout_correction`` rejects is no decision: estimates step over it, as verl's do, and critics learn nothing of it."""

import asyncio

import pytest
import torch
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import compute_gae_advantage_return

from marl.batch.critic_inputs import CENTRAL, CentralTokens, LocalTokens, LocalTurns
from marl.batch.kl import correct
from marl.batch.rows import drop_rejected
from marl.batch.values import place_values, training_rows
from marl.cluster.critic_group import Critics
from marl.learners.trajectories import Decisions, penalties
from marl.utils.ragged import dense, jagged
from tests.builders import batch_of, build_learner as build, episode


def nested(values, rows):
    return torch.nested.nested_tensor_from_jagged(torch.as_tensor(values).float(), offsets=rows["responses"].offsets())


def long_answers(lengths=(4, 3, 5)):
    """Episodes of one round in which a answers with so many tokens, its scores 0, 1, 0, ..."""
    records = [episode(f"t{i}", 0, [[float(i % 2)], [None]]) for i in range(len(lengths))]
    for record, length in zip(records, lengths, strict=True):
        turn = record.turns[0]
        turn.response_ids, turn.response_mask, turn.log_probs = [3] * length, [1] * length, [-1.0] * length
    return batch_of(*records)


def reject(rows, *tokens):
    """Take tokens, each a pair of row and place, out of ``response_mask``."""
    mask = dense(rows["response_mask"])
    for row, place in tokens:
        mask[row, place] = 0
    offsets = rows["response_mask"].offsets()
    parts = [mask[i, :length] for i, length in enumerate(offsets.diff().tolist())]
    rows["response_mask"] = rows["loss_mask"] = torch.nested.nested_tensor_from_jagged(
        torch.cat(parts), offsets=offsets
    )


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("gamma,lam", [(1.0, 0.5), (0.99, 0.95), (1.0, 0.0)])
def test_rejected_tokens_are_stepped_over_as_in_verl(gamma, lam, whiten):
    batch = long_answers()
    rows = batch.rows["a"]
    generator = torch.Generator().manual_seed(0)
    rows["values"] = nested(torch.randn(12, generator=generator), rows)
    rows["kl_penalty"] = nested(torch.rand(12, generator=generator), rows)
    reject(rows, (0, 1), (0, 2), (1, 0), (2, 3))
    build("ippo", token_gamma=gamma, lam=lam, whiten=whiten).assign_credit(batch)
    mask = dense(rows["response_mask"]).float()
    rewards = -dense(rows["kl_penalty"])
    rewards[torch.arange(3), torch.tensor([3, 2, 4])] += batch.scores_ERA[:, 0, 0]
    advantages, returns = compute_gae_advantage_return(rewards, dense(rows["values"]), mask, gamma, lam)
    if not whiten:
        advantages = returns - dense(rows["values"])
    torch.testing.assert_close(dense(rows["advantages"]), advantages * mask, atol=1e-5, rtol=0)
    torch.testing.assert_close(dense(rows["returns"]) * mask, returns * mask)


def test_the_reward_of_a_turn_whose_last_token_was_rejected_is_not_lost():
    """It is paid at the last token that is left, where verl's estimate would not hear of it."""
    batch = long_answers((2, 3))
    rows = batch.rows["a"]
    rows["values"] = nested([0.0] * 5, rows)
    reject(rows, (1, 2))
    build("ippo", whiten=False).assign_credit(batch)
    assert [row.tolist() for row in rows["advantages"].unbind()] == [[0, 0], [1, 1, 0]]


def test_rejected_tokens_have_no_kl_penalty():
    """Neither to a learner that counts tokens nor to one that counts turns."""
    batch = long_answers((2, 3))
    rows = batch.rows["a"]
    rows["kl_penalty"] = nested([0.5, 0.25, 8.0, 0.125, 8.0], rows)
    reject(rows, (1, 0), (1, 2))
    assert penalties(batch)[:, 0, 0].tolist() == [0.75, 0.125]
    assert Decisions.of(batch, rows).penalties_D.tolist() == [0.5, 0.25, 0.125]
    batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
    assert Decisions.of(batch, rows).penalties_D.tolist() == [0.75, 0.125]


def test_turns_of_which_nothing_is_left_are_no_decisions_of_a_turns_critic():
    batch = long_answers((2, 3))
    batch.critic_data.values_ERA = torch.tensor([[[5.0, 0.0]], [[0.5, 0.0]]])
    reject(batch.rows["a"], (0, 0), (0, 1))
    metrics = build("ippo", whiten=False).assign_credit(batch)
    assert [row.tolist() for row in batch.rows["a"]["advantages"].unbind()] == [[0, 0], [0.5, 0.5, 0.5]]
    assert metrics["value/a/value"] == 0.5 and metrics["value/a/return"] == 1.0


class Words:
    """Two ids for every text, whatever it says."""

    bos_token_id = None

    def encode(self, text, **_):
        return [7, 7]


@pytest.mark.parametrize("read", ["local", "central"])
def test_values_of_tokens_stay_on_their_own_rows_where_others_were_rejected(read):
    """Servers and trainer differ by 3 in all of b's answer and in one token of a's second: the rows that are left are
    numbered token by token, and come back to the critic beside their own returns."""
    records = [episode("t", 0, [[0, 1], [1, None]]), episode("u", 0, [[1, 0], [0, 1]])]
    batch = batch_of(*records)
    for rows in batch.rows.values():
        gap = torch.zeros(len(rows["responses"].values()))
        gap[(rows["turn_index"].values() == 2).nonzero()[:1]] = 3.0  # a's second answer: one token of two
        gap[rows["turn_index"].values() == 1] = 3.0  # b's first: its only token
        gap[rows["turn_index"].values() == 4] = -3.0  # a's first in the other episode, whose row is in the middle
        rows["old_log_probs"] = nested(rows["rollout_log_probs"].values() + gap, rows)
        settings = RolloutCorrectionConfig(rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
        correct(rows, settings)
    drop_rejected(batch)
    assert {name: len(rows) for name, rows in batch.rows.items()} == {"a": 3, "b": 2}
    assert not batch.trained_ERA[0, 0, 1] and not batch.trained_ERA[1, 0, 0]
    reader = LocalTokens() if read == "local" else CentralTokens(Words())
    batch.critic_data.value_rows = reader.rows(records, batch)
    number = 0
    for name, rows in batch.critic_data.value_rows.items():
        count = len(rows["read_at"].values())
        values = torch.arange(number, number + count).float()
        place_values(batch, name, torch.nested.nested_tensor_from_jagged(values, offsets=rows["read_at"].offsets()))
        number += count
    held = [row.tolist() for name in ("a", "b") for row in batch.rows[name]["values"].unbind()]
    assert held == [[0], [1, 2], [3, 4], [5], [6, 7]]
    metrics = build("ippo", whiten=False).assign_credit(batch)
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    for name, own in (("a", [0, 1, 2, 3, 4]), ("b", [5, 6, 7])) if read == "local" else ((CENTRAL, range(8)),):
        rows = training_rows(batch, name)
        assert rows["values"].values().tolist() == list(own)
        kept = [place for place in own if place != 1]
        assert rows["value_mask"].values().tolist() == [int(place in kept) for place in own]
        assert rows["returns"].values().isfinite().all()


def test_a_critic_all_of_whose_turns_were_rejected_has_nothing_to_learn():
    """Its policy is not updated and no number of it is logged; the other one's go on."""
    records = [episode("t", 0, [[1, 0], [0, 1]])]
    batch = batch_of(*records)
    reject(batch.rows["b"], (0, 0), (1, 0), (1, 1))
    drop_rejected(batch)
    batch.critic_data.value_rows = LocalTokens().rows(records, batch)
    assert list(batch.critic_data.value_rows) == ["a"]
    place_values(batch, "a", jagged([[0.5], [0.5, 0.5]], torch.float32))
    metrics = build("ippo").assign_credit(batch)
    assert metrics and all(key.startswith("value/a/") for key in metrics)
    assert training_rows(batch, "a")["returns"].values().isfinite().all()


class Places:
    """A critic whose value of a token is the token's place in its row."""

    async def compute_values(self, rows):
        return torch.nested.nested_tensor_from_jagged(rows["read_at"].values().float(), rows["read_at"].offsets())


@pytest.mark.parametrize("reader", [LocalTokens(), CentralTokens(Words()), LocalTurns()])
def test_critics_that_had_read_before_a_rejection_value_what_is_left(reader):
    """As in a step: rows are read to see whether they fit, then some are rejected, then the rest is valued."""
    records = [episode(f"t{i}", 0, [[0, 1], [1, None]]) for i in range(2)]
    batch = batch_of(*records)
    critics = Critics({name: Places() for name in ("a", "b", CENTRAL)}, reader)
    critics.read(records, batch)
    rows = batch.rows["a"]
    reject(rows, (0, 0))
    reject(batch.rows["b"], (0, 0), (1, 0))
    drop_rejected(batch)
    expected = reader.rows(records, batch)
    asyncio.run(critics.value(records, batch))
    assert list(batch.critic_data.value_rows) == list(expected)
    for name, own in expected.items():
        assert torch.equal(batch.critic_data.value_rows[name]["read_at"].values(), own["read_at"].values())
    if not isinstance(reader, LocalTurns):
        assert all(len(part["values"].values()) == len(part["responses"].values()) for part in batch.rows.values())
