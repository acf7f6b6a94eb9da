"""Packed rows: an agent's turns in one sequence, and nothing but the number of tokens differs."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from marl.batch.build import joint_batch
from marl.batch.kl import KLInReward
from marl.batch.packing import packed_policies
from marl.config.errors import ConfigError
from marl.config.packing import SEQUENCE_LOSSES, TOKEN_LOSSES
from marl.config.rules.training import packing_is_known
from marl.config.schema import PackTurns
from marl.preflight.compatibility import choose_credit
from marl.run_setup import Setup
from tests.builders import episode_of_turns, like, turn_of_ids


def two_rounds():
    """Agent a's second prompt extends its first turn, agent b's does not."""
    return episode_of_turns(
        turn_of_ids("a", 1, [1, 2], [3, 4]),
        turn_of_ids("b", 1, [8], [9]),
        turn_of_ids("a", 2, [1, 2, 3, 4, 7], [5]),
        turn_of_ids("b", 2, [6], [9]),
    )


@pytest.mark.parametrize("pack", [False, True])
def test_the_mean_kl_in_the_reward_is_one_of_turns_however_they_share_rows(pack):
    """Turns of 2 and 1 tokens at a KL of .1 and .4: a mean of .25 over turns, of .2 over tokens or rows of both."""
    algorithm = SimpleNamespace(
        kl_penalty="kl", kl_ctrl=SimpleNamespace(type="adaptive", kl_coef=0.5, target_kl=1e-6, horizon=100)
    )
    rows = joint_batch([two_rounds()], ["a", "b"], {"a": 1.0}, pack_turns=pack).rows["a"]
    index, kl = rows["turn_index"].values(), KLInReward(algorithm)
    rows["ref_log_prob"] = like(rows, torch.where(index >= 0, -2.0, torch.nan))  # of what a tool said, as it happens
    rows["old_log_probs"] = like(rows, torch.where(index == 0, -1.9, -1.6))
    metrics = kl.penalise(rows)
    assert len(rows) == (1 if pack else 2) and metrics["reward_kl_penalty"] == pytest.approx(0.25)
    assert rows["kl_penalty"].values().tolist() == pytest.approx([0.05, 0.05, *([0.0] * pack), 0.2])
    assert kl.controller.value == pytest.approx(0.5 * (1 + 0.2 * 2 / 100))


def packed(config):
    OmegaConf.resolve(config)
    choose_credit(config)
    return sorted(packed_policies(config, Setup.of(config).critics))


BY_TOKEN = (
    "",
    "learner=dapo",
    "learner=rloo",
    "learner=reinforce_plus_plus algorithm.kl_ctrl.type=adaptive",
    "learner=happo",
    "learner=mappo",
    "learner=ippo critic.level=token",
    "learner=qmix",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "controller.pack_turns=true",
    *(f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}" for loss in TOKEN_LOSSES),
)
BY_SEQUENCE = (
    "learner=gspo",
    "learner=dr_grpo",
    "algorithm.rollout_correction={bypass_mode:true,rollout_is:token,rollout_is_batch_normalize:true}",
    "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
    "learner=mappo critic.level=token",
    "learner=happo critic.level=token",
    "learner=ippo critic.level=token critic.loss_agg_mode=seq-mean-token-mean",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_rs='token_k1,seq_sum_k3'",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1 algorithm.rollout_correction.bypass_mode=true",
    *(f"actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-{mode}" for mode in ("sum", "mean", "sum-norm")),
    *(
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"
        for loss in (*SEQUENCE_LOSSES, "clip_cov", "kl_cov", "own")
    ),
    "controller.pack_turns=false",
)


@pytest.mark.parametrize("words", BY_TOKEN)
def test_turns_are_packed_where_nothing_but_tokens_changes(compose_config, words):
    assert packed(compose_config(*words.split())) == ["alice", "carol"]


@pytest.mark.parametrize("words", BY_SEQUENCE)
def test_turns_stay_apart_where_sequences_count(compose_config, words):
    assert packed(compose_config(*words.split())) == []


def test_each_policy_packs_by_its_own_settings(compose_config):
    config = compose_config("+policies.alice.actor.loss_agg_mode=seq-mean-token-mean")
    assert packed(config) == ["carol"]
    assert packed(compose_config("agents.alice.trainable=false")) == ["carol"]


def test_every_loss_of_verl_is_known_to_treat_tokens_apart_or_not():
    ours = {
        name for name in POLICY_LOSS_REGISTRY if POLICY_LOSS_REGISTRY[name].__module__.startswith(("verl.", "marl."))
    }
    assert ours == {*TOKEN_LOSSES, *SEQUENCE_LOSSES, "clip_cov", "kl_cov", "bypass_mode"}


@pytest.mark.parametrize("text,choice", [("true", "true"), ("false", "false"), ("auto", "auto"), ("'True'", "true")])
def test_yamls_true_and_false_are_choices(compose_config, text, choice):
    """From the command line, and from a file."""
    assert PackTurns.of(compose_config(f"controller.pack_turns={text}")) is PackTurns(choice)
    assert PackTurns.of(OmegaConf.create(f"controller: {{pack_turns: {text}}}")) is PackTurns(choice)


@pytest.mark.parametrize("text", ["atuo", "1", "null"])
def test_another_choice_is_refused(compose_config, text):
    with pytest.raises(ConfigError, match=r"controller.pack_turns=.*expected one of auto, true, false"):
        packing_is_known(compose_config(f"controller.pack_turns={text}"))


def test_the_policies_named_are_packed_and_the_others_are_not():
    record = episode_of_turns(
        turn_of_ids("a", 1, [1], [2]),
        turn_of_ids("b", 1, [1], [2]),
        turn_of_ids("a", 2, [1, 2], [3]),
        turn_of_ids("b", 2, [1, 2], [3]),
    )
    batch = joint_batch([record], ["a", "b"], {"a": 1.0, "b": 1.0}, pack_turns={"b"})
    assert {name: len(rows) for name, rows in batch.rows.items()} == {"a": 2, "b": 1}


def test_an_alternative_beside_it_does_not_end_a_conversations_row():
    """Round 1 was tried twice; round 2 continues the first attempt, round 3 the second of two in round 2."""
    turns = [
        turn_of_ids("a", 1, [1], [2]),
        turn_of_ids("a", 1, [1], [3]),
        turn_of_ids("a", 2, [1, 2, 9], [4]),
        turn_of_ids("a", 2, [1, 2, 9], [5]),
        turn_of_ids("a", 3, [1, 2, 9, 5, 9], [6]),
    ]
    for number in (1, 2):
        turns[number].branch, turns[number].kept, turns[number].compared = 1, False, True
    rows = joint_batch([episode_of_turns(*turns)], ["a"], {"a": 1.0}, pack_turns=True).rows["a"]
    assert [row.tolist() for row in rows["input_ids"].unbind()] == [[1, 2, 9, 4], [1, 3], [1, 2, 9, 5, 9, 6]]


def test_equal_ids_do_not_join_turns_of_two_episodes_or_of_two_agents():
    """All of one policy. In the second episode, prompts extend turns of the first one, and of the other agent."""
    one = episode_of_turns(turn_of_ids("a", 1, [1], [2], "p"), turn_of_ids("b", 1, [1], [3], "p"))
    two = episode_of_turns(
        turn_of_ids("a", 1, [1], [5], "p"),
        turn_of_ids("a", 2, [1, 2, 9], [4], "p"),
        turn_of_ids("a", 3, [1, 3, 9], [4], "p"),
        turn_of_ids("b", 1, [1, 5, 9], [4], "p"),
    )
    rows = joint_batch([one, two], ["a", "b"], {"a": 1.0, "b": 0.5}, pack_turns=True).rows["p"]
    found = [row.tolist() for row in rows["input_ids"].unbind()]
    assert found == [[1, 2], [1, 3], [1, 5], [1, 2, 9, 4], [1, 3, 9, 4], [1, 5, 9, 4]]
    assert rows["temperature"].tolist() == [1.0, 0.5, 1.0, 1.0, 1.0, 0.5]


@st.composite
def conversations(draw):
    """Turns of two agents: each continues one of its agent's, or starts anew, with a mask of its own."""
    turns = []
    for number in range(draw(st.integers(1, 8))):
        agent, policy = draw(st.sampled_from("ab")), draw(st.sampled_from("pq"))
        own = [said for said in turns if said.agent == agent]
        start = draw(st.sampled_from([None, *own]))
        tokens = st.lists(st.integers(1, 3), max_size=3)
        prompt = [*([0] if start is None else start.prompt_ids + start.response_ids), *draw(tokens)]
        response = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        said = turn_of_ids(
            agent, number + 1, prompt, response, policy, [1, *(draw(st.sampled_from([0, 1])) for _ in response[1:])]
        )
        said.trained = draw(st.booleans()) or number == 0
        turns.append(said)
    return turns


@given(conversations(), st.integers(1, 30))
@settings(max_examples=200)
def test_every_trained_turn_is_in_exactly_one_row_after_its_own_prompt(turns, limit):
    """None is lost or trained twice, each is read after the ids that it was generated after, and a row is over a limit only
    if one of its turns is."""
    batch = joint_batch([episode_of_turns(*turns)], ["a", "b"], {"a": 1.0, "b": 1.0}, pack_turns=True)
    found = []
    for policy, rows in batch.rows.items():
        columns = [[part.tolist() for part in rows[key].unbind()] for key in ("input_ids", "prompts", "turn_index")]
        for ids, prompt, index in zip(*columns, strict=True):
            own = sorted({cell for cell in index if cell >= 0})
            held = [next(t for t, cell in zip(turns, batch.cells[0], strict=True) if cell == wanted) for wanted in own]
            for cell, said in zip(own, held, strict=True):
                start = len(said.prompt_ids)
                assert said.policy == policy and ids[:start] == said.prompt_ids
                assert ids[start : start + len(said.response_ids)] == said.response_ids
                mask = [int(at == cell) for at in index[start - len(prompt) :]]
                assert mask[: len(said.response_mask)] == said.response_mask and not any(
                    mask[len(said.response_mask) :]
                )
            assert (len(ids) > limit) == any(len(t.prompt_ids) + len(t.response_ids) > limit for t in held)
            found += own
    assert sorted(found) == [cell for t, cell in zip(turns, batch.cells[0], strict=True) if t.trained]
