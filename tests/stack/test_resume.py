"""A run that is stopped and resumed is the run that was never stopped: weights, optimizers, random states, metrics, dumps."""

import random

import numpy as np
import pytest
import torch

from marl.learners import LEARNERS
from tests.builders import BUILT_IN
from tests.stack.builders import ADAPTED, runner_options
from tests.stack.resumed import assert_same_run

STEPS = 4
QUIET = (
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=2", "trainer.logger=[file]",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]",
)  # fmt: skip
"""The rate changes from step to step, so that a schedule that is one step off shows."""
OF_LEARNER = {
    "at_grpo": ("runner=tree", "credit=own"),
    "cory": ("runner=pioneer_observer", "credit=auto", "learner.exchange_every=2"),
    "magrpo": ("credit=auto",),
    "qmix": ("credit=team", "learner.target_update_every=2"),
    "rae": ("credit=auto",),
    "vdn": ("credit=team", "learner.target_update_every=2"),
}
INDIVIDUAL = {name: (f"learner={name}", *OF_LEARNER.get(name, ())) for name in LEARNERS.names()}
GROUPS = (
    "sharing=groups",
    "+agents.bob={}",
    "agents.alice.policy=pair",
    "agents.bob.policy=pair",
    "agents.carol.policy=one",
)
OF_SHARING = {"shared": ("sharing=shared",), "lora": ADAPTED, "groups": GROUPS}
SHARED = {
    f"{sharing}-{learner}": (*options, f"learner={learner}")
    for sharing, options in OF_SHARING.items()
    for learner in ("ippo", "mappo")
}
CASES = {**INDIVIDUAL, **SHARED}
VARIANTS = ("dapo", "dr_grpo", "dr_mas", "gspo", "reinforce_plus_plus", "rloo")
SCHEMES = {
    "counterfactual": ("learner=grpo",), "influence": ("learner=mappo",), "joint": ("learner=grpo",), "mixed": ("learner=grpo", "credit.of=final"),
    "own": ("learner=mappo",), "replay": ("learner=grpo",), "shapley": ("learner=grpo",), "team": ("learner=ippo",),
}  # fmt: skip
PLAYED = {
    f"runner-{name}": (*runner_options(name), "learner=ippo", "data.max_prompt_length=120")
    for name in BUILT_IN
    if name not in ("debate", "tree", "pioneer_observer")
}
MORE = {
    **{f"learner-{name}": (f"learner={name}",) for name in VARIANTS},
    **{f"credit-{name}": (f"credit={name}", *options) for name, options in SCHEMES.items()},
    **PLAYED,
}
"""Runners whose episodes differ in turns and agents, credit schemes with evidence and numbers of their own, shipped variants."""


@pytest.fixture
def fitted(alone, tmp_path):
    """Runs of one process, by name, each in a folder of its own."""

    def fit(name, *overrides):
        folder = tmp_path / name
        where = (f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts")
        live = alone(*QUIET, *where, *overrides)
        scramble(len(name))
        live.wait(live.trainer.fit())
        return folder

    return fit


def scramble(seed):
    """The global generators as another process might find them."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_one_that_was_never_stopped(fitted, case):
    """Two cut points; between them the learner renews a target, or an exchange."""
    cut(fitted, CASES[case], (1, 3))


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("case", {**CASES, **MORE})
def test_every_resume_pair_is_equal(fitted, case):
    """``make chaos ARGS="-k every_resume_pair"``: a run is cut after each of its steps."""
    cut(fitted, {**CASES, **MORE}[case], range(1, STEPS))


@pytest.mark.slow
def test_a_run_that_is_made_longer_is_the_one_that_was_that_long_from_the_start(fitted):
    options = OF_SHARING["shared"] + ("learner=mappo",)
    whole, short = fitted("whole", *options), fitted("short", *options, "trainer.total_training_steps=2")
    assert_same_run(whole, fitted("longer", *options, *resumed_from(short, 2)), 2, STEPS)


def cut(fitted, options, cuts):
    """Compare a run with those that go on from its checkpoints."""
    whole = fitted("whole", *options)
    for after in cuts:
        assert_same_run(whole, fitted(f"resumed_{after}", *options, *resumed_from(whole, after)), after, STEPS)


def resumed_from(folder, step):
    return "trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_{step}"
