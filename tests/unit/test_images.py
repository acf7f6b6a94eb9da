"""Images and files for clusters: their versions are the project's, and their forms those of their schemas."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator, validators
from setuptools import find_namespace_packages

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
IMAGES = {path.suffix[1:]: path.read_text() for path in DOCKER.glob("Dockerfile.*")}
PROJECT_FILE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PROJECT_FILE["project"]
CONSTRAINTS = dict(line.split("==") for line in (ROOT / "constraints-cpu.txt").read_text().splitlines())
RAYCLUSTER = ROOT / "examples" / "cluster" / "raycluster.yaml"


def argument(image, name):
    return re.search(rf"^ARG {name}=(\S+)$", IMAGES[image], re.MULTILINE)[1]


def version_of_verl(extra, package):
    """The version that an extra of verl's pins."""
    (found,) = {
        match[1]
        for line in requires("verl") or []
        if (match := re.match(rf'{package}==([\w.]+); extra == "{extra}"$', line))
    }
    return found


def problems(schema, content):
    schema = json.loads((ROOT / "tests" / "schemas" / schema).read_text())
    validator = validators.validator_for(schema, Draft202012Validator)
    return [f"{error.json_path}: {error.message}" for error in validator(schema).iter_errors(content)]


def test_there_is_an_image_for_each_kind_of_server():
    assert set(IMAGES) == {"cpu", "vllm", "sglang"}


def test_the_versions_of_images_are_the_projects():
    assert argument("cpu", "TORCH") == CONSTRAINTS["torch"]
    assert {"TORCH": argument("vllm", "TORCH"), "VLLM": argument("vllm", "VLLM")} == {
        "TORCH": version_of_verl("vllm", "torch"),
        "VLLM": version_of_verl("vllm", "vllm"),
    }
    assert argument("sglang", "SGLANG") == f"v{version_of_verl('sglang', 'sglang')}"
    assert argument("sglang", "TRANSFORMERS") == version_of_verl("sglang", "transformers")
    for image, python in {"cpu": "3.11", "vllm": "3.12"}.items():
        assert f"python{python}" in IMAGES[image].replace(":", "") and "<3.13" in PROJECT["requires-python"]


def test_the_cluster_on_kubernetes_has_rays_tested_version():
    assert yaml.safe_load(RAYCLUSTER.read_text())["spec"]["rayVersion"] == CONSTRAINTS["ray"]


def test_an_image_installs_what_the_project_asks_for():
    def printed(*words):
        command = [sys.executable, DOCKER / "requirements.py", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    extras = PROJECT["optional-dependencies"]
    assert printed() == PROJECT["dependencies"]
    assert printed("vllm") == [*PROJECT["dependencies"], *extras["vllm"]]
    assert printed("--only", "gpu") == extras["gpu"]
    assert printed("math")[-1] == extras["math"][-1] and all("requirements.py math" in text for text in IMAGES.values())


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_every_package_of_the_project(image):
    packages = [name.rstrip("*") for name in PROJECT_FILE["tool"]["setuptools"]["packages"]["find"]["include"]]
    packages += [path.name for path in (ROOT / "marl").iterdir() if path.is_symlink()]
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert {"hydra_plugins", "recipe", "examples"} < {*packages}
    assert all(f"\nCOPY {name} {name}\n" in IMAGES[image] and f"!{name}" in sent for name in packages)


def test_the_wheel_has_every_file_of_the_recipes_and_examples():
    settings = PROJECT_FILE["tool"]["setuptools"]
    packages = find_namespace_packages(str(ROOT), include=settings["packages"]["find"]["include"])
    for folder, package in (("recipe", "recipe"), ("examples", "marl/examples")):
        for path in (ROOT / package).resolve().rglob("*.*"):
            inside = package / path.parent.relative_to(ROOT / folder)
            if path.is_file() and "__pycache__" not in path.parts:
                assert ".".join(inside.parts) in packages, path
                assert any(path.match(pattern) for pattern in ("*.py", *settings["package-data"]["*"])), path


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_pinned_unprivileged_and_watched(image):
    lines = IMAGES[image].splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("FROM "))
    final = "\n".join(lines[last:])
    assert re.findall(r"^USER (\S+)$", final, re.MULTILINE)[-1] == "10001", "the last user is not root"
    assert "HEALTHCHECK" in final and "RAY_AUTH_MODE=token" in final
    assert not re.search(r":latest\b", IMAGES[image])
    code, packages = (
        lines.index("COPY marl marl"),
        next(i for i, line in enumerate(lines) if "requirements.txt" in line),
    )
    assert packages < code, "a change of the code costs no download"
    for source in re.findall(r"^COPY (?!--from)(?:--chmod=\d+ )?(.*) \S+$", IMAGES[image], re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split())


def test_the_base_that_is_pulled_for_cpus_is_known_by_its_digest():
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", argument("cpu", "BASE"))


def test_the_images_context_holds_what_they_copy_and_nothing_else():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for text in IMAGES.values():
        for source in re.findall(r"^COPY (?!--from)(?:--chmod=\d+ )?(.*) \S+$", text, re.MULTILINE):
            copied |= set(source.split())
    assert copied == kept


def test_the_small_cluster_is_of_the_compose_schema():
    content = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert problems("compose-spec.json", content) == []
    content["services"]["head"]["comand"] = "x"
    assert problems("compose-spec.json", content) != [], "the schema refuses what it does not know"


def test_the_small_cluster_asks_for_a_token_and_shows_nothing_outside():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert set(services) == {"head", "worker"}
    for service in services.values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token" and service["secrets"] == ["ray_token"]
        assert service["cap_drop"] == ["ALL"] and all(
            port.startswith("127.0.0.1:") for port in service.get("ports", [])
        )


def test_the_cluster_on_kubernetes_is_of_kuberays_schema():
    content = yaml.safe_load(RAYCLUSTER.read_text())
    assert problems("raycluster.json", content) == []
    assert content["spec"]["authOptions"] == {"mode": "token"}
    content["spec"]["workerGroupSpecs"][0]["replicas"] = "two"
    assert any("replicas" in problem for problem in problems("raycluster.json", content))
    content["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "marl:cpu"
    assert any("imagee" in problem for problem in problems("raycluster.json", content))
    del content["spec"]["headGroupSpec"]
    assert any("headGroupSpec" in problem for problem in problems("raycluster.json", content))


SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do [[ "$1" == --nodelist=* ]] && machine="${1#*=}"; shift; done
echo "$machine: $RAY_AUTH_MODE $(stat -c %a "$RAY_AUTH_TOKEN_PATH") $(wc -c < "$RAY_AUTH_TOKEN_PATH") $*" >> asked
case "$*" in *"python -c"*) until grep -qs "^two" asked; do sleep 0.1; done;; *"ray start"*) exec sleep 60;; *marl.main*) exit ${CODE:-0};; esac
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_script_for_slurm_starts_ray_with_a_token_and_leaves_nothing(tmp_path, code):
    """With stand-ins for Slurm: what it would run on which machine, and the run's exit code."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    programs = {
        "srun": SRUN,
        "scontrol": "#!/bin/sh\nprintf 'one\\ntwo\\n'\n",
        "getent": '#!/bin/sh\necho "10.0.0.$(printf \'%s\' "$2" | wc -c) STREAM $2"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "[one-two]", "CODE": str(code)}
    command = ["bash", RAYCLUSTER.parent / "slurm.sh", "learner=grpo"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert all(line.split(": ")[1].startswith("token 600 64 ") for line in asked)
    said = {line.split(":")[0] + ":" + line.partition(" 64 ")[2] for line in asked}
    assert any(word.startswith("one:ray start --block --node-ip-address=10.0.0.3 --head --port=6379") for word in said)
    assert "two:ray start --block --node-ip-address=10.0.0.3 --address=10.0.0.3:6379" in said
    assert "one:python -m marl.main hardware=gpu trainer.nnodes=2 trainer.n_gpus_per_node=8 learner=grpo" in said
    assert not list(tmp_path.glob(".ray_token*")), "no token is left behind"


def test_every_promise_names_its_tests():
    promises = [
        line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ") and "---" not in line
    ]
    assert len(promises) > 5
    for promise in promises[1:]:
        named = re.findall(r"`(tests/[\w/]+\.py)`", promise)
        assert named and all((ROOT / path).is_file() for path in named), promise
