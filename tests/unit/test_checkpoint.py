import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from marl import checkpoint
from marl.checkpoint import Kept
from marl.cluster.shared_folder import check_shared
from marl.cluster.workers.shard_files import FolderWorker
from marl.config.deadlines import Deadline
from marl.config.errors import ConfigError
from marl.preflight.run_folder import to_resume
from marl.utils import folders, manifest, marks, trees
from marl.utils.background import Background
from marl.utils.best import add_metrics
from marl.utils.manifest import MANIFEST
from tests.builders import writing

NOW = Deadline(0.05, "resources.save_timeout_s")


def save(root, step, **facts):
    with writing(root, step, {"metrics": {}, **facts}) as folder:
        (folder / "alice").mkdir()
        (folder / "alice" / "weights").write_text(str(step))
        folders.write_state(folder, {"step": step})


def steps(root):
    return [step for step, _ in folders.numbered(root)]


def test_newest_complete_and_tracker(tmp_path):
    for step in (2, 10, 9):
        save(tmp_path, step)
    assert steps(tmp_path) == [2, 9, 10]
    assert (tmp_path / folders.TRACKER).read_text() == "9"
    assert folders.read_state(tmp_path / "global_step_10") == {"step": 10}


def test_a_save_that_fails_leaves_the_last_one(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(RuntimeError), writing(tmp_path, 2) as folder:
        (folder / "weights").write_text("half")
        raise RuntimeError("disk full")
    assert steps(tmp_path) == [1] and (tmp_path / folders.TRACKER).read_text() == "1"
    folders.clean(tmp_path)
    assert [path.name for path in tmp_path.glob(".*")] == []
    save(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "global_step_3").mkdir()
    assert folders.complete(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="global_step_3 holds no trainer.json"):
        folders.read_state(tmp_path / "global_step_3")


@pytest.fixture
def disk(monkeypatch):
    """Checks that whatever gets its name was on the disk before, as a loss of power asks: renames may be kept, and contents
    that were not flushed lost."""
    synced, renamed = {}, []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor):
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[path.stat().st_ino] = path.read_bytes() if path.is_file() else sorted(os.listdir(path))

    def is_on_disk(path):
        return synced.get(path.stat().st_ino) == (path.read_bytes() if path.is_file() else sorted(os.listdir(path)))

    def named(source, target):
        source, target = Path(source), Path(target)
        within = [source, *source.rglob("*")] if source.is_dir() else [source]
        if target.name == MANIFEST:
            within += [path for path in target.parent.rglob("*") if path != source]
        assert [path for path in within if not is_on_disk(path)] == [], f"{target} before its contents"
        replace(source, target)
        renamed.append(target.name)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", named)
    return SimpleNamespace(renamed=renamed, is_on_disk=is_on_disk)


def test_nothing_has_its_name_before_it_is_on_the_disk(tmp_path, disk):
    """Files and folders before the manifest, the manifest before the folder's name, that before the tracker."""
    save(tmp_path, 1)
    assert disk.renamed == [MANIFEST, "global_step_1", folders.TRACKER] and disk.is_on_disk(tmp_path)
    save(tmp_path, 1)
    assert disk.renamed[3:] == [MANIFEST, ".old_global_step_1", "global_step_1", folders.TRACKER]


def test_a_checkpoint_that_made_way_returns(tmp_path):
    save(tmp_path, 1)
    os.replace(tmp_path / "global_step_1", tmp_path / ".old_global_step_1")
    folders.clean(tmp_path)
    assert steps(tmp_path) == [1]


def settings(**changes):
    return SimpleNamespace(**{"resume_mode": "auto", "resume_from_path": None, **changes})


def test_the_newest_whole_one_is_resumed_and_without_one_each_is_named(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "global_step_3" / "alice" / "weights").write_text("4")
    (tmp_path / "global_step_2" / "alice" / "weights").unlink()
    found, refused = to_resume(settings(), tmp_path)
    assert found == tmp_path / "global_step_1" and sorted(refused) == ["global_step_2", "global_step_3"]
    (tmp_path / "global_step_1" / MANIFEST).unlink()
    with pytest.raises(
        ConfigError, match="_3: alice/weights has another sha256.*_2: alice/weights is missing.*earlier"
    ):
        to_resume(settings(), tmp_path)
    named = settings(resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_2"))
    with pytest.raises(ConfigError, match="resume_from_path=.*global_step_2: alice/weights is missing"):
        to_resume(named, tmp_path)
    assert to_resume(settings(resume_mode="disable"), tmp_path) == (None, {})


def test_prune_keeps_the_newest(tmp_path):
    for step in range(5):
        save(tmp_path, step)
    folders.prune(tmp_path, 2)
    assert steps(tmp_path) == [3, 4]
    folders.prune(tmp_path, None)
    assert steps(tmp_path) == [3, 4]


def test_a_file_that_is_open_elsewhere_does_not_end_the_run(tmp_path, monkeypatch):
    """On NFS, removing it leaves it under another name, and its folder is not empty."""
    for step in (1, 2):
        save(tmp_path, step)
    remove = os.unlink
    with monkeypatch.context() as patched:
        patched.setattr(
            os,
            "unlink",
            lambda name, **where: os.rename(name, ".nfs1", src_dir_fd=where["dir_fd"], dst_dir_fd=where["dir_fd"]),
        )
        folders.prune(tmp_path, 1)
    assert steps(tmp_path) == [2] and os.unlink is remove and list(tmp_path.glob(".gone_*"))
    folders.clean(tmp_path)
    assert not list(tmp_path.glob(".gone_*"))


def test_a_state_that_was_read_does_not_hold_its_file(tmp_path):
    trees.save_tree({"moments": torch.ones(1 << 20)}, tmp_path / "tree.safetensors")
    read = trees.load_tree(tmp_path / "tree.safetensors")
    assert read["moments"].sum() == 1 << 20
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_prune_keeps_the_newest_that_is_whole(tmp_path):
    for step in range(4):
        save(tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"global_step_{step}" / "alice" / "weights").write_text("x")
    folders.prune(tmp_path, 1)
    assert steps(tmp_path) == [1, 3]


def test_prune_keeps_the_best_by_a_metric_of_their_steps(tmp_path):
    for step, vote in enumerate([0.4, 0.9, 0.9, 0.1, None, 0.2]):
        save(tmp_path, step, metrics={} if vote is None else {"val/team/vote": vote, "other": -vote})
    (tmp_path / "global_step_0" / MANIFEST).write_text("{")
    Kept(last=2, best=1, metric="val/team/vote").prune(tmp_path)
    assert steps(tmp_path) == [2, 4, 5], "of equal ones the later"
    Kept(last=None, best=0, metric="other").prune(tmp_path)
    assert steps(tmp_path) == [2, 4, 5]


def test_a_validation_that_is_repeated_counts_for_its_checkpoint(tmp_path, monkeypatch):
    """A kill meanwhile leaves it as it was."""
    for step, vote in ((1, None), (2, 0.2), (3, 0.3)):
        save(tmp_path, step, metrics={"loss": 1.0} if vote is None else {"val/team/vote": vote})
    first = tmp_path / "global_step_1"
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(os, "replace", raise_interrupt)
        add_metrics(first, {"val/team/vote": 0.9})
    assert manifest.verify(first)["metrics"] == {"loss": 1.0}
    add_metrics(first, {"val/team/vote": 0.9})
    assert manifest.verify(first)["metrics"] == {"loss": 1.0, "val/team/vote": 0.9}
    Kept(last=1, best=1, metric="val/team/vote").prune(tmp_path)
    assert steps(tmp_path) == [1, 3]
    add_metrics(tmp_path / "global_step_7", {"val/team/vote": 1.0})


def raise_interrupt(*_):
    raise KeyboardInterrupt


def test_a_metric_that_no_checkpoint_has_is_said_once_with_what_there_is(tmp_path, caplog):
    kept = Kept(last=1, best=2, metric="val/team/votes")
    save(tmp_path, 1, metrics={"val/team/vote": 0.5, "loss": 1.0})
    kept.prune(tmp_path)
    assert caplog.text == "", "nothing is removed yet"
    for step in (2, 3):
        save(tmp_path, step, metrics={"loss": 1.0})
        kept.prune(tmp_path)
    assert steps(tmp_path) == [3] and caplog.text.count("keep_best_metric=val/team/votes") == 1
    assert "trainer.keep_best=2" in caplog.text and "are: val/team/vote, loss" in caplog.text


def test_validations_on_other_data_are_named_where_the_best_is_that_of_the_former(tmp_path, caplog):
    kept = Kept(last=1, best=1, metric="val/team/vote")
    for step, metric, vote in (
        (1, "val", 0.6),
        (2, "validation_0123456789ab", 0.7),
        (3, "validation_0123456789ab", 0.5),
    ):
        save(tmp_path, step, metrics={f"{metric}/team/vote": vote})
        kept.prune(tmp_path)
    assert steps(tmp_path) == [1, 3] and caplog.text.count("validation_0123456789ab/team/vote") == 1
    other = Kept(last=1, best=1, metric="validation_0123456789ab/team/vote")
    save(tmp_path, 4, metrics={"validation_0123456789ab/team/vote": 0.4})
    other.prune(tmp_path)
    assert steps(tmp_path) == [3, 4], "the name that the warning gives"


@pytest.mark.parametrize("metric,kept", [
    ("val/agent/alice/loss", [20, 30]), ("val/agent/alice/perplexity", [20, 30]), ("val/peers_loss/a/b", [20, 30]), ("val/team/vote", [30]),
])  # fmt: skip
def test_the_best_of_losses_is_the_smallest(tmp_path, metric, kept):
    for step, value in ((10, 1.7), (20, 0.4), (30, 3.9)):
        save(tmp_path, step, metrics={metric: value})
        Kept(last=1, best=1, metric=metric).prune(tmp_path)
    assert steps(tmp_path) == kept


@pytest.mark.parametrize("metric", ["val/agent/alice/loss", "val/team/vote"])
def test_nan_is_never_the_best(tmp_path, metric):
    """The weights of a run that diverges may be measured once more before it ends."""
    for step, value in ((10, 0.5), (20, 0.5), (30, float("nan"))):
        save(tmp_path, step, metrics={metric: value})
        Kept(last=1, best=1, metric=metric).prune(tmp_path)
    assert steps(tmp_path) == [20, 30]


def test_a_checkpoint_is_not_read_again_when_it_was_just_sealed(tmp_path, monkeypatch):
    save(tmp_path, 0, metrics={})
    read = []
    monkeypatch.setattr(manifest, "_digest", lambda path, *_: read.append(path.name))
    checkpoint.finish(*begun(tmp_path, 0, 1)[:-1], Kept(1, 0, ""))
    assert steps(tmp_path) == [1] and read == []


def test_a_metric_of_a_narrower_type_is_sealed_as_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "fingerprints", lambda identity: {})
    metrics = {"val/team/vote": np.float32(0.25), "team/failed_episodes": np.int64(3), "perf/free": torch.tensor(0.5)}
    run = checkpoint.Trained(None, tmp_path, {}, {}, None, None, None)
    save(tmp_path, **checkpoint.facts_of(run, 1, metrics))
    assert manifest.facts_of(tmp_path / "global_step_1")["metrics"] == dict(zip(metrics, (0.25, 3.0, 0.5), strict=True))


@pytest.mark.parametrize("last,best,kept", [(None, 0, (None, 0)), (None, 2, (1, 2)), (3, 2, (3, 2))])
def test_keep_best_alone_keeps_the_last_one_too(compose_config, last, best, kept):
    words = (f"trainer.max_actor_ckpt_to_keep={'null' if last is None else last}", f"trainer.keep_best={best}")
    found = Kept.of(compose_config(*words))
    assert (found.last, found.best, found.metric) == (*kept, "val/team/vote")


def begun(root, *marked, error=""):
    folder = folders.begin(root, 1)
    folders.write_state(folder, {"step": 1})
    for rank in marked:
        marks.leave(folder, rank, error)
    return folder, {}, {"step": 1, "metrics": {}}, marks.marks_of(folder, 2), NOW, Kept(None, 0, "")


def test_a_checkpoint_waits_for_every_rank_and_holds_no_marks(tmp_path):
    checkpoint.finish(*begun(tmp_path, 0, 1))
    assert sorted(manifest.verify(tmp_path / "global_step_1")["files"]) == [folders.STATE]


@pytest.mark.parametrize(
    "ranks,error,kind,words",
    [
        ((0,), "", TimeoutError, "rank 1 has not written.*save_timeout_s.*shared"),
        ((0, 1), "No space", OSError, "No space"),
    ],
    ids=["silent", "failed"],
)
def test_without_a_rank_there_is_none_and_no_half(tmp_path, ranks, error, kind, words):
    with pytest.raises(kind, match=words):
        checkpoint.finish(*begun(tmp_path, *ranks, error=error))
    assert list(tmp_path.iterdir()) == []


async def fails_once():
    saving = Background("a checkpoint")
    saving.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await saving.flush()
    await saving.flush()


def test_the_error_of_a_save_is_raised_once_by_the_next_call():
    asyncio.run(fails_once())


def test_a_tree_comes_back_as_it_was(tmp_path):
    shared = torch.arange(6.0).view(2, 3)
    tree = {
        "moments": {0: {"step": torch.tensor(3.0), "exp_avg": shared.T}, "same": shared},
        "betas": (0.9, 1e-30), "names": ["a", None, True, float("inf")], ("round", 1): torch.zeros(0, dtype=torch.uint8),
        "numpy": np.random.get_state(),
    }  # fmt: skip
    trees.save_tree(tree, tmp_path / "tree.safetensors")
    found = trees.load_tree(tmp_path / "tree.safetensors")
    assert list(found) == list(tree) and found["betas"] == tree["betas"] and found["names"] == tree["names"]
    assert torch.equal(found["moments"][0]["exp_avg"], shared.T) and torch.equal(found["moments"]["same"], shared)
    assert found["numpy"][1].dtype == np.uint32 and np.array_equal(found["numpy"][1], tree["numpy"][1])
    assert found["round", 1].dtype == torch.uint8 and isinstance(found["numpy"], tuple)


def test_a_copy_is_not_changed_by_an_update():
    weight = torch.zeros(2)
    kept = trees.copied({"a": [weight]})
    weight += 1
    assert torch.equal(kept["a"][0], torch.zeros(2))


def test_what_shares_no_memory_is_written_without_a_copy(tmp_path, monkeypatch):
    written, weight = {}, torch.zeros(2, 2)
    monkeypatch.setattr(trees, "save_file", lambda tensors, path, metadata: written.update(tensors))
    trees.save_tree({"own": weight, "same": weight, "host": trees.on_host(torch.ones(2))}, tmp_path / "tree")
    first, second, _ = written.values()
    assert first.data_ptr() == weight.data_ptr() != second.data_ptr() and torch.equal(first, second)
    assert trees.on_host([weight])[0].data_ptr() == weight.data_ptr()


def test_a_state_that_is_none_is_named(tmp_path):
    with pytest.raises(TypeError, match="set"):
        trees.save_tree({"seen": {1, 2}}, tmp_path / "tree.safetensors")


class Host:
    """A worker group whose ranks see the folder on some hosts only."""

    def __init__(self, hosts):
        self.hosts = hosts

    async def hosts_without(self, path):
        assert path.exists()
        return self.hosts


@pytest.mark.parametrize("lacking", [[], ["node2", "node7"]])
def test_hosts_that_do_not_share_the_folder_are_named_before_the_start(tmp_path, lacking):
    groups = [Host([]), Host(lacking)]
    if lacking:
        with pytest.raises(ConfigError, match="default_local_dir=.*node2, node7.*shared"):
            asyncio.run(check_shared(tmp_path, groups))
    else:
        asyncio.run(check_shared(tmp_path, groups))
    assert list(tmp_path.iterdir()) == []


def test_a_worker_names_its_host_where_it_sees_no_file(tmp_path):
    (tmp_path / "sign").touch()
    assert FolderWorker().host_without(str(tmp_path / "sign")) is None
    assert FolderWorker().host_without(str(tmp_path / "other")) == socket.gethostname()
