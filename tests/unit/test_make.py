"""The Makefile's installation, with stand-ins for Python and pip: what a person sees meanwhile, and how it fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PYTHON = """#!/bin/sh
mkdir -p .venv/bin && cp pip .venv/bin/pip
"""
PIP = """#!/bin/sh
echo "$@" >> asked
echo "Looking in indexes: https://somewhere/simple"
echo "Collecting torch"
echo "  Downloading https://somewhere/torch-2.9-cp311.whl.metadata (30 kB)"
echo "  Downloading https://somewhere/torch-2.9-cp311.whl (104.2 MB)"
echo "Requirement already satisfied: numpy"
echo "Installing collected packages: a, b, torch"
echo "Successfully installed a b torch"
case "$*" in *FAILING*) echo "ERROR: no space left" >&2; exit 1;; esac
"""


@pytest.fixture
def install(tmp_path):
    shutil.copy(Path(__file__).parents[2] / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints-cpu.txt"):
        (tmp_path / name).touch()

    def install(pip):
        for name, text in (("python", PYTHON), ("pip", pip)):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        # as from a shell, also where ``make test`` runs this
        outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "VENV", "PYTHON", "CONSTRAINTS")
        environment = {key: value for key, value in os.environ.items() if key not in outer}
        words = ["make", "PYTHON=./python", ".venv/installed"]
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return install


def test_it_shows_each_step_and_each_download_with_its_size(install, tmp_path):
    done = install(PIP)
    assert done.returncode == 0 and done.stderr == ""
    packages = ["    Downloading torch-2.9-cp311.whl (104.2 MB)", "    Unpacking 3 packages"]
    first, second, *lines = done.stdout.splitlines()
    assert first.startswith("1/3 ") and second.startswith("2/3 torch") and lines[2].startswith("3/3 ")
    assert lines[:2] == lines[3:] == packages
    torch, rest = (tmp_path / "asked").read_text().splitlines()
    assert torch.startswith("install ") and torch.endswith(" torch") and rest.endswith(" -e .[dev]")


def test_where_pip_fails_nothing_counts_as_installed(install, tmp_path):
    done = install(PIP.replace("FAILING", "dev"))
    assert done.returncode != 0 and "ERROR: no space left" in done.stderr
    assert not (tmp_path / ".venv" / "installed").exists()
    assert install(PIP).returncode == 0, "the next attempt starts anew"
