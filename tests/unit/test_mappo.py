"""MAPPO is IPPO with another critic and another default credit; and the chain of all agents' decisions, where it is asked for."""

import pytest
import torch
from tensordict import TensorDict

from marl.batch.build import joint_batch
from marl.batch.critic_spec import CentralCritic, LocalCritics
from marl.learners import LEARNERS, credit
from tests.builders import AGENTS, batch_of, branch, build_learner as build, episode, grid_of, two_samples


def test_with_the_same_values_and_credit_it_is_ippo():
    results = []
    for name in ("ippo", "mappo"):
        batch = two_samples()
        batch.critic_data.values_ERA = torch.linspace(0, 1, batch.mask_ERA.numel()).view_as(batch.mask_ERA)
        build(name, "team", lam=0.9).assign_credit(batch)
        results.append(batch)
    for policy in results[0].rows:
        assert torch.equal(*(batch.rows[policy]["advantages"].values() for batch in results))
    assert torch.equal(results[0].returns_ERA, results[1].returns_ERA)


def test_facts():
    ippo, mappo = LEARNERS.get("ippo"), LEARNERS.get("mappo")
    assert (ippo.critics, ippo.default_credit) == (LocalCritics(), "own")
    assert (mappo.critics, mappo.default_credit) == (CentralCritic(), "team")


@pytest.mark.slow
def test_auto_credit_is_the_learners_default(compose_config, cold_assets):
    from marl.preflight.prepare import prepare

    for learner, expected in {"ippo": "own", "mappo": "team", "grpo": "own"}.items():
        config = prepare(compose_config(f"assets={cold_assets}", f"learner={learner}", "credit=auto")).config
        assert config.credit.name == expected


CHAIN = {"gamma": 1.0, "lam": 1.0}, (0.6, 0.4)
DISCOUNTED = {"gamma": 0.99, "lam": 0.95}, (0.5702, 0.4)
SAME_ROUND = {"gamma": 0.99, "lam": 0.95}, (0.2 + 0.95 * 0.4, 0.4)


def chained(batch, credit="team", **options):
    learner = build("mappo", credit, whiten=False, chain=True, **options)
    learner.check({})
    learner.assign_credit(batch)
    return batch


@pytest.mark.parametrize("options,expected,round", [(*CHAIN, 1), (*CHAIN, 2), (*DISCOUNTED, 2), (*SAME_ROUND, 1)])
def test_the_oracle_of_the_chain(options, expected, round):
    """Rewards 0 and 1, values .4 and .6: b speaks beside a, whose round pays its mean to b once, or in the round after a's.
    Gamma discounts by rounds: nothing within one; lambda counts every turn of the chain."""
    scores = [[0], [2]] if round == 1 else [[0, None], [None, 1]]
    batch = batch_of(episode("t", 0, scores))
    batch.critic_data.values_ERA = torch.full(batch.mask_ERA.shape, 9.0)
    batch.critic_data.values_ERA[0, 0, 0], batch.critic_data.values_ERA[0, round - 1, 1] = 0.4, 0.6
    chained(batch, **options)
    assert batch.rows["a"]["advantages"].values().tolist() == pytest.approx([expected[0]])
    assert batch.rows["b"]["advantages"].values().tolist() == pytest.approx([expected[1]] * round), "a token a round"
    returns = batch.returns_ERA[0, 0, 0], batch.returns_ERA[0, round - 1, 1]
    assert [float(value) for value in returns] == pytest.approx([0.4 + expected[0], 1.0])


def test_a_chain_goes_through_all_agents_of_all_rounds():
    """Two rounds of two, gamma .5, lambda .5; by hand, from the end: values .1 .2 .3 .4, rewards 0, 1/2, 0, 1."""
    batch = batch_of(episode("t", 0, [[1, 1], [0, 1]]), episode("u", 0, [[0, 0], [0, 0]]))
    batch.critic_data.values_ERA = torch.tensor([[[0.1, 0.2], [0.3, 0.4]], [[0.0, 0.0], [0.0, 0.0]]])
    chained(batch, gamma=0.5, lam=0.5)
    fourth = 1 - 0.4
    third = 0.4 - 0.3 + 0.5 * fourth
    second = 0.5 + 0.5 * 0.3 - 0.2 + 0.25 * third
    first = 0.2 - 0.1 + 0.5 * second
    # a row a turn, of one token in round 1 and two in round 2
    assert batch.rows["a"]["advantages"].values().tolist() == pytest.approx([first, third, third, 0, 0, 0])
    assert batch.rows["b"]["advantages"].values().tolist() == pytest.approx([second, fourth, fourth, 0, 0, 0])


def test_tokens_are_links_of_the_chain_and_keep_their_penalties():
    """Round 1: a, one token. Round 2: a and b, two tokens each, whose round pays 1. All five stand in one sequence: .7 between
    the rounds, .9 between the tokens of a turn, nothing between the turns of a round."""
    batch = batch_of(episode("t", 0, [[0, 1], [None, 1]]))
    values, penalties = [0.1, 0.2, 0.3, 0.4, 0.5], [0.01, 0.02, 0.03, 0.04, 0.05]
    for rows, own in ((batch.rows["a"], slice(0, 3)), (batch.rows["b"], slice(3, 5))):
        rows["values"], rows["kl_penalty"] = (ragged_like(rows, numbers[own]) for numbers in (values, penalties))
    chained(batch, gamma=0.7, token_gamma=0.9, lam=0.8)
    rewards, discounts = torch.tensor([[-0.01, -0.02, -0.03, -0.04, 0.95]]), torch.tensor([[0.7, 0.9, 1.0, 0.9, 0.0]])
    expected = credit.gae(rewards, torch.tensor([values]), torch.ones(1, 5), discounts, 0.8)[0]
    got = torch.cat([batch.rows[name]["advantages"].values() for name in ("a", "b")])
    torch.testing.assert_close(got, expected)
    returns = torch.cat([batch.rows[name]["returns"].values() for name in ("a", "b")])
    torch.testing.assert_close(returns, expected + torch.tensor(values))


def ragged_like(rows, values):
    return torch.nested.nested_tensor_from_jagged(torch.tensor(values), offsets=rows["responses"].offsets())


def test_a_rounds_reward_goes_once_to_its_last_speaker():
    rewards = torch.tensor([[0.5, 3.0, 7.0]])
    mask = torch.tensor([[[1, 1, 1], [1, 1, 0], [0, 0, 0]]])
    assert credit.at_last_speakers(rewards, mask).tolist() == [[[0, 0, 0.5], [0, 3, 0], [0, 0, 0]]]


def test_rewards_of_untrained_turns_go_to_the_last_trained_turn_of_the_chain():
    """Round 1 alone is trained: round 2's reward 1 comes to b, one round later."""
    batch = batch_of(episode("t", 0, [[0, 1], [1, 1]]), train_rounds=[1])
    batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
    chained(batch, gamma=0.5, lam=1.0)
    at_the_end = 0.5 + 0.5 * 1
    assert batch.rows["b"]["advantages"].values().tolist() == [at_the_end]
    assert batch.rows["a"]["advantages"].values().tolist() == [at_the_end]


def test_a_frozen_last_speaker_hands_the_rounds_reward_back():
    batch = joint_batch([episode("t", 0, [[0], [1]])], AGENTS, {"a": 1.0})
    batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
    chained(batch, gamma=0.5, lam=1.0)
    assert list(batch.rows) == ["a"] and batch.rows["a"]["advantages"].values().tolist() == [0.5]


def test_alternatives_are_no_links_of_the_chain():
    """a's compared turn is worth its own score, less its value; what is left of the conversation is b, then a, then b."""
    batch = batch_of(branch(episode("t", 0, [[1.0, 0.0], [0.0, 1.0]]), "a", 1, [0.5]))
    batch.critic_data.values_ERA = torch.full(batch.mask_ERA.shape, 0.1)
    chained(batch, gamma=0.5, lam=1.0)  # each round pays 1/2, to b: in round 2 both return 1/2, in round 1 b 1/2 + 1/4
    assert grid_of(batch, "a")[0, :, 0].tolist() == pytest.approx([0.9, 0.4, 0.4])
    assert grid_of(batch, "b")[0, :2, 1].tolist() == pytest.approx([0.65, 0.4])


def test_agents_of_one_policy_are_links_too():
    separate, shared = (batch_of(episode("t", 0, [[0], [1]]), episode("u", 0, [[1], [1]])) for _ in range(2))
    for batch in (separate, shared):
        batch.critic_data.values_ERA = torch.tensor([[[0.4, 0.6]], [[0.1, 0.7]]])
    rows = [separate.rows["a"], separate.rows["b"]]
    shared.rows = {"both": rows_after_one_another(rows)}
    chained(separate, lam=0.5), chained(shared, lam=0.5)
    for a, name in enumerate(AGENTS):
        assert torch.equal(grid_of(separate, name)[..., a], grid_of(shared, "both")[..., a])


def rows_after_one_another(parts):
    joined = {
        key: torch.nested.as_nested_tensor([row for part in parts for row in part[key].unbind()], layout=torch.jagged)
        for key in ("responses", "response_mask", "turn_index")
    }
    return TensorDict(joined, batch_size=[sum(map(len, parts))])


def test_a_chain_goes_on_over_the_policies_that_an_agent_acts_with():
    """Scores 0 and 1, values 0: everything before the last turn returns 1, whatever policy spoke."""
    record = episode("t", 0, [[0, 1], [0, 1]])
    for turn in record.turns:
        turn.policy = ("first", "later")[turn.round - 1]
    batch = batch_of(record)
    batch.critic_data.values_ERA = torch.zeros(batch.mask_ERA.shape)
    chained(batch)
    assert batch.returns_ERA[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert batch.rows["first"]["advantages"].values().tolist() == [1.0, 1.0]


def test_a_chain_is_whitened_by_policy():
    batch = batch_of(*(episode(f"t{i}", 0, [[i % 2], [i % 3]]) for i in range(12)))
    batch.critic_data.values_ERA = torch.linspace(-1, 1, batch.mask_ERA.numel()).view(batch.mask_ERA.shape)
    build("mappo", "team", chain=True).assign_credit(batch)
    for name in AGENTS:
        advantages = batch.rows[name]["advantages"].values()
        assert float(advantages.mean()) == pytest.approx(0, abs=1e-6)
        assert float(advantages.std()) == pytest.approx(1, abs=1e-5)


def test_a_chain_of_one_agent_is_plain_gae():
    """One agent's rounds are one chain anyway."""
    results = []
    for chain in (False, True):
        batch = batch_of(episode("t", 0, [[0, 1], []]), episode("u", 0, [[1, 1], []]))
        batch.critic_data.values_ERA = torch.tensor([[[0.4, 0.0], [0.6, 0.0]], [[0.3, 0.0], [0.1, 0.0]]])
        build("mappo", "team", chain=chain, gamma=0.9, lam=0.8).assign_credit(batch)
        results.append(batch)
    assert torch.equal(*(batch.rows["a"]["advantages"].values() for batch in results))
    assert torch.equal(*(batch.returns_ERA for batch in results))


def test_a_chain_refuses_credit_of_kind_return():
    with pytest.raises(ValueError, match=r"learner.chain=true with credit=influence.*use credit=team"):
        build("mappo", "influence", chain=True).check({})
    build("mappo", "influence").check({})


@pytest.mark.parametrize("name", ["mappo", "happo"])
def test_a_chain_refuses_zero_sum_credit(name):
    with pytest.raises(ValueError, match=r"learner.chain=true with credit=zero_sum.*use credit=team"):
        build(name, "zero_sum", chain=True).check({})
    build(name, "zero_sum").check({})


def test_the_command_line_refuses_it_too(compose_config, cold_assets):
    from marl.config.errors import ConfigError
    from marl.preflight.prepare import prepare

    with pytest.raises(ConfigError, match="learner.chain=true with credit=influence"):
        prepare(compose_config(f"assets={cold_assets}", "learner=mappo", "learner.chain=true"))
