"""Damaged checkpoints: each is refused by name, and the newest whole one is taken."""

import json
import os
import pickle
import shutil

import pytest
import torch

from marl.utils import folders, manifest
from tests.chaos import saver

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
NEWEST = "global_step_2"
FILES = (
    "alice/actor/model_world_size_1_rank_0.pt",
    "carol/actor/model_world_size_1_rank_0.pt",
    "data.safetensors",
    "learner.safetensors",
    "trainer.json",
    "manifest.json",
)


class Hostile:
    """A pickle that runs a command where it is read."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    for step in (1, 2):
        saver.save(root, step)
    return root


@pytest.fixture
def root(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


def is_refused(root, *words, family=saver.FAMILY):
    """Refused by name for this reason, and the former one is taken."""
    folder, refused = folders.newest_valid(root, family)
    assert list(refused) == [NEWEST] and folder == root / "global_step_1" and saver.holds(folder, 1)
    assert all(word in refused[NEWEST] for word in words), refused[NEWEST]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_truncated(root, file, part):
    path = root / NEWEST / file
    os.truncate(path, int(path.stat().st_size * part))
    is_refused(root, file)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("place", [0.01, 0.3, 0.7, 0.99])
def test_one_bit_flipped(root, file, place):
    path = root / NEWEST / file
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)
    is_refused(root, file)


@pytest.mark.parametrize("file", FILES)
def test_missing(root, file):
    (root / NEWEST / file).unlink()
    is_refused(root, file)


@pytest.mark.parametrize("file", ["carol/ref/reference_world_size_1_rank_0.safetensors", "critic/target.pt"])
def test_a_file_that_nobody_saved(root, file):
    """A loader asks some files only whether they are there."""
    path = root / NEWEST / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"other")
    is_refused(root, file, "not in its manifest")


def resealed(root, **facts):
    """Seal the folder as anybody who may write there can: with a manifest that fits."""
    sealed = manifest.facts_of(root / NEWEST)
    manifest.seal(
        root / NEWEST, {key: value for key, value in sealed.items() if key not in ("format", "files")} | facts
    )


@pytest.mark.parametrize("family", ["of another run", None])
def test_of_another_run(root, family):
    resealed(root, family=family)
    is_refused(root, "another run")


def test_of_another_step(root):
    resealed(root, step=7)
    is_refused(root, "step 7")


def test_of_another_format(root):
    content = manifest.facts_of(root / NEWEST) | {"format": 99}
    text = json.dumps(content | {"sha256": manifest._own_digest(content)})
    (root / NEWEST / manifest.MANIFEST).write_text(text)
    is_refused(root, "99")


@pytest.mark.parametrize(
    "call,arguments",
    [(os.system, ("touch {}",)), (eval, ("open('{}', 'w')",)), (exec, ("open('{}', 'w')",)), (shutil.rmtree, ("{}",))],
    ids=["system", "eval", "exec", "rmtree"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_hostile_pickle(root, tmp_path, call, arguments, protocol):
    """With a manifest that fits it: refused before it is read, and read it would execute nothing."""
    victim, path = tmp_path / "victim", root / NEWEST / FILES[0]
    if call is shutil.rmtree:
        victim.mkdir()
    hostile = Hostile(call, *(text.format(victim) for text in arguments))
    torch.save({"weights": hostile}, path, pickle_protocol=protocol)
    resealed(root)
    before = victim.exists()
    is_refused(root, FILES[0], "would call", call.__name__ if protocol == 2 else "what torch never writes")
    with pytest.raises(pickle.UnpicklingError):
        saver.read(path)
    assert victim.exists() is before


def test_an_empty_folder_and_one_of_an_earlier_version(root):
    (root / "global_step_4").mkdir()
    (root / "global_step_5").mkdir()
    (root / "global_step_5" / folders.STATE).write_text(json.dumps({"step": 5}))
    folder, refused = folders.newest_valid(root, saver.FAMILY)
    assert folder == root / NEWEST and list(refused) == ["global_step_5", "global_step_4"]
    assert all("earlier version of marl" in why for why in refused.values())
