"""MAPPO is IPPO with another critic and another default credit, and nothing else."""

import torch

from marl.learners import LEARNERS
from tests.unit.test_learners import build, two_samples


def test_with_the_same_values_and_credit_it_is_ippo():
    results = []
    for name in ("ippo", "mappo"):
        batch = two_samples()
        batch.values_ERA = torch.linspace(0, 1, batch.mask_ERA.numel()).view_as(batch.mask_ERA)
        build(name, "team", lam=0.9).assign_credit(batch)
        results.append(batch)
    for policy in results[0].rows:
        assert torch.equal(*(batch.rows[policy]["advantages"].values() for batch in results))
    assert torch.equal(results[0].returns_ERA, results[1].returns_ERA)


def test_what_is_different():
    ippo, mappo = LEARNERS.get("ippo"), LEARNERS.get("mappo")
    assert (ippo.critic, ippo.default_credit) == ("local", "own")
    assert (mappo.critic, mappo.default_credit) == ("central", "team")


def test_auto_credit_is_the_learners_default(compose_config, cold_assets):
    from marl.main import prepare

    for learner, credit in {"ippo": "own", "mappo": "team", "grpo": "own"}.items():
        config = prepare(compose_config(f"assets={cold_assets}", f"learner={learner}", "credit=auto"))
        assert config.credit.name == credit
