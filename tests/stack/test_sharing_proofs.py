"""Every way of sharing weights learns with every family of learners, and adapters are not bound by the limit of sharing.

*Split information*: each of two agents holds one number, the answer is their sum mod 10; 20 steps of 256 episodes. With one of
them frozen they stay under .65 in 30 steps (``test_proofs.py``). Utilities of this size do not learn arithmetic: QMIX learns to
*collaborate* instead. ``make sharing-table`` runs all seeds and prints the table of docs/teams.md.
"""

import time
from itertools import product
from pathlib import Path
from statistics import mean

import pytest

from marl.config.policies import Sharing
from marl.main import run
from marl.quickstart.assets import RECIPES, ensure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADAPTERS = ("sharing=lora", "actor_rollout_ref.actor.optim.lr=6e-3")
"""A small rank learns at a higher rate than whole models."""
BY_ROUND = ("sharing=groups", *(f"agents.{agent}.policy_by_round=[tell,add]" for agent in ("alice", "carol")))
"""Both agents tell their numbers with one policy and add them with another."""
BY_AGENT = ("sharing=groups", "agents.alice.policy=left", "agents.carol.policy=right")
MODES = {
    "individual": ("sharing=individual",),
    "shared": ("sharing=shared",),
    "groups": BY_ROUND,
    "lora": ADAPTERS,
}
LEARNERS = ("grpo", "ippo", "mappo", "happo")
QUIET = ("resources.one_process=true", "trainer.logger=[]")


def runs_of(*learners):
    """Every mode, learner and seed. ``make test-all`` takes the first seed, without individual policies, which
    ``test_proofs.py`` has, and without HAPPO where a round has one policy: it is MAPPO there."""
    for mode, learner, seed in product(MODES, learners, range(3)):
        is_first = seed == 0 and mode != "individual" and (learner != "happo" or mode == "lora")
        yield pytest.param(mode, learner, seed, marks=[] if is_first else pytest.mark.table)


@pytest.fixture(scope="module")
def table(request):
    """Scores before and after training, by mode, learner and seed; printed in the end."""
    cells, plugin = {}, request.config.pluginmanager.get_plugin
    yield cells
    with plugin("capturemanager").global_and_fixture_disabled():
        for line in rows(cells) if cells else ():
            plugin("terminalreporter").write_line(line)


def rows(cells):
    """The table in Markdown, scores by seed in each cell, and what it cost."""
    learners = list(dict.fromkeys(learner for _, learner in cells))
    starts = [mean(before for (_, name), runs in cells.items() if name == learner for before, _, _ in runs.values())
              for learner in learners]  # fmt: skip
    yield ""
    yield f"| `sharing=` | {' | '.join(learners)} |"
    yield f"|---|{'---|' * len(learners)}"
    yield f"| before | {' | '.join(f'{start:.2f}' for start in starts)} |"
    for mode in dict.fromkeys(mode for mode, _ in cells):
        yield f"| `{mode}` | {' | '.join(cell(cells.get((mode, learner), {})) for learner in learners)} |"
    seconds = [cost for runs in cells.values() for _, _, cost in runs.values()]
    yield f"{len(seconds)} runs, {sum(seconds) / 60:.1f} minutes of processor time"


def cell(runs):
    return " ".join(f"{after:.2f}" for _, (_, after, _) in sorted(runs.items()))


@pytest.fixture
def learn(compose_config, tmp_path, record_property, table):
    def learn(mode, learner, seed, *overrides, name="split_information", key="accuracy/round_2"):
        words = (f"seed={seed}", f"trainer.default_local_dir={tmp_path}", *QUIET, *overrides)
        config = compose_config(*words, name=name)
        ensure(Path(config.assets), RECIPES[config.task], config.seed)
        started = time.process_time()
        history = run(config).history
        before, after = history[min(history)][key], history[max(history)][key]
        table.setdefault((mode, learner), {})[seed] = before, after, time.process_time() - started
        record_property("numbers", f"{before:.3f} -> {after:.3f}")
        return before, after

    return learn


@pytest.mark.parametrize("mode,learner,seed", runs_of(*LEARNERS))
def test_agents_learn_to_share_what_they_know(learn, mode, learner, seed):
    options = (f"learner={learner}", "credit=influence_undiscounted", "trainer.total_training_steps=20", *MODES[mode])
    before, after = learn(mode, learner, seed, *options)
    assert before < 0.5 and after > 0.7, f"{before:.3f} -> {after:.3f}"


@pytest.mark.parametrize("mode,learner,seed", runs_of("qmix"))
def test_utilities_learn_to_collaborate(learn, mode, learner, seed):
    """Together 1, alone .6, and 0 for who collaborates alone; at first .55."""
    options = MODES[mode] if mode != "groups" else BY_AGENT  # a game has one round
    words = (f"learner={learner}", "+runner.game={name: collaborate}", "trainer.total_training_steps=20", *options)
    before, after = learn(mode, learner, seed, *words, name="game", key="score")
    assert before < 0.6 and after > 0.85, f"{before:.3f} -> {after:.3f}"


BOUND = 0.6
"""Above the 2 / 2^n of two agents that share one policy by three deviations of 256 plays (arXiv:2109.11251, Proposition 1)."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.table) for seed in (1, 2))])
@pytest.mark.parametrize("mode", ["individual", "shared", "lora"])
def test_adapters_are_not_bound_by_the_limit_of_sharing(learn, mode, seed):
    """Paid 1 where the two act differently. One policy for both gets 2p(1 - p), at most a half."""
    words = ("+runner.game={name: halves}", "trainer.total_training_steps=30", *MODES[mode])
    before, after = learn(mode, "halves", seed, *words, name="game", key="score")
    assert 0.35 < before < 0.65
    assert after < BOUND if mode == "shared" else after > 0.85, f"{before:.3f} -> {after:.3f}"


def test_the_table_has_every_mode():
    assert set(MODES) == {mode.value for mode in Sharing}
