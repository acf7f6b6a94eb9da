"""Every learner learns: what two agents can only reach together, over several seeds, and by a bound that one of them does not
reach while the other is frozen.

*Split information*: each of two agents holds one number, the answer is their sum mod 10; 30 steps of 256 episodes. Utilities
of this size do not learn arithmetic, so that VDN and QMIX play *games* instead, of one token an action.
``pytest --junitxml`` keeps the numbers.
"""

import time
from pathlib import Path

import pytest

from marl.learners import LEARNERS
from marl.main import run
from marl.quickstart.assets import RECIPES, ensure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ALONE, TOGETHER = 0.65, 0.70
"""No agent gets to the first while the other one is frozen; every learner gets to the second."""
INFLUENCE = "credit=influence_undiscounted"
TWO_PASSES = "actor_rollout_ref.actor.ppo_epochs=2"
SPLIT = {
    "grpo": [INFLUENCE],
    "rloo": [INFLUENCE],
    "dr_grpo": [INFLUENCE],
    "reinforce_plus_plus": [INFLUENCE],
    "gspo": [INFLUENCE, TWO_PASSES],
    "dapo": [INFLUENCE, TWO_PASSES],
    "dr_mas": [INFLUENCE],
    "at_grpo": ["credit=mixed", "credit.of=final", "credit.weight=4"],
    "magrpo": ["credit=team", "credit.of=final"],
    "rae": [INFLUENCE],
    "ippo": [INFLUENCE],
    "mappo": [INFLUENCE],
    "happo": [INFLUENCE],
    # who is paid for both hears little of its own answer: critics first, and five times as long
    "cory": [
        "credit=joint",
        "runner=brief_pioneer_observer",
        "trainer.critic_warmup=5",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=150",
    ],
}
GAMES = {
    "collaborate": ["+runner.game={name: collaborate}"],
    "happo": ["task=game_70", "+runner.game={name: matrix, payoffs: happo, scale: 2}"],
}
FIVE_SEEDS = ("ippo", "mappo", "happo", "qmix")


def seeds_of(learner):
    return range(5 if learner in FIVE_SEEDS else 3)


@pytest.fixture
def learn(compose_config, tmp_path, record_property):
    def learn(seed, *overrides, name="split_information", key="accuracy/round_2"):
        here = (f"seed={seed}", f"trainer.default_local_dir={tmp_path}", "resources.one_process=true")
        config = compose_config(*here, *overrides, name=name)
        ensure(Path(config.assets), RECIPES[config.task], config.seed)
        started = time.perf_counter()
        history = run(config).history
        before, after = history[min(history)][key], history[max(history)][key]
        record_property("numbers", f"{before:.3f} -> {after:.3f}, {time.perf_counter() - started:.0f} s")
        return before, after

    return learn


SHORT = "trainer.total_training_steps=30"


@pytest.mark.parametrize("learner,seed", [(name, seed) for name in SPLIT for seed in seeds_of(name)])
def test_they_learn_to_share_what_they_know(learn, learner, seed):
    before, after = learn(seed, f"learner={learner}", SHORT, *SPLIT[learner])
    assert before < 0.5 and after > TOGETHER, f"{before:.3f} -> {after:.3f}"


@pytest.mark.parametrize("seed", range(3))
def test_with_one_agent_frozen_they_do_not(learn, seed):
    before, after = learn(seed, INFLUENCE, SHORT, "agents.carol.trainable=false")
    assert after < ALONE, f"{before:.3f} -> {after:.3f}"


def play(learn, game, learner, seed, *overrides):
    return learn(seed, f"learner={learner}", *GAMES[game], *overrides, name="game", key="score")


@pytest.mark.parametrize("learner,seed", [(name, seed) for name in ("vdn", "qmix") for seed in seeds_of(name)])
def test_utilities_learn_to_collaborate(learn, learner, seed):
    """Together 1, alone .6, and 0 for who collaborates alone; at first .55."""
    before, after = play(learn, "collaborate", learner, seed)
    assert before < 0.6 and after > 0.9, f"{before:.3f} -> {after:.3f}"


@pytest.mark.parametrize("learner", ["vdn", "qmix"])
def test_with_one_agent_frozen_utilities_do_not(learn, learner):
    """Against a peer that acts at random the best that the other can do is a mean of .65."""
    before, after = play(learn, "collaborate", learner, 0, "agents.carol.trainable=false")
    assert after < 0.75, f"{before:.3f} -> {after:.3f}"


@pytest.mark.parametrize("learner", ["happo", "mappo", "vdn", "qmix"])
def test_they_settle_on_one_of_two_conventions(learn, learner):
    """[[0, 2], [2, -1]] / 2 from pi(0) = .7, where both best responses at once would pay -.5."""
    before, after = play(learn, "happo", learner, 0)
    assert before < 0.5 and after > 0.7, f"{before:.3f} -> {after:.3f}"


def test_every_learner_has_its_proof():
    shipped = {path.stem for path in (Path(__file__).parents[2] / "configs" / "learner").glob("*.yaml")}
    ours = {name for name in LEARNERS.names() if LEARNERS.get(name).__module__.startswith("marl.")}
    assert set(SPLIT) | {"vdn", "qmix"} == ours | shipped
