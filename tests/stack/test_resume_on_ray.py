"""Resumed and unbroken runs are equal through Ray too: on one rank a policy and on two, in pools of their own and in one."""

import random

import numpy as np
import pytest
import torch

from marl.learners import LEARNERS, register_learner
from marl.learners.grpo import GRPO
from marl.main import run
from tests.stack.builders import ADAPTED
from tests.stack.resumed import assert_same_run

pytestmark = pytest.mark.slow
STEPS, AFTER = 3, 1
RUN = (
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=3", "trainer.logger=[file]",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]", "trainer.max_actor_ckpt_to_keep=null",
    "resources.timeout_s=200",
)  # fmt: skip
"""The rate changes from step to step, so that a schedule that is one step off shows."""
DROPOUT = tuple(f"+{of}.model.override_config.attention_dropout=0.1" for of in ("actor_rollout_ref", "critic"))
"""Every rank draws from its own random state."""
PAIRS = {
    "ippo": ("learner=ippo",),
    "mappo, episode workers": ("learner=mappo", "resources.placement=colocated", "controller.num_workers=2"),
    "adapters": (*ADAPTED, "learner=ippo", *DROPOUT),
    "mappo, two ranks": ("learner=mappo", "trainer.n_gpus_per_node=2"),
    "one policy, two ranks": ("learner=ippo", "sharing=shared", "trainer.n_gpus_per_node=2", *DROPOUT),
    "a learner that draws": ("learner=drawing",),
}


class Drawing(GRPO):
    """Weighs every step by what it draws from the driver's global generators."""

    def assign_credit(self, batch):
        metrics = super().assign_credit(batch)
        weight = random.random() + np.random.rand() + float(torch.rand(()))
        for rows in batch.rows.values():
            rows["advantages"] = rows["advantages"] * weight
        return metrics


MOVES = {
    "from one process to Ray": ("resources.one_process=true", "resources.one_process=false", ()),
    "from pools to one": ("resources.placement=separate", "resources.placement=colocated", ("rng",)),
}
"""Where a run begins, where it goes on, and what may differ: workers in one process share its random state."""


@pytest.fixture
def trained(cluster, compose_config, cold_assets, tmp_path, monkeypatch):
    """Run to the end in a folder of this name; the folder."""
    monkeypatch.setattr(LEARNERS, "_entries", dict(LEARNERS._entries))
    register_learner("drawing")(Drawing)

    def trained(name, *overrides):
        folder = tmp_path / name
        where = (f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts")
        run(compose_config(*RUN, *where, f"assets={cold_assets}", *overrides))
        return folder

    return trained


def resumed_from(whole):
    return "trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole}/global_step_{AFTER}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_resumed_run_is_the_one_that_was_never_stopped(trained, pair):
    whole = trained("whole", *PAIRS[pair])
    assert_same_run(whole, trained("resumed", *PAIRS[pair], *resumed_from(whole)), AFTER, STEPS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("move", MOVES)
def test_a_run_that_goes_on_in_another_placement_is_the_one_that_stayed(trained, move):
    before, after, but = MOVES[move]
    whole = trained("whole", "learner=mappo", before)
    assert_same_run(whole, trained("resumed", "learner=mappo", after, *resumed_from(whole)), AFTER, STEPS, but)
