"""A replay of a run through Ray: its episode workers wrote the ledgers, and two ranks a policy make the update again."""

import pytest

from marl.commands import replay
from marl.main import run

RUN = (
    "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=false",
    "trainer.logger=[file]", "controller.keep_ledger=true", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=3", "resources.timeout_s=200", "learner=mappo",
    "trainer.n_gpus_per_node=2", "resources.placement=colocated", "controller.num_workers=2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replay_through_ray_is_equal(cluster, compose_config, cold_assets, tmp_path, capsys):
    places = (f"trainer.default_local_dir={tmp_path}", f"trainer.rollout_data_dir={tmp_path}/rollouts")
    run(compose_config(*RUN, *places, f"assets={cold_assets}"))
    assert len(list(tmp_path.glob("ledger/step_2/*.jsonl"))) > 2
    capsys.readouterr()
    code = replay.main([str(tmp_path), "step=2"])
    said = capsys.readouterr()
    assert code == 0 and "global_step_2 (weights, optimizers, learner): equal" in said.out, said.out + said.err
