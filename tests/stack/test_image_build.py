"""The image for CPUs, built without a daemon on a stand-in for its base, and the quick start in it.

Needs root, buildah and mmdebstrap (Debian packages), a Debian mirror and the package index; ten minutes and 12 GB under
MARL_IMAGE_ROOT. The stand-in has Debian's Python 3.11 where the image has Docker's: a registry may be out of reach.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN, IMAGE = "localhost/python-stand-in", "localhost/marl:cpu"
PACKAGES = "python3,python3-venv,ca-certificates"
MOUNTS = ("/etc/ssl/certs", "/opt/wheels")
"""Files of the machine's: its certificates, and wheels if it has some."""
PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_DEFAULT_TIMEOUT")

WANTED = os.environ.get("MARL_IMAGE_ROOT")
MISSING = [name for name in ("buildah", "mmdebstrap") if not shutil.which(name)]
WHY_NOT = (
    "MARL_IMAGE_ROOT names no folder for 12 GB of layers" if not WANTED
    else f"missing: {', '.join(MISSING)}" if MISSING
    else "building in a chroot needs root" if os.geteuid()
    else ""
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.timeout(3000)]


class Builder:
    """buildah with a store of its own, in chroots."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def __call__(self, command: str, *words: str, timeout: float = 600) -> str:
        stores = ["--storage-driver", "vfs", "--root", str(self.store / "root"), "--runroot", str(self.store / "run")]
        done = subprocess.run(
            ["buildah", *stores, command, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"buildah {command}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()


def pip_settings() -> list[str]:
    """The machine's settings of pip, for the build alone."""
    named = [word for name in PIP if name in os.environ for word in ("--env", f"{name}={os.environ[name]}")]
    index = os.environ.get("MARL_TORCH_INDEX")
    return [*named, *(["--build-arg", f"TORCH_INDEX={index}"] if index else [])]


@pytest.fixture(scope="module")
def image():
    """A container of the image, and its builder."""
    store = Path(WANTED)
    store.mkdir(parents=True, exist_ok=True)
    buildah, base = Builder(store), store / "base.tar"
    if not base.exists():
        making = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(base)]
        subprocess.run(making, check=True, capture_output=True, timeout=600)
    bare = buildah("from", "scratch")
    buildah("add", bare, str(base), "/")
    buildah("commit", "--rm", bare, STAND_IN)
    mounts = [word for path in MOUNTS if Path(path).is_dir() for word in ("--volume", f"{path}:{path}:ro")]
    build = ["--isolation", "chroot", "--pull-never", "--format", "docker", "--build-arg", f"BASE={STAND_IN}"]
    buildah("bud", *build, *pip_settings(), *mounts, "-f", "docker/Dockerfile.cpu", "-t", IMAGE, ".", timeout=2400)
    container = buildah("from", "--pull-never", IMAGE)
    yield buildah, container
    buildah("rm", container)


def test_the_image_runs_the_quick_start_without_root(image):
    buildah, container = image
    run = ["--isolation", "chroot", container, "--"]
    assert buildah("run", *run, "id", "-u") == "10001"
    buildah("run", *run, "marl-health", timeout=120)
    words = ["trainer.total_training_steps=2", "resources.one_process=true", "data.train_batch_size=4"]
    said = buildah("run", *run, "python", "-m", "marl.quickstart", *words, timeout=900)
    assert "summary.json" in said
    found = buildah("run", *run, "sh", "-c", "cat /work/outputs/quickstart/latest/summary.json")
    assert '"round_2"' in found or '"accuracy' in found
