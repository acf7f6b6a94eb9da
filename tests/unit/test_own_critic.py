"""A critic kind of one's own, in the file of its learner."""

import pytest
import torch

from marl.batch.critic_inputs import LocalTokens, LocalTurns, stacked
from marl.batch.critic_spec import CriticSpec, LocalCritics
from marl.batch.values import place_values, training_rows
from marl.config.errors import ConfigError
from marl.config.schema import CriticLevel
from marl.learners import LEARNERS
from marl.learners.ippo import IPPO
from marl.preflight.compatibility import check_facts
from marl.run_setup import Setup
from tests.builders import build_learner, two_rounds


class Pooled:
    """The rows of all local critics, for one."""

    def __init__(self, local):
        self.local = local

    def rows(self, episodes, batch):
        parts = self.local.rows(episodes, batch)
        return type(parts)({"pooled": stacked([parts[name] for name in batch.rows])} if parts else {})


class PooledCritic(CriticSpec):
    """One for all policies; it reads what each agent itself was shown."""

    kind = "pooled"

    def names(self, policies):
        return ["pooled"]

    def reader(self, level, tokenizer, encoder=None):
        return Pooled(LocalTurns(encoder.encode if encoder else None) if level is CriticLevel.turn else LocalTokens())


class PooledIPPO(IPPO):
    critics = PooledCritic()


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(LEARNERS, "_entries", dict(LEARNERS._entries))
    LEARNERS.register("pooled_ippo")(PooledIPPO)


def test_it_is_configured_and_placed_by_its_name(registered, compose_config):
    setup = Setup.of(compose_config("learner=pooled_ippo", "credit=own"))
    check_facts(setup)
    assert setup.pool_by_critic == {"pooled": "pooled_critic"}


@pytest.mark.parametrize("level", CriticLevel)
def test_its_values_reach_the_learner_and_returns_come_back(registered, level):
    batch, records = two_rounds()
    batch.critic_data.value_rows = PooledIPPO.critics.reader(level, None).rows(records, batch)
    rows = batch.critic_data.value_rows["pooled"]
    read_at = rows["read_at"]
    numbers = torch.linspace(0, 1, len(read_at.values()))
    place_values(batch, "pooled", torch.nested.nested_tensor_from_jagged(numbers, offsets=read_at.offsets()))
    build_learner("pooled_ippo").assign_credit(batch)
    learned = training_rows(batch, "pooled")
    assert torch.equal(learned["values"].values(), numbers)
    assert learned["returns"].values().isfinite().all() and learned["value_mask"].values().all()


def test_a_learner_refuses_values_that_it_cannot_read(registered, compose_config, monkeypatch):
    monkeypatch.setattr(PooledIPPO, "critics", LocalCritics(levels=(CriticLevel.turn,)))
    check_facts(Setup.of(compose_config("learner=pooled_ippo", "credit=own")))
    with pytest.raises(ConfigError, match="critic.level=token: learner=pooled_ippo .*set critic.level=turn"):
        check_facts(Setup.of(compose_config("learner=pooled_ippo", "credit=own", "critic.level=token")))
