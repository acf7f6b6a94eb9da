"""The small cluster of docker/compose.yaml: built, started, trained on, robbed of a node and taken down by Docker itself.

`make test-docker` on a machine with Docker and its compose plugin (26.1 and 2.26 were tried); twelve minutes on two busy cores and 4 GB of
images. Where the registry of the CPU image's base is out of reach, MARL_IMAGE_ROOT names a folder in which mmdebstrap makes
a stand-in (test_image_build.py).
"""

import functools
import http.server
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.chaos.outcome import differing, timeless
from tests.stack.image_base import PACKAGES, pip_settings

ROOT = Path(__file__).parents[2]
FOLDER = os.environ.get("MARL_IMAGE_ROOT")
STAND_IN, IMAGE = "marl-python-stand-in", "marl:tried"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("MARL_DOCKER"), reason="MARL_DOCKER=required: with Docker (make test-docker)"
    ),
    pytest.mark.timeout(3000),
]

RUN = "python -m marl.main --config-name quickstart trainer.test_freq=-1 trainer.save_freq=5 trainer.nnodes=2"


def said(*command: str, timeout: float = 120, **keywords) -> str:
    """Output of a command; where it fails, an error with its last lines."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, **keywords)
    assert done.returncode == 0, f"{' '.join(command)[:300]}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout.strip()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_words) -> None:
        pass


class LentPackages:
    """This machine's own folders of packages, served to a build on the loopback address; and pip's settings that name them."""

    def __init__(self, folder: Path) -> None:
        served = folder / "served"
        shutil.rmtree(served, ignore_errors=True)
        served.mkdir(parents=True)
        handler = functools.partial(Quiet, directory=str(served))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        address = f"http://127.0.0.1:{self.server.server_port}"
        self.lines, self.files = [], {}
        for key, words in pip_settings().items():
            self.lines.append(f"{key} = {' '.join(self.lent(word, served, address) for word in words)}")

    def lent(self, word: str, served: Path, address: str) -> str:
        path = Path(word.removeprefix("file://"))
        if not path.is_absolute() or not path.exists():
            return word
        name = "-".join(path.parts[1:])
        if path.is_file():
            self.files[name] = path
            return f"/etc/lent/{name}"
        # an index's pages name files beside its folder
        top = path.parent if path.name == "simple" else path
        link = served / "-".join(top.parts[1:])
        if not link.exists():
            link.symlink_to(top)
        return f"{address}/{link.name}/{path.name if top != path else ''}"

    def __enter__(self) -> "LentPackages":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error) -> None:
        self.server.shutdown()
        self.server.server_close()


def make_stand_in(folder: Path, lent: LentPackages) -> None:
    """An image of Debian's Python that finds packages where this machine's pip does."""
    base = folder / "base.tar"
    if not base.exists():
        making = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(base)]
        said(*making, timeout=600)
    context = folder / "stand-in"
    shutil.rmtree(context, ignore_errors=True)
    (context / "lent").mkdir(parents=True)
    os.link(base, context / "base.tar")
    (context / "pip.conf").write_text("\n".join(["[global]", *lent.lines, ""]))
    for name, path in lent.files.items():
        shutil.copy(path, context / "lent" / name)
    lines = ["FROM scratch", "ADD base.tar /", "COPY pip.conf /etc/pip.conf", "COPY lent /etc/lent"]
    (context / "Dockerfile").write_text("\n".join([*lines, ""]))
    said("docker", "build", "--tag", STAND_IN, str(context), timeout=600)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


class Cluster:
    """The cluster of docker/compose.yaml, as a project of its own."""

    def __init__(self, folder: Path) -> None:
        self.name = f"marl-tried-{os.getpid()}"
        self.port, self.token = free_port(), secrets.token_hex(32)
        self.override = folder / "override.yaml"
        self.environment = {**os.environ, "RAY_AUTH_TOKEN": self.token}

    def use(self, arguments: dict[str, str]) -> None:
        """Build with these arguments an image of another name, and publish the dashboard on a free port."""
        node = {"image": IMAGE, "build": {"network": "host", "args": arguments}}
        written = yaml.safe_dump({"services": {"head": {**node, "ports": ["PORTS"]}, "worker": node}})
        self.override.write_text(
            written.replace("ports:\n    - PORTS", f"ports: !override ['127.0.0.1:{self.port}:8265']")
        )

    def command(self, *words: str) -> list[str]:
        files = (ROOT / "docker" / "compose.yaml", self.override)
        return ["docker", "compose", "-p", self.name, *(word for file in files for word in ("-f", str(file))), *words]

    def __call__(self, *words: str, timeout: float = 120) -> str:
        return said(*self.command(*words), timeout=timeout, env=self.environment)

    def inside(self, line: str, timeout: float = 120) -> str:
        return self("exec", "-T", "-e", "RAY_ADDRESS=head:6379", "head", "sh", "-c", line, timeout=timeout)

    def container(self, service: str, number: int) -> str:
        return f"{self.name}-{service}-{number}"

    def state(self, container: str) -> dict:
        return json.loads(said("docker", "inspect", container))[0]["State"]

    def ranks(self, container: str) -> int:
        """Number of policy workers in a container."""
        return said("docker", "top", container, "-eo", "pid,args").count("ray::PolicyWorker")


@pytest.fixture(scope="module")
def containers(tmp_path_factory):
    said("docker", "info")
    assert "Docker Compose" in said("docker", "compose", "version")
    folder = tmp_path_factory.mktemp("compose")
    ours = Cluster(folder)
    try:
        if FOLDER:
            Path(FOLDER).mkdir(parents=True, exist_ok=True)
            with LentPackages(Path(FOLDER)) as lent:
                make_stand_in(Path(FOLDER), lent)
                index = os.environ.get("MARL_TORCH_INDEX")
                ours.use({"BASE": STAND_IN, **({"TORCH_INDEX": index} if index else {})})
                ours("build", timeout=1800)
        else:
            ours.use({})
            ours("build", timeout=1800)
        ours("up", "--wait", timeout=300)
        yield ours
    finally:
        ours("down", "--volumes", "--timeout", "20", timeout=180)
    for kind in ("container", "network", "volume"):
        every = ["--all"] if kind == "container" else []
        left = said(
            "docker", kind, "ls", "--quiet", *every, "--filter", f"label=com.docker.compose.project={ours.name}"
        )
        assert not left, f"{kind} of the cluster left behind: {left}"


@pytest.fixture(scope="module")
def unbroken(containers):
    """The folder of a run of twelve steps, each policy's two ranks in containers of the scheduler's choice."""
    folder = "/work/outputs/unbroken"
    containers.inside(f"{RUN} trainer.total_training_steps=12 trainer.default_local_dir={folder}", timeout=600)
    return folder


def results(containers, folder):
    """Digests of a run's last tensors, its metrics and its summary, without what its clock decides."""
    manifest = json.loads(containers.inside(f"cat {folder}/global_step_12/manifest.json"))
    files = {name: entry for name, entry in manifest["files"].items() if name.endswith(".safetensors")}
    summary = json.loads(containers.inside(f"cat {folder}/summary.json"))
    return {"files": files, "metrics": timeless(manifest["metrics"]), "summary": timeless(summary)}


def nodes_of(containers):
    count = "import ray; ray.init(logging_level=40); print(sum(node['Alive'] for node in ray.nodes()))"
    return int(containers.inside(f'python -c "{count}"').splitlines()[-1])


def test_three_nodes_are_in_the_cluster_and_none_is_root(containers):
    assert nodes_of(containers) == 3
    for service, number in (("head", 1), ("worker", 1), ("worker", 2)):
        container = containers.container(service, number)
        assert containers.state(container)["Health"]["Status"] == "healthy"
        assert said("docker", "exec", container, "id", "-u") == "10001"


def test_a_container_without_its_part_of_the_cluster_is_not_healthy(containers):
    alone = ["docker", "run", "--rm", "-e", "RAY_HEAD=head:6379", IMAGE, "marl-health"]
    assert subprocess.run(alone, capture_output=True, timeout=60).returncode == 1


def test_who_has_no_token_is_refused(containers):
    address = f"http://127.0.0.1:{containers.port}/api/jobs/"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(address, timeout=10)
    assert refused.value.code == 401
    wrong = "RAY_AUTH_TOKEN_PATH= RAY_AUTH_TOKEN=wrong python -c 'import ray; ray.init()' 2>&1 || true"
    assert "token" in containers.inside(wrong).lower(), "Ray names what is wrong"


def test_a_job_from_outside_is_run(containers):
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": containers.token}
    environment |= {"RAY_ADDRESS": f"http://127.0.0.1:{containers.port}"}
    ray = Path(sys.executable).with_name("ray")
    words = "python -m marl.main --config-name quickstart trainer.total_training_steps=2 trainer.test_freq=-1"
    output = said(str(ray), "job", "submit", "--", *words.split(), timeout=300, env=environment)
    assert "succeeded" in output and "full report" in output, output[-3000:]


def test_policies_train_over_containers(containers, unbroken):
    found = results(containers, unbroken)
    assert {f"{policy}/actor/huggingface/model.safetensors" for policy in ("alice", "carol")} <= set(found["files"])
    assert found["metrics"]["agent/alice/log_prob_gap_max"] < 1e-4
    accuracy = found["summary"]["accuracy"]
    assert accuracy["before"] != accuracy["after"], "it has trained"


def killed_at_step_7(containers, folder, container):
    """Output of a run that loses a container after its seventh step of twelve."""
    line = f"{RUN} trainer.total_training_steps=12 trainer.default_local_dir={folder}"
    words = containers.command("exec", "-T", "-e", "RAY_ADDRESS=head:6379", "head", "sh", "-c", line)
    printed = []
    with subprocess.Popen(
        words, env=containers.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            for printed_line in run.stdout:
                printed.append(printed_line)
                if printed_line.startswith("step  7/12"):
                    break
            assert containers.ranks(container), "the container to be killed has a rank of a policy"
            os.kill(containers.state(container)["Pid"], 9)
            printed += run.stdout.readlines()
        finally:
            run.kill()
    return "".join(printed)


def test_a_run_outlives_a_killed_container_and_ends_with_the_same_numbers(containers, unbroken):
    last = containers.container("worker", 2)
    printed = killed_at_step_7(containers, "/work/outputs/killed", last)
    assert "Restart 1 of 3" in printed, printed[-4000:]
    assert differing(results(containers, "/work/outputs/killed"), results(containers, unbroken)) == []
    assert said("docker", "inspect", "-f", "{{.RestartCount}}", last) == "1", "Docker has started it again"


def test_a_run_goes_on_after_its_head_was_killed_and_ends_with_the_same_numbers(containers, unbroken):
    folder = "/work/outputs/headless"
    printed = killed_at_step_7(containers, folder, containers.container("head", 1))
    assert "step 12/12" not in printed
    containers("up", "--wait", timeout=300)
    until = time.monotonic() + 240
    while nodes_of(containers) < 3:  # a worker misses its head after a minute, and is started again
        assert time.monotonic() < until, "the workers have not joined again"
        time.sleep(2)
    line = f"{RUN} trainer.total_training_steps=12 trainer.default_local_dir={folder}"
    again = containers.inside(f"{line} 2>&1", timeout=600)
    assert "resumed from" in again and "step  5/12" not in again, again[-4000:]
    assert differing(results(containers, folder), results(containers, unbroken)) == []
