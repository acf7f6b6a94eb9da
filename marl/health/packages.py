"""Python and the installed packages, against what pyproject.toml asks for."""

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from marl.health.finding import Finding, note, ok, problem

SHOWN = ("torch", "verl", "ray", "transformers")
"""Packages with a line of their own."""
ENGINES = {"vllm": "make gpu, or pip install 'marl[vllm]'", "sglang": "use verl's image for SGLang (docs/engines.md)"}
FLASH = "flash-attn"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def python_and_packages() -> Iterator[Finding]:
    python, requirements = wanted()
    yield python_version(python)
    yield from packages(requirements)


def wanted() -> tuple[str, list[Requirement]]:
    """The range of Pythons, and the requirements: of the source tree, or else of the installed distribution."""
    if PROJECT.is_file():
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        return project["requires-python"], [Requirement(text) for text in project["dependencies"]]
    found = metadata.distribution("marl")
    requirements = [Requirement(text) for text in found.requires or []]
    return str(found.metadata["Requires-Python"]), [r for r in requirements if r.marker is None or r.marker.evaluate()]


def python_version(wanted: str, version: str = sys.version.split()[0]) -> Finding:
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return ok("Python", version)
    return problem("Python", f"{version}, expected {wanted}", "make clean install PYTHON=python3.12")


def packages(requirements: list[Requirement]) -> Iterator[Finding]:
    """A line for each of ``SHOWN`` and for each that is missing or out of its range; the others together."""
    fine = 0
    for requirement in requirements:
        found = package(requirement)
        if found.mend or requirement.name in SHOWN:
            yield found
        else:
            fine += 1
    yield ok("packages", f"{fine} others in their ranges")


def package(requirement: Requirement) -> Finding:
    version, asked = installed(requirement.name), f"{requirement.name}{requirement.specifier}"
    if version is None:
        return problem(requirement.name, "not installed", f"pip install '{asked}'")
    if not requirement.specifier.contains(version, prereleases=True):
        return problem(requirement.name, f"{version}, expected {requirement.specifier}", f"pip install '{asked}'")
    return ok(requirement.name, version)


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def engines(num_gpus: int) -> Iterator[Finding]:
    """Servers and kernels that runs on GPUs use; a machine with GPUs that has no server for them has a problem."""
    found = {name: installed(name) for name in ENGINES}
    serves = any(found.values())
    for name, version in found.items():
        if version is not None:
            yield ok(name, version)
        else:
            said = problem if num_gpus and not serves else note
            yield said(name, "not installed; rollout.name=hf works without it", ENGINES[name])
    flash = installed(FLASH)
    yield (
        ok(FLASH, flash)
        if flash
        else note(
            FLASH,
            "not installed",
            "make gpu, or set +actor_rollout_ref.model.override_config.attn_implementation=sdpa (hardware=cpu does)",
        )
    )
