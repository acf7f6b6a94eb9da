"""A rank that dies while the run's last checkpoint is awaited: the run ends at once, not at the deadline of the save."""

import time

import pytest
import ray

from marl.cluster.failures import GroupFailed
from marl.cluster.policy_group import PolicyGroup
from marl.main import run
from marl.utils import folders

RUN = (
    "trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.logger=[]",
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "resources.timeout_s=200",
    "resources.max_restarts=0",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_death_in_the_last_save_is_noticed_at_once(cluster, compose_config, cold_assets, tmp_path, monkeypatch):
    save, died = PolicyGroup.save, []

    async def dies(self, folder, beside=True):
        """The rank has copied its state, and ends before it has written it."""
        marks = await save(self, folder, beside)
        if self.name == "alice":
            ray.kill(self.workers.workers[0])
            time.sleep(1.0)
            for mark in marks:
                mark.unlink(missing_ok=True)
            died.append(time.monotonic())
        return marks

    monkeypatch.setattr(PolicyGroup, "save", dies)
    with pytest.raises(GroupFailed, match="policy 'alice' while writing its part of a checkpoint: process .* died"):
        run(compose_config(*RUN, f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}/run"))
    assert time.monotonic() - died[0] < 30.0
    assert not folders.named(tmp_path / "run") and not list(tmp_path.glob("run/.tmp_*"))
