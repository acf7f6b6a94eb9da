"""The servers' log-probs as old ones: which rows are checked, and when the trainer computes all of them."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from marl.batch.rows import rows_of, rows_to_check
from marl.cluster.log_probs import OldLogProbs
from marl.config.engines import servers_are_comparable
from marl.config.policies import own_settings
from marl.learners import LEARNERS
from marl.report.step_metrics import token_metrics
from tests.builders import batch_of, episode

TEAM = ("a", "b")
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def team_batch(samples=6, rounds=3, version=0):
    """One policy's rows: two agents, a turn a round, answers as long as their round."""
    records = [episode("t", sample, [[1.0] * rounds] * 2) for sample in range(samples)]
    for record in records:
        for turn in record.turns:
            turn.policy, turn.version = "p", version
    return batch_of(*records)


class Trainer:
    """Stands for a policy's workers: their log-probs are the servers' and ``gap``."""

    def __init__(self, settings, ranks=1):
        self.config = SimpleNamespace(actor_rollout_ref=settings)
        self.workers, self.version = SimpleNamespace(world_size=ranks), 0
        self.gap, self.read = 0.0, []

    async def compute_log_prob(self, rows):
        self.read.append(len(rows))
        values = {"log_probs": -1.0 - self.gap, "entropy": 0.5}
        columns = {key: rows["responses"].values().float() * 0 + value for key, value in values.items()}
        offsets = rows["responses"].offsets()
        jag = {key: torch.nested.nested_tensor_from_jagged(x, offsets=offsets) for key, x in columns.items()}
        return TensorDict(jag, batch_size=[len(rows)])


@pytest.fixture
def source(compose_config):
    def build(*overrides, exact=False, ranks=1, sampling=PLAIN):
        words = ("controller.log_prob_check_rows=4", *overrides, "agents.alice.policy=p", "agents.carol.policy=p")
        config = compose_config(*words)
        trainer = Trainer(own_settings(config, "p"), ranks)
        return OldLogProbs(config, {"p": trainer}, lambda *_: sampling, exact), trainer

    return build


def write(source, batch, step=1):
    return asyncio.run(source.write(batch, step))


def shift(batch, row, by):
    """Corrupt the log-prob of one token that a server gave."""
    rows = batch.rows["p"]
    rows["rollout_log_probs"].values()[rows["rollout_log_probs"].offsets()[row]] += by


def test_the_longest_row_and_one_of_every_agent_are_checked_and_others_as_the_seed_has_it():
    rows = team_batch().rows["p"]
    lengths = rows["input_ids"].offsets().diff().tolist()
    seats = [int(index[index >= 0][0]) % 2 for index in rows["turn_index"].unbind()]
    assert len(rows) == 36
    drawn = [rows_to_check(rows, 2, 4, seed) for seed in range(50)]
    for chosen in drawn:
        assert chosen == sorted(set(chosen)) and len(chosen) == 4
        assert max(lengths) in [lengths[i] for i in chosen] and {seats[i] for i in chosen} == {0, 1}
    assert drawn == [rows_to_check(rows, 2, 4, seed) for seed in range(50)]
    assert {i for chosen in drawn for i in chosen} == set(range(36)), "every row is checked some time"
    assert len(rows_to_check(rows, 2, 1, 0)) == 2, "each agent's numbers need a row"
    assert rows_to_check(rows, 2, 99, 0) == list(range(36))


def test_a_row_without_a_generated_token_is_not_checked():
    rows = rows_of(team_batch(samples=1, rounds=2).rows["p"], [0, 1, 2, 3])
    index = rows["turn_index"]
    index.values()[: int(index.offsets()[1])] = -1
    assert rows_to_check(rows, 2, 9, 0) == [1, 2, 3]
    index.values()[:] = -1
    assert rows_to_check(rows, 2, 9, 0) == []


def test_within_the_bound_a_few_rows_are_read_and_the_servers_log_probs_are_used(source):
    (own, trainer), batch = source(), team_batch()
    trainer.gap = 5e-5
    read, outputs, metrics = write(own, batch)
    rows = batch.rows["p"]
    assert trainer.read == [4] and metrics == {"policy/p/log_probs_from_server": 1.0}
    assert torch.equal(rows["old_log_probs"].values(), rows["rollout_log_probs"].values())
    gaps, numbers = token_metrics(read, outputs, TEAM, lambda agent, policy: agent)
    assert gaps == {"p": pytest.approx(5e-5, rel=1e-2)}
    assert {f"agent/{agent}/{key}" for agent in TEAM for key in ("entropy", "log_prob_gap_max")} <= set(numbers)


def test_every_rank_checks_rows_of_its_own(source):
    own, trainer = source("controller.log_prob_check_rows=4", ranks=3)
    write(own, team_batch())
    assert trainer.read == [6]


@pytest.mark.parametrize("shift_by", [0.01, -0.01, float("nan")])
def test_one_wrong_log_prob_in_a_checked_row_makes_the_whole_pass(source, caplog, shift_by):
    (own, trainer), batch = source(), team_batch()
    for row in range(len(batch.rows["p"])):
        shift(batch, row, shift_by)
    with caplog.at_level(logging.WARNING):
        read, outputs, metrics = write(own, batch)
    assert trainer.read == [4, 36] and metrics == {"policy/p/log_probs_from_server": 0.0}
    assert torch.equal(batch.rows["p"]["old_log_probs"].values(), outputs["p"]["log_probs"].values())
    assert (batch.rows["p"]["old_log_probs"].values() == -1).all() and read["p"] is batch.rows["p"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "policy 'p', step 1" in said and "controller.log_prob_gap_bound=0.0001" in said
    gaps, _ = token_metrics(read, outputs, TEAM, lambda agent, policy: agent)
    assert not gaps["p"] <= 0.0099, "the alarm's number is of all rows"


def test_beyond_the_bound_whole_passes_are_made_until_one_finds_all_within_it(source, caplog):
    own, trainer = source()
    with caplog.at_level(logging.WARNING):
        for step, trainer.gap in enumerate([0.0, 0.01, 0.01, 0.0, 0.0, 0.01], start=1):
            write(own, team_batch(), step)
    assert trainer.read == [4, 4, 36, 36, 36, 4, 4, 36]
    assert len(caplog.records) == 1, "said once"


def test_turns_of_other_weights_need_the_trainer(source):
    own, trainer = source()
    batch = team_batch(version=0)
    batch.rows["p"]["version"][7] = -1
    assert write(own, batch)[2] == {"policy/p/log_probs_from_server": 0.0}
    trainer.version = 1
    assert write(own, team_batch(version=0))[2] == {"policy/p/log_probs_from_server": 0.0}
    assert write(own, team_batch(version=1))[2] == {"policy/p/log_probs_from_server": 1.0}
    assert trainer.read == [36, 36, 4]


def test_a_packed_row_is_as_old_as_its_oldest_turn():
    record = episode("t", 0, [[1.0, 1.0], []])
    for turn, version in zip(record.turns, (3, 4), strict=True):
        turn.policy, turn.version, turn.prompt_ids = "p", version, [1, 2, 3, 5][: 2 * turn.round]
    batch = batch_of(record, pack_turns=True)
    assert batch.rows["p"]["version"].tolist() == [3]


def test_where_all_rows_would_be_checked_the_trainers_are_used(source):
    own, trainer = source("controller.log_prob_check_rows=36")
    assert write(own, team_batch())[2] == {"policy/p/log_probs_from_server": 0.0} and trainer.read == [36]


@pytest.mark.parametrize("gap,reads", [(0.0, [36, 4]), (2e-3, [36, 36])])
def test_in_half_precision_a_whole_pass_comes_first(source, gap, reads):
    own, trainer = source(
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
        "controller.log_prob_gap_bound=1e-3",
    )
    trainer.gap = gap
    for step in (1, 2):
        write(own, team_batch(), step)
    assert trainer.read == reads


def test_the_servers_log_probs_are_used_whatever_the_gap_if_the_key_says_so(source, caplog):
    own, trainer = source("controller.old_log_probs=server", "actor_rollout_ref.rollout.name=vllm")
    trainer.gap = 0.5
    batch = team_batch()
    read, outputs, metrics = write(own, batch)
    assert trainer.read == [4] and metrics == {"policy/p/log_probs_from_server": 1.0} and not caplog.records
    assert token_metrics(read, outputs, TEAM, lambda agent, policy: agent)[0] == {"p": pytest.approx(0.5)}


def test_in_bypass_mode_the_trainer_reads_nothing(source):
    own, trainer = source("algorithm.rollout_correction.bypass_mode=true")
    batch = team_batch()
    assert write(own, batch) == ({}, {}, {"policy/p/log_probs_from_server": 1.0}) and trainer.read == []
    assert torch.equal(batch.rows["p"]["old_log_probs"].values(), batch.rows["p"]["rollout_log_probs"].values())


NEEDS_TRAINER = {
    "the key": ["controller.old_log_probs=trainer"],
    "another engine": ["actor_rollout_ref.rollout.name=vllm"],
    "half precision in the server": ["actor_rollout_ref.rollout.dtype=bfloat16"],
    "half precision in the trainer": ["actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16"],
    "verl's precision": ["actor_rollout_ref.actor.fsdp_config.mixed_precision=null"],
    "importance weights": ["algorithm.rollout_correction.rollout_is=token"],
    "rejection": [
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0'",
    ],
    "an agent loop": ["agents.carol.agent_loop=single_turn_agent"],
}


@pytest.mark.parametrize("case", NEEDS_TRAINER)
def test_the_trainer_computes_where_servers_do_not_do_the_same(source, case):
    own, trainer = source(*NEEDS_TRAINER[case])
    assert write(own, team_batch())[2] == {"policy/p/log_probs_from_server": 0.0} and trainer.read == [36]


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
def test_the_trainer_computes_where_servers_leave_tokens_out(source, change):
    own, trainer = source(sampling=PLAIN | change)
    write(own, team_batch())
    assert trainer.read == [36]


def test_only_agents_that_train_a_policy_decide(compose_config):
    """carol's turns are no rows of the shared policy."""
    words = ("agents.alice.policy=p", "agents.carol.policy=p", "agents.carol.trainable=false")
    config = compose_config(*words)
    sampling = {"alice": PLAIN, "carol": PLAIN | {"top_k": 2}}
    settings = own_settings(config, "p")
    assert servers_are_comparable(config, "p", settings, lambda agent, policy, validate: sampling[agent])
    assert not servers_are_comparable(config, "p", settings, lambda *_: sampling["carol"])


def test_a_learner_that_compares_with_old_log_probs_gets_the_trainers(source):
    assert [name for name in LEARNERS.names() if LEARNERS.get(name).needs_exact_log_probs] == ["happo"]
    own, trainer = source(exact=True)
    write(own, team_batch())
    assert trainer.read == [36]


def test_other_rows_are_checked_in_another_step(source):
    own, _ = source()
    read = [write(own, team_batch(), step)[0]["p"]["turn_index"].values().tolist() for step in (1, 2, 3, 1)]
    assert read[0] == read[3] and len({tuple(x) for x in read}) > 1


class Waiting(Trainer):
    """Its forward pass ends once every policy's has begun."""

    def __init__(self, settings, begun):
        super().__init__(settings)
        self.begun = begun

    async def compute_log_prob(self, rows):
        await asyncio.wait_for(self.begun.wait(), 20.0)
        return await super().compute_log_prob(rows)


def test_all_policies_read_their_rows_at_the_same_time(compose_config):
    """So that a learner that updates one policy after another, as HAPPO does, waits for no old log-probs between updates."""
    config = compose_config("agents.alice.policy=p", "agents.carol.policy=p")
    batch = batch_of(episode("t", 0, [[1.0], [0.0]]))
    begun = asyncio.Barrier(len(batch.rows))
    trainers = {name: Waiting(own_settings(config, "p"), begun) for name in batch.rows}
    source = OldLogProbs(config, trainers, lambda *_: PLAIN, True)
    assert len(trainers) == 2 and sorted(write(source, batch)[1]) == sorted(batch.rows)
