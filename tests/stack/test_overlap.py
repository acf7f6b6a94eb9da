"""Tasks read ahead, dumps written beside the next step and the calls of a step, through the real parts."""

import json
from collections import Counter

import pytest

from marl.cluster.local import LocalHandle, LocalWorkers

QUIET = (
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.total_training_steps=4",
)


def fitted(alone, folder, *overrides):
    """The dumps of a run that reads ahead, by step."""
    where = (f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts")
    live = alone(*where, *QUIET, *overrides)
    live.trainer.tasks.reads_ahead = True
    live.wait(live.trainer.fit())
    return {int(path.stem): path.read_text() for path in (folder / "rollouts").iterdir()}


@pytest.mark.slow
def test_a_resumed_run_plays_the_tasks_of_the_whole_run(alone, tmp_path):
    """Saved after step 2, when the tasks of step 3 were read already."""
    whole = fitted(alone, tmp_path / "whole")
    saved = tmp_path / "whole" / "global_step_2"
    resumed = fitted(
        alone, tmp_path / "resumed", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"
    )
    assert sorted(whole) == [1, 2, 3, 4] and len(set(whole.values())) == 4
    assert resumed == {step: whole[step] for step in (3, 4)}


@pytest.mark.slow
def test_a_dump_has_the_advantages_with_which_its_step_trained(alone, tmp_path):
    dumps = fitted(alone, tmp_path, "trainer.total_training_steps=1")
    lines = [json.loads(line) for line in dumps[1].splitlines()]
    assert len(lines) == 64 and all(isinstance(line["advantage"], float) for line in lines if line["trained"])


def test_a_policy_is_called_at_most_four_times_a_phase(alone, monkeypatch):
    """Beside the requests for answers, which depend on the episodes."""
    live, calls = alone(), Counter()

    def counting(kind, of):
        plain = kind.__getattr__

        def counted(self, name):
            calls[id(of(self)), name] += 1
            return plain(self, name)

        monkeypatch.setattr(kind, "__getattr__", counted)

    counting(LocalWorkers, lambda workers: workers.worker)
    counting(LocalHandle, lambda handle: handle._target)
    live.step()
    for group in live.trainer.policies.values():
        worker, (handle,) = group.workers.worker, group.servers.server_handles
        of_worker = {name: count for (owner, name), count in calls.items() if owner == id(worker)}
        of_server = {name: count for (owner, name), count in calls.items() if owner == id(handle._target)}
        assert of_worker == {"compute_log_prob": 1, "update_actor": 1, "update_weights": 1, "weight_digest": 1}
        syncs = {
            name: of_server[name]
            for name in ("wake_up", "load_weights", "finish_weights", "held_weights")
            if name in of_server
        }
        assert of_server["take_spans"] == 1 and syncs and sum(syncs.values()) <= 4
        assert set(of_server) <= {"generate_many", "collect", "take_spans", *syncs}
