"""HAPPO: ratios and factors by hand, its game played with exact expectations, and MAPPO where nothing changed."""

import asyncio
import math

import pytest
import torch
from hydra.errors import ConfigCompositionException
from tensordict import TensorDict

from marl.batch.build import joint_batch
from marl.batch.critic_spec import CentralCritic
from marl.learners import LEARNERS
from marl.learners.ratios import Ratio, factors, laps, log_factors, log_ratios, share_laps
from marl.types import Episode, Score, Task, Turn
from marl.utils.ragged import jagged
from tests.builders import (
    AGENTS,
    FakeGroup,
    batch_of,
    branch,
    build_learner as build,
    episode,
    grid_of,
    like,
    two_samples,
)

EXACT = {"ratio": Ratio.sequence, "clip": None}


class Shifted(FakeGroup):
    """Workers of a policy whose update adds ``shift`` to the log-prob of every token, or ``shift_ERA`` of its turn's."""

    def __init__(self, name, calls, shift):
        super().__init__()
        self.name, self.calls, self.shift = name, calls, shift

    async def update_actor(self, rows):
        self.calls.append(("update", self.name))
        await asyncio.sleep(0)  # where everybody is updated at the same time, the others begin here
        self.calls.append(("updated", self.name))
        return await super().update_actor(rows)

    async def compute_log_prob(self, rows):
        assert ("updated", self.name) in self.calls, "the old weights"
        self.calls.append(("log_probs", self.name))
        shift_ERA = self.shift if isinstance(self.shift, torch.Tensor) else torch.full((10_000,), float(self.shift))
        shifts_T = shift_ERA.flatten()[rows["turn_index"].values().clamp(min=0)]
        return TensorDict({"log_probs": like(rows, rows["old_log_probs"].values() + shifts_T)}, batch_size=[len(rows)])


def set_advantages(batch, value=1.0):
    for rows in batch.rows.values():
        rows["advantages"] = like(rows, torch.where(rows["turn_index"].values() >= 0, value, 0.0))
    return batch


def update(learner, batch, shifts, order=None):
    """Metrics, what each policy was given to train on, and the calls that its workers got."""
    calls = []
    groups = {name: Shifted(name, calls, shift) for name, shift in shifts.items()}
    if order is not None:
        learner.order = lambda names: list(order)
    metrics = asyncio.run(learner.update(batch, groups))
    return metrics, {name: group.rows[0] for name, group in groups.items() if group.rows}, calls


def grids(batch, rows_by_policy):
    """The advantages [E, R, A] that were trained on."""
    given = {name: rows["advantages"] for name, rows in rows_by_policy.items()}
    total = torch.zeros(batch.mask_ERA.shape)
    for name, advantages in given.items():
        batch.rows[name] = batch.rows[name].copy()
        batch.rows[name]["advantages"] = advantages
        total += grid_of(batch, name)
    return total


@pytest.mark.parametrize(
    "ratio,expected",
    [(Ratio.sequence, math.exp(0.4)), (Ratio.geometric, 1.10517), (Ratio.token, 1.119025)],
)
def test_the_ratio_of_a_turn(ratio, expected):
    """Differences .3, -.1, .2, 0; of these the geometric one is GSPO's oracle. token: (1.349859 + .904837 + 1.221403 + 1) / 4."""
    rows = ratio_rows([[0, 0, 0, 0]], [[1, 1, 1, 1]], [[-1.0] * 4])
    new = jagged([[-0.7, -1.1, -0.8, -1.0]], torch.float32)
    logs = log_ratios(new, rows, torch.Size([1, 1, 2]), ratio)
    assert logs.exp().flatten().tolist() == pytest.approx([expected, 1.0], abs=1e-5)


def ratio_rows(index, mask, old):
    return TensorDict(
        {
            "turn_index": jagged(index, torch.long),
            "response_mask": jagged(mask, torch.long),
            "old_log_probs": jagged(old, torch.float32),
        },
        batch_size=[len(index)],
    )


@pytest.mark.parametrize("ratio", list(Ratio))
def test_turns_of_a_packed_row_have_ratios_of_their_own(ratio):
    """Cells 1 and 3 in one row, cell 2 in another; what a tool said and what was rejected does not count."""
    rows = ratio_rows([[1, 1, -1, 3, 3], [2]], [[1, 1, 0, 1, 0], [0]], [[0.0] * 5, [0.0]])
    new = jagged([[0.2, 0.2, 5.0, -0.5, 5.0], [5.0]], torch.float32)
    got = log_ratios(new, rows, torch.Size([1, 2, 2]), ratio).flatten().tolist()
    assert got == pytest.approx([0.0, 0.4 if ratio is Ratio.sequence else 0.2, 0.0, -0.5], abs=1e-6)


@pytest.mark.parametrize("ratio", list(Ratio))
def test_the_ratio_of_unchanged_weights_is_one_to_the_last_bit(ratio):
    old = torch.randn(7).tolist()
    rows = ratio_rows([[0] * 7], [[1] * 7], [old])
    logs = log_ratios(jagged([old], torch.float32), rows, torch.Size([1, 1, 2]), ratio)
    assert torch.equal(logs, torch.zeros(1, 1, 2)) and torch.equal(factors(logs, 2.0), torch.ones(1, 1, 2))


def test_the_factor_is_clipped_on_both_sides_alike():
    logs = torch.tensor([[[math.log(8.0), math.log(1.5), -math.log(8.0), -math.inf, 0.0]]])
    assert factors(logs, 4.0).flatten().tolist() == pytest.approx([4.0, 1.5, 0.25, 0.25, 1.0])
    assert factors(logs, None).flatten().tolist() == pytest.approx([8.0, 1.5, 0.125, 0.0, 1.0])


def team_of_three(rounds=("abc", "ac", "b")):
    """Speakers of every round; each agent has a policy."""
    record = Episode(Task("t", [], "1", "marl/x", lambda text: text), 0, ["a", "b", "c"])
    for round, speakers in enumerate(rounds, start=1):
        for agent in speakers:
            record.turns.append(
                Turn(agent, round, [], "1", policy=agent, prompt_ids=[1], response_ids=[3, 4], response_mask=[1, 1],
                     log_probs=[-1.0, -2.0], score=Score(1.0, "1"))
            )  # fmt: skip
    batch = joint_batch([record], record.agents, dict.fromkeys(record.agents, 1.0))
    for rows in batch.rows.values():
        rows["old_log_probs"] = rows["rollout_log_probs"]
    return set_advantages(batch)


def test_each_policy_is_corrected_for_all_earlier_updates():
    """Ratios 2 of c and 3 of a, in the order c, a, b. Rounds 2 and 3 are one lap: nobody speaks twice in them."""
    batch = team_of_three()
    shifts = {"a": math.log(3.0), "b": 9.0, "c": math.log(2.0)}
    metrics, given, calls = update(build("happo", clip=None), batch, shifts, "cab")
    rounds = grids(batch, given)[0].tolist()
    assert rounds[0] == pytest.approx([2.0, 6.0, 1.0])
    assert rounds[1] == pytest.approx([2.0, 0.0, 1.0])
    assert rounds[2] == pytest.approx([0.0, 6.0, 0.0])
    assert [metrics[name]["update_position"] for name in "cab"] == [1.0, 2.0, 3.0]
    assert [call for call in calls if call[0] != "update"] == [
        ("updated", "c"), ("log_probs", "c"), ("updated", "a"), ("log_probs", "a"), ("updated", "b"),
    ], "one after another, and nobody asks the last one"  # fmt: skip


@pytest.mark.parametrize(
    "rounds,expected",
    [
        ("abc", [0, 0, 0]),  # a chain
        ("abcabc", [0, 0, 0, 1, 1, 1]),  # two laps of it, or a sequential debate
        ("abab", [0, 0, 1, 1]),  # a critique
        ("abba", [0, 0, 1, 1]),
        ("cacb", [0, 0, 1, 1]),  # a router that asks one agent, then another
        (("abc", "abc"), [0, 1]),  # all of them in every round
        (("ab", "c", "ab"), [0, 0, 1]),  # debaters, a summary, debaters again
        (("ab", "", "c", "a"), [0, 0, 0, 1]),  # a round in which nobody spoke
    ],
)
def test_a_lap_ends_before_somebody_speaks_again(rounds, expected):
    mask_ERA = torch.tensor([[[agent in speakers for agent in "abc"] for speakers in rounds]])
    assert laps(mask_ERA)[0].tolist() == expected
    doubled = torch.cat([mask_ERA, torch.ones_like(mask_ERA)])
    assert laps(doubled).tolist() == [expected, list(range(len(rounds)))], "episodes have laps of their own"


@pytest.mark.parametrize("order,factors", [("abc", [1, 2, 6]), ("cba", [15, 5, 1]), ("bca", [15, 1, 3])])
@pytest.mark.parametrize("num_laps", [1, 2])
def test_the_factor_of_agents_that_speak_one_after_another(order, factors, num_laps):
    """Ratios 2 of a, 3 of b, 5 of c in a chain of rounds of their own, or in a sequential debate of two laps: each turn's M is
    the product over the policies that were updated before, of its own lap alone."""
    batch = team_of_three("abc" * num_laps)
    shifts = {"a": math.log(2.0), "b": math.log(3.0), "c": math.log(5.0)}
    _, given, _ = update(build("happo", clip=None), batch, shifts, order)
    got = grids(batch, given)[0]
    assert torch.diagonal(got[:3]).tolist() == pytest.approx(factors)
    assert got.sum().item() == pytest.approx(num_laps * sum(factors)), "and nothing elsewhere"


def test_laps_of_a_chain_do_not_correct_one_another():
    """Ratios of a: 2 in its first lap, 7 in its second."""
    batch = team_of_three("abcabc")
    shift_ERA = torch.zeros(1, 6, 3)
    shift_ERA[0, 0, 0], shift_ERA[0, 3, 0] = math.log(2.0), math.log(7.0)
    _, given, _ = update(build("happo", clip=None), batch, {"a": shift_ERA, "b": 0.0, "c": 0.0}, "abc")
    got = grids(batch, given)[0]
    assert got[:, 1].tolist() == pytest.approx([0, 2, 0, 0, 7, 0])
    assert got[:, 2].tolist() == pytest.approx([0, 0, 2, 0, 0, 7])


def test_the_factor_is_logged_before_it_is_clipped():
    metrics, given, _ = update(
        build("happo", clip=1.5), team_of_three(("abc", "ac", "ab")), {"a": 0.0, "b": 0.0, "c": math.log(2.0)}, "cba"
    )
    assert metrics["a"]["factor_max"] == pytest.approx(2.0) and metrics["a"]["factor_mean"] == pytest.approx(4 / 3)
    assert metrics["b"]["factor_max"] == pytest.approx(2.0) and metrics["b"]["factor_mean"] == pytest.approx(1.25)
    assert metrics["c"]["factor_max"] == metrics["c"]["factor_mean"] == 1.0
    assert given["a"]["advantages"].values().tolist() == pytest.approx([1.5] * 4 + [1.0] * 2)


def test_no_log_probs_are_computed_where_no_later_policy_shares_a_lap():
    batch = set_advantages(batch_of(episode("t", 0, [[1, 1], []]), episode("u", 0, [[], [1, 1]])))
    _, _, calls = update(build("happo"), batch, {"a": 1.0, "b": 1.0})
    assert {kind for kind, _ in calls} == {"update", "updated"}
    batch = batch_of(episode("t", 0, [[1, None, 1], [None, 1, 1]]))  # cells 0, 3 and 4, 5: two laps
    one, two, other = (ratio_rows([cells], [[1]], [[0.0]]) for cells in ([0], [3], [5]))
    assert share_laps(one, two, batch) and not share_laps(one, other, batch)


def test_no_log_probs_are_computed_for_alternatives_only():
    batch = batch_of(branch(episode("t", 0, [[1.0], [1.0]]), "a", 1, [0.5]))
    kept, alternative, beside = (ratio_rows([cells], [[1]], [[0.0]]) for cells in ([0], [2], [1]))
    assert share_laps(kept, beside, batch) and not share_laps(alternative, beside, batch)


@pytest.mark.parametrize("ratio", list(Ratio))
def test_with_ratios_of_one_it_is_mappo_to_the_last_bit(ratio):
    results = []
    for learner in (build("mappo", lam=0.9), build("happo", lam=0.9, ratio=ratio)):
        batch = two_samples()
        batch.critic_data.values_ERA = torch.linspace(0, 1, batch.mask_ERA.numel()).view_as(batch.mask_ERA)
        learner.assign_credit(batch)
        results.append(update(learner, batch, dict.fromkeys(AGENTS, 0.0))[1])
    for name in AGENTS:
        mappo, happo = results[0][name], results[1][name]
        assert set(mappo.keys()) == set(happo.keys())
        assert all(
            torch.equal(mappo[key].values(), happo[key].values()) for key in mappo.keys() - {"temperature", "version"}
        )


def test_what_credit_estimated_stays_as_it_was():
    batch = team_of_three()
    update(build("happo"), batch, {"a": 0.5, "b": 0.5, "c": 0.5})
    assert all((rows["advantages"].values() == 1).all() for rows in batch.rows.values())


def test_one_agent_is_mappo_with_one_agent():
    results = []
    for name in ("mappo", "happo"):
        batch = batch_of(*(episode(f"t{i}", 0, [[i % 2, 1], []]) for i in range(4)))
        batch.critic_data.values_ERA = torch.full(batch.mask_ERA.shape, 0.25)
        learner = build(name)
        learner.assign_credit(batch)
        _, given, calls = update(learner, batch, {"a": 1.0})
        results.append(given["a"]["advantages"].values())
        assert ("log_probs", "a") not in calls
    assert torch.equal(*results)


def test_twins_that_share_a_policy_are_updated_together_and_do_not_correct_one_another():
    record = episode("t", 0, [[1, 0], [0, 1]])
    for turn in record.turns:
        turn.policy = "shared"
    batch = set_advantages(batch_of(record))
    metrics, given, calls = update(build("happo"), batch, {"shared": 1.0})
    assert calls == [("update", "shared"), ("updated", "shared")] and metrics["shared"]["factor_max"] == 1.0
    assert len(given["shared"]) == 4 and (given["shared"]["advantages"].values() == 1).all()


def test_a_third_agent_is_corrected_for_both_twins():
    batch = team_of_three(("abc", "ac", "ab"))
    batch.rows = {"twins": cat(batch.rows["a"], batch.rows["c"]), "b": batch.rows["b"]}
    _, given, _ = update(build("happo", clip=None), batch, {"twins": math.log(3.0), "b": 0.0}, ["twins", "b"])
    assert given["b"]["advantages"].values().tolist() == pytest.approx([9.0, 9.0, 3.0, 3.0])


def cat(*parts):
    keys = [key for key, column in parts[0].items() if column.is_nested]
    joined = {key: [row for part in parts for row in part[key].unbind()] for key in keys}
    ragged = {key: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for key, rows in joined.items()}
    return TensorDict(ragged, batch_size=[sum(map(len, parts))])


def branched():
    """Both agents have alternatives of round 1, in the same columns behind the rounds; round 2 has none."""
    record = branch(episode("t", 0, [[1.0, 0.0], [0.0, 1.0]]), "a", 1, [0.5, 0.0])
    return set_advantages(batch_of(branch(record, "b", 1, [0.25])))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_alternatives_are_no_part_of_the_joint_action(order):
    """The later policy's alternatives, and the kept turn that is compared with them, stay; round 2 is corrected."""
    batch = branched()
    shift_ERA = torch.tensor([[[2.0, 2.0], [3.0, 3.0], [5.0, 5.0], [7.0, 7.0]]]).log()
    _, given, _ = update(build("happo", clip=None), batch, {"a": shift_ERA, "b": shift_ERA}, order)
    got, last = grids(batch, given)[0], AGENTS.index(order[1])
    assert got[:, last].tolist() == pytest.approx([1.0, 3.0, 1.0, 1.0 if order[1] == "a" else 0.0])
    assert got[:, 1 - last].tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0 if order[1] == "b" else 0.0])


def test_a_kept_turn_gives_its_ratio_to_those_who_are_compared_with_nothing():
    batch = set_advantages(batch_of(branch(episode("t", 0, [[1.0, 0.0], [0.0, 1.0]]), "a", 1, [0.5, 0.0])))
    shift_ERA = torch.tensor([[[2.0, 1.0], [3.0, 1.0], [5.0, 1.0], [7.0, 1.0]]]).log()
    factors_ERA = log_factors(shift_ERA, batch).exp()
    assert factors_ERA[0, :, 1].tolist() == pytest.approx([2.0, 3.0, 1.0, 1.0])


def test_trained_alternatives_that_are_compared_with_nothing_are_left_alone_too():
    record = branch(branch(episode("t", 0, [[1.0], [0.0]]), "a", 1, [0.5]), "b", 1, [0.5])
    for turn in record.turns:
        turn.compared = False
    factors_ERA = log_factors(torch.full((1, 2, 2), 2.0).log(), batch_of(record)).exp()
    assert factors_ERA[0].tolist() == [[pytest.approx(4.0)] * 2, [1.0, 1.0]]


def test_orders_are_fresh_and_follow_from_the_seed():
    def orders(learner, count):
        found = []
        for _ in range(count):
            found.append(tuple(learner.order(["c", "a", "b"])))
            learner.num_updates += 1
        return found

    drawn = orders(build("happo", seed=3), 200)
    assert len(set(drawn)) == 6 and all(15 <= drawn.count(order) <= 55 for order in set(drawn))
    assert drawn == orders(build("happo", seed=3), 200) != orders(build("happo", seed=4), 200)
    assert build("happo").order(["a", "b", "c"]) == build("happo").order(["b", "c", "a"]), "whichever came first"


def test_the_order_goes_on_after_a_resume():
    first = build("happo")
    positions = lambda learner: update(learner, two_rows(), dict.fromkeys(AGENTS, 0.0))[0]["a"]["update_position"]  # noqa: E731
    drawn = [positions(first) for _ in range(12)]
    assert set(drawn) == {1.0, 2.0}
    again = build("happo")
    assert [positions(again) for _ in range(5)] == drawn[:5]
    resumed = build("happo")
    resumed.load_state_dict(again.state_dict())
    assert [positions(resumed) for _ in range(7)] == drawn[5:]


def two_rows():
    return set_advantages(two_samples())


def test_while_critics_warm_up_nobody_is_updated():
    assert update(build("happo"), two_rows(), {})[0] == {}


class Tabular:
    """A policy of two actions with exact expectations: a row is a joint action, and weighs what it was likely."""

    def __init__(self, probabilities, weights_E, rate):
        self.probabilities, self.weights_E, self.rate = torch.tensor(probabilities), weights_E, rate
        self.given = []

    async def update_actor(self, rows):
        await asyncio.sleep(0)
        advantages_E, actions_E = rows["advantages"].values(), rows["responses"].values()
        self.given += advantages_E.tolist()
        worth_2 = torch.zeros(2).index_add(
            0, actions_E, self.weights_E * advantages_E
        )  # times the action's probability
        if self.rate is None:
            self.probabilities = torch.eye(2)[(worth_2 / self.probabilities).argmax()]
        else:
            gradient_2 = worth_2 - self.probabilities * worth_2.sum()  # of the expectation by the logits
            self.probabilities = (self.probabilities.log() + self.rate * gradient_2).softmax(-1)
        return {}

    async def compute_log_prob(self, rows):
        log_probs = self.probabilities.log()[rows["responses"].values()]
        return TensorDict({"log_probs": like(rows, log_probs)}, batch_size=[len(rows)])


def train(learner, payoffs, start, rate, steps=1):
    """The expected payoff before every step and after the last one; what the last step trained on."""
    joint = [(a, b) for a in range(2) for b in range(2)]
    probabilities = dict.fromkeys(AGENTS, start)
    expected, groups = [], {}
    for step in range(steps + 1):
        weights_E = torch.tensor([probabilities["a"][a] * probabilities["b"][b] for a, b in joint])
        payoffs_E = torch.tensor([payoffs[a][b] for a, b in joint])
        expected.append(float((weights_E * payoffs_E).sum()))
        if step == steps:
            return expected, groups
        records = [episode(f"{a}{b}", 0, [[payoffs[a][b]]] * 2) for a, b in joint]
        for record, actions in zip(records, joint, strict=True):
            for turn, action in zip(record.turns, actions, strict=True):
                turn.response_ids, turn.log_probs = [action], [math.log(probabilities[turn.agent][action])]
        batch = batch_of(*records)
        batch.critic_data.values_ERA = torch.full(batch.mask_ERA.shape, expected[-1])
        learner.assign_credit(batch)
        groups = {agent: Tabular(probabilities[agent], weights_E, rate) for agent in AGENTS}
        asyncio.run(learner.update(batch, groups))
        probabilities = {agent: group.probabilities.tolist() for agent, group in groups.items()}
    raise AssertionError


GAME = [[0.0, 2.0], [2.0, -1.0]]
XOR = [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize("seed", range(4))
def test_best_responses_one_after_another_reach_what_simultaneous_ones_miss(seed):
    """The first one's best response is worth 1.1, the second's to that 2; both at once -1. Advantages 1.25 and -1.75 of the
    joint actions that the first one made 1/.3 as likely, and 0 of those that it gave up."""
    (before, after), groups = train(build("happo", "team", whiten=False, seed=seed, **EXACT), GAME, [0.7, 0.3], None)
    assert before == pytest.approx(0.75) and after == pytest.approx(2.0)
    second = next(group for group in groups.values() if 0.0 in group.given)
    assert sorted(second.given) == pytest.approx([-5.8333, 0.0, 0.0, 4.1667], abs=1e-4)
    alone = second.probabilities.new_tensor([0.7, 0.3])
    (first,) = [group for group in groups.values() if group is not second]
    assert float(first.probabilities @ torch.tensor(GAME) @ alone) == pytest.approx(1.1)
    assert sorted(first.given) == pytest.approx([-1.75, -0.75, 1.25, 1.25])
    (_, together), _ = train(build("mappo", "team", whiten=False), GAME, [0.7, 0.3], None)
    assert together == pytest.approx(-1.0)


@pytest.mark.parametrize("seed", range(2))
def test_exact_gradients_reach_1_on_xor_where_simultaneous_ones_stay_below_half(seed):
    """A payoff of 1 where the actions differ. Two alike that are updated alike stay alike: 2p(1 - p) <= 1/2."""
    happo, _ = train(build("happo", "team", whiten=False, seed=seed, **EXACT), XOR, [0.7, 0.3], 8.0, steps=40)
    mappo, groups = train(build("mappo", "team", whiten=False), XOR, [0.7, 0.3], 8.0, steps=40)
    assert happo[-1] > 0.99 and happo[0] == pytest.approx(0.42)
    assert max(mappo) <= 0.5 + 1e-6 and torch.equal(groups["a"].probabilities, groups["b"].probabilities)


def test_without_the_factor_one_after_another_is_simultaneous():
    """The order alone does nothing: with M clipped to 1 it is MAPPO, and misses."""
    (_, after), _ = train(build("happo", "team", whiten=False, clip=1.0), GAME, [0.7, 0.3], None)
    assert after == pytest.approx(-1.0)


def test_the_default_keeps_the_factor_within_two():
    """It turns 1/.3 and 0 into 2 and 1/2."""
    _, groups = train(build("happo", "team", whiten=False, seed=0), GAME, [0.7, 0.3], None)
    second = next(group for group in groups.values() if min(group.given) < -1.75)
    assert sorted(second.given) == pytest.approx([-1.75 * 2, -0.75 / 2, 1.25 / 2, 1.25 * 2])


def test_facts():
    happo, mappo = LEARNERS.get("happo"), LEARNERS.get("mappo")
    assert issubclass(happo, mappo) and (happo.critics, happo.default_credit) == (CentralCritic(), "team")
    assert happo.estimators() == mappo.estimators() and happo.assign_credit is mappo.assign_credit


@pytest.mark.parametrize(
    "override,words",
    [
        ("learner.clip=0.5", ["learner.clip=0.5", "at least 1", "or null"]),
        ("learner.ratio=geo", ["learner.ratio", "geo", "geometric"]),
        ("learner.seed=-1", ["learner.seed=-1", "at least 0"]),
        ("learner.token_gamma=1.5", ["learner.token_gamma=1.5", "1"]),
    ],
)
def test_invalid_keys_are_named(compose_config, cold_assets, override, words):
    from marl.config.errors import ConfigError, explain
    from marl.preflight.prepare import prepare

    with pytest.raises((ConfigError, ConfigCompositionException)) as caught:
        prepare(compose_config(f"assets={cold_assets}", "learner=happo", override))
    assert all(word in explain(caught.value) for word in words), explain(caught.value)


def test_alternatives_are_refused_where_all_turns_are_compared_with_them(compose_config, cold_assets):
    from marl.config.errors import ConfigError
    from marl.preflight.prepare import prepare

    tree = compose_config(f"assets={cold_assets}", "learner=happo", "runner=tree", "credit=team")
    with pytest.raises(ConfigError, match=r"runner=tree compares alternatives.*learner=happo.*runner.train=path"):
        prepare(tree)
    tree.runner.train = "path"
    prepare(tree)


def test_its_order_follows_the_runs_seed(compose_config, cold_assets):
    from marl.preflight.prepare import prepare

    learner = prepare(compose_config(f"assets={cold_assets}", "learner=happo", "seed=7")).learner
    assert (learner.config.seed, learner.config.ratio, learner.config.clip) == (7, Ratio.geometric, 2.0)
    unclipped = prepare(compose_config(f"assets={cold_assets}", "learner=happo", "learner.clip=null")).learner
    assert unclipped.config.clip is None
