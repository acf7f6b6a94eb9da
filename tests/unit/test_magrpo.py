"""MAGRPO against Dr. GRPO, and its sameness for all agents."""

import pytest
import torch

from marl.batch.joint import Alternatives
from marl.utils.ragged import jagged
from tests.builders import AGENTS, batch_of, build_learner as build, episode


def assigned(batch, **options):
    build("magrpo", "team", **options).assign_credit(batch)
    return {name: [row.tolist() for row in rows["advantages"].unbind()] for name, rows in batch.rows.items()}


def test_all_agents_get_the_same():
    """Team rewards (1/2, 1/2), (0, 1), (0, 0): returns (1, .5), (1, 1), (0, 0); means 2/3 and 1/2."""
    samples = [[[1, 0], [0, 1]], [[0, 1], [0, 1]], [[0, 0], [0, 0]]]
    got = assigned(batch_of(*(episode("t", i, scores) for i, scores in enumerate(samples))))
    assert got["a"] == got["b"]
    assert [row[0] for row in got["a"]] == pytest.approx([1 / 3, 0, 1 / 3, 0.5, -2 / 3, -0.5], abs=1e-6)


def test_an_agents_silence_costs_it_nothing_of_the_teams_return():
    loud, silent = [[0, 1], [0, 1]], [[0, None], [0, 1]]
    both = [assigned(batch_of(episode("t", 0, scores), episode("t", 1, [[0, 0], [0, 0]]))) for scores in (loud, silent)]
    assert both[0]["a"][0] == both[1]["a"][0] == [0.5], "round 1 is worth what the other reached in round 2"


def test_one_agent_is_dr_grpo_bit_for_bit():
    """One decision an episode; several are its return-to-go, as GRPO's."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(6, 2, generator=generator).tolist()
    records = [episode(f"t{i // 3}", i % 3, [scores[i], [None, None]]) for i in range(6)]
    first, second = batch_of(*records), batch_of(*records)
    build("magrpo", "team", gamma=0.9).assign_credit(first)
    build("grpo", "own", gamma=0.9, std=False).assign_credit(second)
    assert torch.equal(*(batch.rows["a"]["advantages"].values() for batch in (first, second)))


def test_equal_samples_and_single_samples_give_no_gradient():
    equal = assigned(batch_of(*(episode("t", i, [[1, 0], [0, 1]]) for i in range(3))))
    alone = assigned(batch_of(episode("t", 0, [[1, 0], [1, 1]]), episode("u", 0, [[0, 0], [0, 0]])))
    for got in (equal, alone):
        assert not any(x for rows in got.values() for row in rows for x in row)


def test_offsets_between_rounds_change_nothing():
    plain, shifted = (batch_of(*(episode("t", i, [[i, 0], [0, 1 - i]]) for i in range(2))) for _ in range(2))
    shifted.scores_ERA += torch.tensor([10.0, 30.0])[:, None]
    for got, want in zip(assigned(shifted).values(), assigned(plain).values(), strict=True):
        for row, wanted in zip(got, want, strict=True):
            assert row == pytest.approx(wanted, abs=1e-5)


def test_only_an_agents_own_kl_is_subtracted():
    batch = batch_of(*(episode("t", i, [[1], [1]]) for i in range(2)))
    batch.rows["a"]["kl_penalty"] = jagged([[0.5], [0.0]], torch.float32)
    got = assigned(batch)
    assert [row[0] for row in got["a"]] == [-0.25, 0.25] and [row[0] for row in got["b"]] == [0.0, 0.0]


@pytest.mark.parametrize("std", [False, True])
def test_agents_are_not_compared_by_how_far_they_are_from_their_references(std):
    """All samples are as good, and an agent's answers as far from its reference: nothing is to be learned."""
    for samples in (1, 2):
        batch = batch_of(*(episode("t", i, [[1], [1]]) for i in range(samples)))
        for name, level in (("a", 0.125), ("b", 0.5)):
            batch.rows[name]["kl_penalty"] = jagged([[level]] * samples, torch.float32)
        assert all(row == [0.0] for rows in assigned(batch, std=std).values() for row in rows)


def test_supported_credit_schemes(compose_config, cold_assets):
    from marl.config.errors import ConfigError
    from marl.preflight.prepare import prepare

    config = compose_config(f"assets={cold_assets}", "learner=magrpo", "credit=auto")
    assert prepare(config).config.credit.name == "team"
    with pytest.raises(ConfigError, match="credit=own: learner=magrpo is defined for credit=team alone"):
        prepare(compose_config(f"assets={cold_assets}", "learner=magrpo", "credit=own"))
    assert AGENTS == ("a", "b")


def test_alternatives_stand_for_themselves():
    """Two of one set, worth 0 and 1: what the team earns after the kept one is not theirs."""
    batch = batch_of(episode("t", 0, [[0, 1], [None, None]]))
    batch.alternatives = Alternatives(torch.where(batch.mask_ERA, 0, -1), num_rounds=2)
    assert assigned(batch)["a"] == [[-0.5], [0.5, 0.5]]


def test_a_sample_counts_once_however_many_agents_speak():
    """The team's returns are 1 and 0: the samples' mean is .5, though b is silent in one of two rounds."""
    records = [episode("t", 0, [[0, 1], [0, 1]]), episode("t", 1, [[0, 0], [0, None]])]
    got = assigned(batch_of(*records))
    assert [row[0] for row in got["a"]] == pytest.approx([0.5, 0.5, -0.5, -0.5])
    assert [row[0] for row in got["b"]] == pytest.approx([0.5, 0.5, -0.5])
    divided = assigned(batch_of(*records), std=True)  # by the deviation of the samples 1 and 0
    assert [row[0] for row in divided["a"]] == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5), -(0.5**0.5)], abs=1e-4)
