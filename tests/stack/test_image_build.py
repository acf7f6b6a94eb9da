"""The image for CPUs, built without a daemon on a stand-in for its base, and the quick start in it.

Needs root, buildah and mmdebstrap (Debian packages), a Debian mirror and the package index; five minutes, and 9 GB under
MARL_IMAGE_ROOT with overlay layers (`make test-image`). MARL_TORCH_INDEX: an index of torch's builds without CUDA, where the image's is out of
reach. The stand-in has Debian's Python 3.11 where the image has Docker's: a registry may be out of reach.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.stack.image_base import PACKAGES, pip_settings

ROOT = Path(__file__).parents[2]
STAND_IN, IMAGE = "localhost/python-stand-in", "localhost/marl:cpu"
DRIVER = "overlay" if "overlay" in Path("/proc/filesystems").read_text().split() else "vfs"
"""vfs stores every layer whole: three times as much."""

WANTED = os.environ.get("MARL_IMAGE_ROOT")
MISSING = [name for name in ("buildah", "mmdebstrap") if not shutil.which(name)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WANTED, reason="MARL_IMAGE_ROOT names no folder for 9 GB of layers (make test-image)"),
    pytest.mark.timeout(3000),
]


class Builder:
    """buildah with a store of its own, in chroots."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def __call__(self, command: str, *words: str, timeout: float = 600) -> str:
        stores = ["--storage-driver", DRIVER, "--root", str(self.store / "root"), "--runroot", str(self.store / "run")]
        done = subprocess.run(
            ["buildah", *stores, command, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"buildah {command}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()


def lent_settings(folder: Path) -> list[str]:
    """Words that lend this machine's settings of pip, and the files that they name, to the build alone: mounted, not copied."""
    settings = pip_settings()
    written = folder / "pip.conf"
    written.write_text("[global]\n" + "".join(f"{key} = {' '.join(words)}\n" for key, words in settings.items()))
    paths = {Path(word.removeprefix("file://")) for words in settings.values() for word in words}
    named = {path.parent if path.name == "simple" else path for path in paths if path.is_absolute() and path.exists()}
    mounts = [f"{written}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(named))]
    index = os.environ.get("MARL_TORCH_INDEX")
    volumes = [word for mount in mounts for word in ("--volume", mount)]
    return [*volumes, *(["--build-arg", f"TORCH_INDEX={index}"] if index else [])]


@pytest.fixture(scope="module")
def image():
    """A container of the image, and its builder. A machine that cannot build one fails: a skipped proof would pass for one."""
    assert not MISSING and os.geteuid() == 0, (
        f"building in a chroot needs root, and {', '.join(MISSING) or 'nothing else'}"
    )
    store = Path(WANTED)
    store.mkdir(parents=True, exist_ok=True)
    buildah, base = Builder(store), store / "base.tar"
    if not base.exists():
        making = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(base)]
        subprocess.run(making, check=True, capture_output=True, timeout=600)
    bare = buildah("from", "scratch")
    buildah("add", bare, str(base), "/")
    buildah("commit", "--rm", bare, STAND_IN)
    build = ["--isolation", "chroot", "--pull-never", "--format", "docker", "--build-arg", f"BASE={STAND_IN}"]
    buildah("bud", *build, *lent_settings(store), "-f", "docker/Dockerfile.cpu", "-t", IMAGE, ".", timeout=2400)
    container = buildah("from", "--pull-never", IMAGE)
    yield buildah, container
    buildah("rm", container)


def test_the_image_runs_the_quick_start_without_root(image):
    buildah, container = image
    run = ["--isolation", "chroot", container, "--"]
    assert buildah("run", *run, "id", "-u") == "10001"
    buildah("run", *run, "marl-health", timeout=120)
    words = ["trainer.total_training_steps=10", "trainer.test_freq=5"]
    said = buildah("run", *run, "python", "-m", "marl.quickstart", *words, timeout=900)
    assert "in Ray" in said and "summary.json" in said, said[-3000:]
    summary = json.loads(buildah("run", *run, "cat", "/work/outputs/quickstart/latest/summary.json"))
    assert summary["steps"] == 10 and summary["log_prob_gap_max"] < 1e-4
    assert summary["accuracy"]["before"] != summary["accuracy"]["after"], "it has trained"


def test_the_image_keeps_nothing_of_this_machines_pip(image):
    buildah, container = image
    made = json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    assert not [line for line in made["Env"] if "PIP" in line] and made["User"] == "10001"
    left = buildah("run", "--isolation", "chroot", container, "--", "sh", "-c", "cat /etc/pip.conf; ls /opt")
    assert not re.search(r"^\w+ = ", left, re.MULTILINE), left
