"""Games whose agents are tiny language models that act in one token, through the real stack."""

import sys
from pathlib import Path

import pytest
import torch

from marl.envs import TABLES
from marl.main import run
from marl.quickstart import __main__ as quickstart
from marl.quickstart.assets import RECIPES, Recipe, ensure
from tests.builders import slow_but

PRISONERS = [[[3, 3], [0, 4]], [[4, 0], [1, 1]]]
FOUR = ("+agents.tom={}", "+agents.ann={}")


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets") / "game"
    ensure(folder, Recipe("game", steps=60, batch=32, train_problems=64, test_problems=8), seed=0)
    return folder


@pytest.fixture
def started(alone, assets):
    def start(game, *overrides):
        return alone(f"assets={assets}", f"+runner.game={game}", *overrides, name="game")

    return start


def actions(turns):
    return [int(turn.text) for turn in turns]


def named(episodes):
    """Those in which everybody named an action, and there are some."""
    kept = [episode for episode in episodes if not episode.counts["no_action"]]
    assert len(kept) > len(episodes) / 2
    return kept


@pytest.mark.parametrize(
    "game,table",
    [("{name: matrix, payoffs: happo}", [[[u, u] for u in row] for row in TABLES["happo"]]),
     pytest.param(f"{{name: matrix, payoffs: {PRISONERS}}}", PRISONERS, marks=pytest.mark.slow)],
)  # fmt: skip
def test_agents_act_in_one_token_and_get_the_joint_payoff(started, game, table):
    live = started(game)
    episodes = live.episodes(samples=8)
    batch = live.trainer.batch_of(episodes)
    seen = set()
    for e, episode in enumerate(episodes):
        assert [turn.agent for turn in episode.turns] == ["alice", "carol"]
        assert all(len(turn.response_ids) == 1 and turn.stop_reason == "length" for turn in episode.turns)
        assert [turn.observation[-1]["content"] for turn in episode.turns] == ["how many ?"] * 2
        if episode.counts["no_action"]:
            payoffs = [min(min(min(cell) for cell in row) for row in table)] * 2
        else:
            a, b = actions(episode.turns)
            payoffs = table[a][b]
            seen.add((a, b))
            assert episode.answer == f"{a} {b}"
        assert [turn.scored.value for turn in episode.turns] == payoffs == batch.scores_ERA[e, 0].tolist()
        assert episode.scored.value == sum(payoffs) / 2 == batch.team_score_E[e]
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1)}
    metrics = live.step()
    assert metrics["agent/alice/grad_norm"] > 0 and metrics["agent/alice/log_prob_gap_max"] <= 1e-5
    share = (metrics["agent/alice/score"] + metrics["agent/carol/score"]) / 2
    assert metrics["team/score"] == pytest.approx(share)


@pytest.mark.parametrize("learner", slow_but(["grpo", "mappo"], "mappo"))
def test_the_first_agent_picks_the_second_table(started, learner):
    live = started("{name: two_step, scale: 8}", f"learner={learner}")
    episodes = live.episodes(samples=8)
    for episode in named(episodes):
        first, *second = episode.turns
        assert (first.agent, first.round) == ("alice", 1) and first.scored.value == 0
        a, b = actions(second)
        payoff = 7 if first.text == "0" else [[0, 1], [1, 8]][a][b]
        assert [turn.scored.value for turn in second] == [payoff / 8] * 2 and episode.scored.value == payoff / 8
        assert second[0].extends(first) and second[0].observation[-1]["content"] == "how many ?"
        assert second[1].observation[0]["content"].split() == f"how many ? alice said {first.text} how many ?".split()
    assert len({turn.text for episode in named(episodes) for turn in episode.turns[:1]}) == 2
    batch = live.trainer.batch_of(episodes)
    assert batch.mask_ERA.sum(0).tolist() == [[32, 0], [batch.mask_ERA[:, 1, 0].sum()] * 2]
    assert live.step()["agent/carol/grad_norm"] > 0


@pytest.mark.slow
def test_a_repeated_game_shows_each_agent_what_the_others_did(started):
    live = started("{name: halves, rounds: 2}")
    for episode in named(live.episodes()):
        (alice, carol), second = episode.turns[:2], episode.turns[2:]
        assert [turn.observation[-1]["content"] for turn in second] == [
            f"carol said {carol.text} how many ?", f"alice said {alice.text} how many ?",
        ]  # fmt: skip
        won = [float(a.text != b.text) for a, b in ((alice, carol), second)]
        assert [turn.scored.value for turn in episode.turns] == [won[0], won[0], won[1], won[1]]
        assert episode.scored.value == sum(won)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_four_agents_of_one_policy_or_of_four(started, shared):
    one = [f"agents.{name}.policy=alice" for name in ("carol", "tom", "ann")] if shared else []
    live = started("{name: halves}", *FOUR, *one)
    assert len(live.trainer.policies) == (1 if shared else 4)
    episodes = live.episodes(samples=16)
    for episode in named(episodes):
        assert [turn.agent for turn in episode.turns] == ["alice", "carol", "tom", "ann"]
        right = episode.answer in ("0 0 1 1", "1 1 0 0")
        assert [turn.correct for turn in episode.turns] == [right] * 4 and episode.scored.value == right
    assert {episode.scored.value for episode in episodes} == {0.0, 1.0}
    assert len({turn.seed for episode in episodes for turn in episode.turns}) == 4 * len(episodes)
    rows = live.trainer.batch_of(episodes).rows
    assert sum(map(len, rows.values())) == 4 * len(episodes) and len(rows) == len(live.trainer.policies)
    assert live.step()["agent/alice/grad_norm"] >= 0


@pytest.mark.slow
def test_naming_no_action_gets_the_worst_payoff_and_is_counted(alone, cold_assets):
    """A model that never heard of actions."""
    live = alone("+runner.game={invalid: -3}", f"assets={cold_assets}", name="game")
    metrics, episodes = live.step(), live.episodes()
    assert metrics["team/no_action"] > 0 and torch.isfinite(torch.tensor(list(metrics.values()))).all()
    nameless = [episode for episode in episodes if episode.counts["no_action"]]
    assert nameless and all(e.answer is None and e.scored.value == -3 for e in nameless)
    assert {turn.scored.value for e in nameless for turn in e.turns} == {-3}


def test_the_quick_starts_command_takes_another_configuration(monkeypatch):
    ran = []
    monkeypatch.setattr(quickstart, "run", lambda *arguments: ran.append(arguments))
    for words in (["--config-name", "game", "seed=3", "+runner.game={name: two_step}"], ["credit=own"]):
        monkeypatch.setattr(sys, "argv", ["quickstart", *words])
        assert quickstart.main() == 0
    assert ran == [(["seed=3", "+runner.game={name: two_step}"], "game"), (["credit=own"], "quickstart")]


@pytest.fixture
def learn(compose_config, tmp_path):
    """Train, and validate before and after."""

    def learn(*overrides, seed=0):
        here = (f"trainer.default_local_dir={tmp_path}", "resources.one_process=true", f"seed={seed}")
        config = compose_config(*here, *overrides, name="game")
        ensure(Path(config.assets), RECIPES[config.task], seed)
        history = run(config).history
        return history[min(history)]["score"], history[max(history)]["score"]

    return learn


slow = pytest.mark.slow
seeds = pytest.mark.parametrize("seed", [0, 1, 2])


@slow
@seeds
def test_two_policies_learn_to_differ(learn, seed):
    before, after = learn(seed=seed)
    assert 0.35 < before < 0.65 and after > 0.9, f"{before:.3f} -> {after:.3f}"


@slow
@seeds
def test_one_policy_never_does_better_than_half(learn, seed):
    """HATRPO (arXiv:2109.11251), Proposition 1; 256 plays are three deviations of .03 from .6."""
    before, after = learn("agents.carol.policy=alice", seed=seed)
    assert after < 0.6, f"{before:.3f} -> {after:.3f}"


COLLABORATE = "+runner.game={name: collaborate}"


@slow
@seeds
def test_trained_together_they_learn_to_collaborate(learn, seed):
    """Together 1, alone .6, at first .55."""
    before, after = learn(COLLABORATE, seed=seed)
    assert 0.5 < before < 0.6 and after > 0.9, f"{before:.3f} -> {after:.3f}"


@slow
@seeds
def test_trained_against_a_frozen_peer_an_agent_learns_to_act_alone(learn, compose_config, seed):
    """The peer acts alone; who collaborates half of the time has a mean of (.3 + .6) / 2, who acts alone one of .6."""
    peer = Path(compose_config("task=game_02", f"seed={seed}", name="game").assets)
    ensure(peer, RECIPES["game_02"], seed)
    frozen = ("agents.carol.trainable=false", f"+policies.carol.model.path={peer}/model", "credit=own")
    before, after = learn(COLLABORATE, *frozen, seed=seed)
    assert before < 0.5 and 0.57 < after < 0.63, f"{before:.3f} -> {after:.3f}"
