import pytest

from marl.utils import folders


def save(root, step):
    with folders.writing(root, step) as folder:
        (folder / "weights").write_text(str(step))
        folders.write_state(folder, {"step": step})


def test_newest_complete_and_tracker(tmp_path):
    for step in (2, 10, 9):
        save(tmp_path, step)
    assert [folder.name for folder in folders.complete(tmp_path)] == [
        "global_step_2",
        "global_step_9",
        "global_step_10",
    ]
    assert (tmp_path / folders.TRACKER).read_text() == "9"
    assert folders.read_state(tmp_path / "global_step_10") == {"step": 10}


def test_a_save_that_fails_leaves_the_last_one(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(RuntimeError), folders.writing(tmp_path, 2) as folder:
        (folder / "weights").write_text("half")
        raise RuntimeError("disk full")
    assert [folder.name for folder in folders.complete(tmp_path)] == ["global_step_1"]
    assert (tmp_path / folders.TRACKER).read_text() == "1"
    save(tmp_path, 2)  # the leftovers are no obstacle
    assert len(folders.complete(tmp_path)) == 2


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "global_step_3").mkdir()
    assert folders.complete(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="global_step_3 holds no trainer.json"):
        folders.read_state(tmp_path / "global_step_3")


def test_prune_keeps_the_newest(tmp_path):
    for step in range(5):
        save(tmp_path, step)
    folders.prune(tmp_path, 2)
    assert [folder.name for folder in folders.complete(tmp_path)] == ["global_step_3", "global_step_4"]
    folders.prune(tmp_path, None)
    assert len(folders.complete(tmp_path)) == 2
