"""IPPO against verl's own PPO functions and against numbers made by hand."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_gae_advantage_return

from marl.batch.build import joint_batch
from marl.batch.critic_inputs import LocalTokens, LocalTurns
from marl.batch.values import place_values, training_rows
from marl.learners import credit, trajectories
from marl.learners.trajectories import Trajectories
from marl.utils.ragged import dense, jagged
from tests.builders import (
    AGENTS,
    batch_of,
    build_learner as build,
    episode,
    episode_of_turns,
    turn_of_ids,
    two_samples,
)


def nested(values, rows):
    return torch.nested.nested_tensor_from_jagged(torch.as_tensor(values).float(), offsets=rows["responses"].offsets())


def one_round(count=6):
    """Episodes of one round with answers of 1 to 3 tokens, agent a alone."""
    rng = np.random.default_rng(0)
    episodes = [episode(f"t{i}", 0, [[float(rng.integers(2))], [None]]) for i in range(count)]
    for i, record in enumerate(episodes):
        turn = record.turns[0]
        turn.response_ids, turn.response_mask, turn.log_probs = (
            [3] * (1 + i % 3),
            [1] * (1 + i % 3),
            [-1.0] * (1 + i % 3),
        )
    return batch_of(*episodes)


def test_one_agent_is_ppo_bit_for_bit():
    """Advantages and returns are those of verl's function on verl's padded tensors."""
    batch = one_round()
    rows = batch.rows["a"]
    rows["values"] = nested(torch.randn(int(rows["responses"].offsets()[-1])), rows)
    build("ippo", gamma=0.5, token_gamma=0.99, lam=0.95).assign_credit(batch)
    mask = dense(rows["response_mask"])
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(mask)), mask.sum(1) - 1] = batch.scores_ERA[:, 0, 0].float()
    advantages, returns = compute_gae_advantage_return(rewards, dense(rows["values"]), mask.float(), 0.99, 0.95)
    assert torch.equal(dense(rows["advantages"]), advantages * mask)
    assert torch.equal(dense(rows["returns"]), returns * mask)


@pytest.mark.parametrize("gamma,lam,expected", [(1.0, 1.0, [0.6, 0.4]), (0.99, 0.95, [0.5702, 0.4])])
def test_the_rounds_of_an_agent_are_one_chain(gamma, lam, expected):
    """The oracle of GAE: rewards 0 and 1, values .4 and .6."""
    batch = batch_of(episode("t", 0, [[0, 1], [None, None]]))
    batch.critic_data.values_ERA = torch.tensor([[[0.4, 9.0], [0.6, 9.0]]])
    build("ippo", gamma=gamma, lam=lam, whiten=False).assign_credit(batch)
    # round 1 has one token, round 2 two: both carry their turn's advantage
    assert batch.rows["a"]["advantages"].values().tolist() == pytest.approx([expected[0], expected[1], expected[1]])
    assert batch.returns_ERA[0, :, 0].tolist() == pytest.approx([0.4 + expected[0], 1.0])
    assert batch.returns_ERA[0, :, 1].tolist() == [0.0, 0.0], "the other agent was silent"


def by_round(record, policies=("first", "later")):
    """The episode with its agents acting with another policy from round to round (``agents.<name>.policy_by_round``)."""
    for turn in record.turns:
        turn.policy = policies[min(turn.round, len(policies)) - 1]
    return record


@pytest.mark.parametrize("name", ["ippo", "mappo", "happo"])
@pytest.mark.parametrize("level", ["turn", "token"])
def test_a_trajectory_is_an_agents_whatever_policies_it_acts_with(name, level):
    """Scores 0 and 1, values 0: both rounds return 1, the first one too where a policy of its own spoke in it."""
    batch = batch_of(by_round(episode("t", 0, [[0, 1], [None, None]])))
    assert list(batch.rows) == ["first", "later"]
    if level == "turn":
        batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
    build(name, "own", whiten=False).assign_credit(batch)
    assert batch.rows["first"]["advantages"].values().tolist() == [1.0]
    assert batch.rows["later"]["advantages"].values().tolist() == [1.0, 1.0]
    if level == "turn":
        assert batch.returns_ERA[0, :, 0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("level", ["turn", "token"])
def test_how_rounds_are_shared_out_among_policies_changes_no_estimate(level):
    """Values bootstrap one another over policies as within one."""
    seen = []
    for policies in (("one",), ("first", "later")):
        records = [episode("t", i, [[i % 2, 1, 0], [1, 0, i % 3]]) for i in range(3)]
        batch = batch_of(*(by_round(record, policies) for record in records))
        if level == "turn":
            batch.critic_data.values_ERA = torch.linspace(-1, 1, batch.mask_ERA.numel()).view(batch.mask_ERA.shape)
        else:
            for rows in batch.rows.values():
                rows["values"] = nested(rows["turn_index"].values() / 7, rows)
        build("ippo", whiten=False, gamma=0.9, lam=0.8).assign_credit(batch)
        tokens = zip(
            *([rows[key].values() for rows in batch.rows.values()] for key in ("turn_index", "advantages")), strict=True
        )
        seen.append(
            sorted(
                (cell, value) for index, own in tokens for cell, value in zip(index.tolist(), own.tolist(), strict=True)
            )
        )
    assert seen[0] == seen[1]


def test_credit_of_kind_return_ends_the_estimate_at_every_turn():
    batch = batch_of(episode("t", 0, [[0, 1], [None, None]]))
    batch.critic_data.values_ERA = torch.tensor([[[0.4, 0.0], [0.6, 0.0]]])
    build("ippo", "influence", {"gamma": 0.3}, gamma=1.0, lam=0.5, whiten=False).assign_credit(batch)
    first = 0.3 / 1.3  # MAPoRL's reward of round 1: (0 + .3 * 1) / (1 + .3)
    assert batch.rows["a"]["advantages"].values().tolist() == pytest.approx([first - 0.4, 0.4, 0.4])


def test_tokens_of_later_rounds_bootstrap_those_of_earlier_ones():
    """With token values an agent's answers are one sequence, as in a packed row of verl's, at one discount for all of it."""
    batch = batch_of(episode("t", 0, [[0, 1], [1, 0]]), episode("u", 0, [[1, 1], [0, 0]]))
    for rows in batch.rows.values():
        rows["values"] = nested(torch.randn(int(rows["responses"].offsets()[-1])), rows)
    build("ippo", gamma=0.9, token_gamma=0.9, lam=0.8, whiten=False).assign_credit(batch)
    for a, name in enumerate(AGENTS):
        rows = batch.rows[name]
        # rows: episode t rounds 1 (one token) and 2 (two tokens), then episode u
        values, mask = rows["values"].values().view(2, 3), torch.ones(2, 3)
        rewards = torch.zeros(2, 3)
        rewards[:, 0], rewards[:, 2] = batch.scores_ERA[:, 0, a], batch.scores_ERA[:, 1, a]
        advantages = credit.gae(rewards, values, mask, 0.9, 0.8)
        torch.testing.assert_close(rows["advantages"].values().view(2, 3), advantages)
        torch.testing.assert_close(rows["returns"].values().view(2, 3), advantages + values)


def test_gamma_discounts_by_rounds_of_the_episode():
    """Turns in rounds 1 and 4, worth 0 and 1, at gamma .5: .125 = .5 ** 3, and with V' = .4 the first step's delta is
    .125 * .4; lambda counts the agent's own turns."""
    batch = batch_of(episode("t", 0, [[0, None, None, 1], [0, 0, 0, 0]]))
    batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
    build("ippo", gamma=0.5, whiten=False).assign_credit(batch)
    assert batch.returns_ERA[0, :, 0].tolist() == [0.125, 0, 0, 1.0]
    batch.critic_data.values_ERA = torch.tensor([[[0.2, 0.0], [0.0, 0.0], [0.0, 0.0], [0.4, 0.0]]])
    build("ippo", gamma=0.5, lam=0.25, whiten=False).assign_credit(batch)
    first = 0.125 * 0.4 - 0.2 + 0.125 * 0.25 * (1 - 0.4)
    assert batch.rows["a"]["advantages"].values()[0].item() == pytest.approx(first)


@pytest.mark.parametrize("name", ["ippo", "grpo", "magrpo", "rae"])
def test_gamma_means_the_same_to_every_learner(name):
    """Round 1's return of an agent that speaks in rounds 1 and 3, silent or untrained in round 2: gamma ** 2."""
    for trained in (None, [1, 2]):
        batch = batch_of(episode("t", 0, [[0, None, 1], [None, None, None]]), train_rounds=trained)
        learner = build(name, "team", gamma=0.5)
        if name == "ippo":
            batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
            learner.config.whiten = False
            learner.assign_credit(batch)
            returns = batch.returns_ERA
        else:
            returns = trajectories.returns(batch, learner.credit.of(batch), learner.credit.kind, learner.config.gamma)
            if name != "rae":
                returns = learner.returns(batch, learner.credit.of(batch))
        assert returns[0, 0, 0] == 0.25


def test_tokens_of_a_turn_have_a_discount_of_their_own():
    """Three tokens in round 1, one in round 4; the outcome 1 reaches round 1 at gamma ** 3, whose tokens are token_gamma apart."""
    batch = batch_of(episode("t", 0, [[0, None, None, 1], [None]]))
    turn_tokens(batch, "a", [3, 1])
    rows = batch.rows["a"]
    rows["values"] = nested([0.0] * 4, rows)
    build("ippo", gamma=0.5, whiten=False).assign_credit(batch)
    assert rows["returns"].values().tolist() == [0.125, 0.125, 0.125, 1.0], "by default tokens are not discounted"
    build("ippo", gamma=0.5, token_gamma=0.5, whiten=False).assign_credit(batch)
    assert rows["returns"].values().tolist() == [0.125 / 4, 0.125 / 2, 0.125, 1.0]
    rows["values"] = nested([0.1, 0.2, 0.3, 0.4], rows)
    build("ippo", gamma=0.5, token_gamma=0.9, lam=0.8, whiten=False).assign_credit(batch)
    fourth = 1 - 0.4
    third = 0.125 * 0.4 - 0.3 + 0.125 * 0.8 * fourth
    second = 0.9 * 0.3 - 0.2 + 0.9 * 0.8 * third
    first = 0.9 * 0.2 - 0.1 + 0.9 * 0.8 * second
    assert rows["advantages"].values().tolist() == pytest.approx([first, second, third, fourth])


def turn_tokens(batch, name, lengths):
    """Rows of a turn each, with so many tokens."""
    cells = [int(row[0]) for row in batch.rows[name]["turn_index"].unbind()]
    index = [[cell] * length for cell, length in zip(cells, lengths, strict=True)]
    ones = [[1] * length for length in lengths]
    columns = {"responses": ones, "response_mask": ones, "turn_index": index}
    batch.rows[name] = TensorDict(
        {key: jagged(rows, torch.long) for key, rows in columns.items()}, batch_size=[len(cells)]
    )


def test_rewards_of_untrained_rounds_go_to_the_last_trained_one():
    batch = batch_of(episode("t", 0, [[0, 1], [0, 0]]), train_rounds=[1])
    batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
    build("ippo", whiten=False, gamma=0.5).assign_credit(batch)
    assert batch.rows["a"]["advantages"].values().tolist() == [0.5]
    spoke = torch.ones(1, 3, 1, dtype=torch.bool)
    trained = torch.tensor([[[False], [True], [False]]])
    folded = credit.fold_untrained(torch.tensor([[[1.0], [2.0], [4.0]]]), spoke, trained, 0.5)
    assert folded[0, :, 0].tolist() == [0.0, 4.0, 0.0], "what came before it is not its doing"
    silent = torch.tensor([[[True], [False], [False], [True]]])
    first = torch.tensor([[[True], [False], [False], [False]]])
    folded = credit.fold_untrained(torch.tensor([[[1.0], [9.0], [9.0], [4.0]]]), silent, first, 0.5)
    assert folded[0, :, 0].tolist() == [1.5, 0.0, 0.0, 0.0], "three rounds later, whoever spoke in between"


def test_whitening_gives_each_policy_mean_0_and_deviation_1():
    batch = one_round(30)
    batch.critic_data.values_ERA = torch.randn(batch.mask_ERA.shape)
    build("ippo").assign_credit(batch)
    advantages_E = dense(batch.rows["a"]["advantages"])[:, 0]
    assert float(advantages_E.mean()) == pytest.approx(0, abs=1e-5) and float(advantages_E.std()) == pytest.approx(
        1, abs=1e-3
    )


@pytest.mark.parametrize("level", ["turn", "token"])
def test_the_kl_penalty_is_subtracted_from_the_reward(level):
    batch = batch_of(episode("t", 0, [[None, 1], [None, None]]))
    rows = batch.rows["a"]
    rows["kl_penalty"] = nested([0.25, 0.5], rows)
    if level == "turn":
        batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
    else:
        rows["values"] = nested([0.0, 0.0], rows)
    build("ippo", whiten=False).assign_credit(batch)
    expected = {"turn": [0.25, 0.25], "token": [0.25, 0.5]}  # 1 - .75, and of the tokens: 1 - .5, and .5 - .25
    assert rows["advantages"].values().tolist() == expected[level]


def test_trajectories_keep_the_order_of_rounds_whatever_the_order_of_rows():
    batch = two_samples()
    cells = torch.tensor([7, 5, 3, 1, 1])  # (1,1,1) (1,0,1) (0,1,1) (0,0,1) twice: two tokens
    plan = Trajectories(cells, batch, separate_turns=False)
    laid = plan.to_matrix(torch.tensor([70.0, 50.0, 30.0, 10.0, 11.0]))
    assert laid.tolist() == [[10.0, 11.0, 30.0], [50.0, 70.0, 0.0]]
    assert plan.from_matrix(laid).tolist() == [70.0, 50.0, 30.0, 10.0, 11.0]
    alone = Trajectories(cells, batch, separate_turns=True)
    assert alone.mask_NT.sum(1).tolist() == [2.0, 1.0, 1.0, 1.0] and alone.first_D.tolist() == [3, 2, 1, 0]


def test_values_and_returns_find_their_way_back_to_what_was_read():
    """A value that goes to the grid comes back beside its own return, at its own place of its own row."""
    records = [episode("t", 0, [[0, 1], [1, 0]]), episode("u", 0, [[1, None], [0, 0]])]
    batch = batch_of(*records)
    batch.critic_data.value_rows = LocalTurns().rows(records, batch)
    for name, rows in batch.critic_data.value_rows.items():
        place_values(
            batch, name, jagged([[float(c) for c in row] for row in rows["turn_index"].unbind()], torch.float32)
        )
    assert torch.equal(
        batch.critic_data.values_ERA[batch.trained_ERA], torch.arange(8).view(2, 2, 2).float()[batch.trained_ERA]
    )
    build("ippo", whiten=False, lam=0.0).assign_credit(batch)
    for name in batch.critic_data.value_rows:
        rows = training_rows(batch, name)
        cells = rows["turn_index"].values()
        assert torch.equal(rows["values"].values(), cells.float())
        assert torch.equal(rows["returns"].values(), batch.returns_ERA.flatten()[cells])
        assert rows["value_mask"].values().all()


def test_values_of_turns_are_read_at_the_last_token_of_the_prompt():
    """Prompts 1 2 and 1 2 3 9, which extends the first turn, share a row; 7 stands alone."""
    first, second, other = (
        turn_of_ids(*ids) for ids in (("a", 1, [1, 2], [3]), ("a", 2, [1, 2, 3, 9], [4]), ("a", 3, [7], [5]))
    )
    record = episode_of_turns(first, second, other)
    rows = LocalTurns().rows([record], joint_batch([record], AGENTS, dict.fromkeys(AGENTS, 1.0)))["a"]
    assert [row.tolist() for row in rows["input_ids"].unbind()] == [[1, 2, 3, 9], [7]]
    assert [row.tolist() for row in rows["read_at"].unbind()] == [[1, 3], [0]]


def test_values_of_tokens_are_read_one_position_before_the_token():
    records = [episode("t", 0, [[0, 1], [1, 0]])]
    batch = batch_of(*records)
    rows = LocalTokens().rows(records, batch)["a"]
    # prompts have two tokens: the first answer token is foretold at position 1
    assert [row.tolist() for row in rows["read_at"].unbind()] == [[1], [1, 2]]
    assert [row.tolist() for row in rows["input_ids"].unbind()] == [[1, 2, 3], [1, 2, 3, 3]]


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert credit.explained_variance(returns, returns) == 1.0
    assert credit.explained_variance(torch.full((4,), 7.0), returns) == 0.0
    assert credit.explained_variance(-returns, returns) == -3.0
    rounding = torch.tensor([1.0, -1.0, 0.5, 0.0]) * 3e-9
    assert credit.explained_variance(torch.tensor([0.1, 0.2, -0.1, 0.0]), rounding) == 0.0, "nothing to explain"
    assert credit.explained_variance(1e-3 * returns, 1e-3 * returns) == 1.0


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_is_verls_where_steps_are_masked_out_in_the_middle(gamma, lam):
    """As between the answers of a packed row: what is masked out is stepped over, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 8, 12, generator=generator)
    mask = (torch.rand(8, 12, generator=generator) > 0.4).float()
    _, returns = compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    assert torch.equal(credit.gae(rewards, values, mask, gamma, lam) + values, returns)


def test_a_single_decision_is_compared_with_nothing():
    batch = batch_of(episode("t", 0, [[1], [0]]), episode("u", 0, [[1], [None]]))
    batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
    build("ippo").assign_credit(batch)
    assert batch.rows["b"]["advantages"].values().tolist() == [0.0]
    assert batch.rows["a"]["advantages"].values().isfinite().all()


def test_value_heads_take_the_attention_of_the_configuration_on_gpus_too(monkeypatch):
    """verl's loader would ask for flash attention; ours is found first for its device and vendor."""
    from verl.workers.engine import EngineRegistry

    from marl.platform.engine import CPUEngineWithValueHead, EngineWithValueHead

    assert EngineRegistry.get_engine_cls("value_model", "fsdp2") is CPUEngineWithValueHead
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2") is EngineWithValueHead
