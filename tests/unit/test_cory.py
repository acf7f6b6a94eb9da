"""CORY: both are paid for both, and in turn they exchange their policies."""

import pytest
import torch

from marl.batch.critic_spec import LocalCritics
from marl.learners import LEARNERS
from tests.builders import batch_of, build_learner as build, episode


def spoken(pioneer, observer, sample=0):
    """The pioneer speaks in round 1, the observer in round 2."""
    return episode("t", sample, [[pioneer], [None, observer]])


def test_both_get_the_sum_of_both_scores():
    learner, batch = build("cory", "joint", whiten=False), batch_of(spoken(1, 0.5), spoken(0, 0.25, 1))
    credit_ERA = learner.credit.of(batch)
    assert credit_ERA.tolist() == [[[1.5, 0], [0, 1.5]], [[0.25, 0], [0, 0.25]]]
    batch.critic_data.values_ERA = torch.full(batch.mask_ERA.shape, 0.5)
    learner.assign_credit(batch)
    pioneer, observer = batch.rows["a"]["advantages"], batch.rows["b"]["advantages"]
    assert pioneer.values().tolist() == [1.0, -0.25], "the reward holds the observer's already: no bootstrap, no sum"
    assert observer.values().tolist() == [1.0, 1.0, -0.25, -0.25]


def test_one_agent_alone_is_ippo():
    batches = [batch_of(episode("t", i, [[i], [None]])) for i in range(2)]
    for name, credit, batch in zip(("cory", "ippo"), ("joint", "own"), batches, strict=True):
        batch.scores_ERA.fill_(1.0)
        batch.critic_data.values_ERA = torch.full(batch.mask_ERA.shape, 0.25)
        build(name, credit, whiten=False).assign_credit(batch)
    assert torch.equal(*(batch.rows["a"]["advantages"].values() for batch in batches))


def test_facts():
    cory, ippo = LEARNERS.get("cory"), LEARNERS.get("ippo")
    assert cory.assign_credit is ippo.assign_credit and cory.critics == ippo.critics == LocalCritics()
    assert build("cory", "joint").exchange_every == 5 and build("ippo").exchange_every == 0


@pytest.mark.parametrize(
    "overrides,named",
    [
        (["agents.alice.policy=one", "agents.carol.policy=one"], "alice: one, carol: one"),
        (["agents.alice.policy_by_round=[one,two]"], "alice: one/two"),
        (["agents.carol.trainable=false"], "agents.carol.trainable=False"),
        (["credit=own"], "credit=own: learner=cory is defined for credit=joint alone"),
    ],
)
def test_agents_that_cannot_exchange_are_refused(compose_config, cold_assets, overrides, named):
    from marl.config.errors import ConfigError
    from marl.preflight.prepare import prepare

    common = [f"assets={cold_assets}", "learner=cory", "runner=pioneer_observer", "credit=auto"]
    assert prepare(compose_config(*common)).config.credit.name == "joint"
    with pytest.raises(ConfigError, match="cory") as error:
        prepare(compose_config(*common, *overrides))
    assert named in str(error.value)
