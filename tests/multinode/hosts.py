"""Several Ray hosts on one machine.

Each host is a process with its own network, mount, pid, uts and ipc namespaces: its own IP address, hostname, /dev/shm,
/tmp/ray and /mnt. The namespaces have no names and end with their first process, which ends with this one, however that
ends, so that nothing is left behind. A bridge in one more namespace joins the hosts; nothing reaches outside.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from .cable import Cable, without_tun

NET = "10.213.0"
BIN = Path(sys.executable).parent
MAKE_TOKEN, HEAD, JOIN = "ray get-auth-token --generate", "ray start --head --port=6379", "ray start --address={}:6379"
DASHBOARD, SUBMIT = "http://127.0.0.1:8265", "ray job submit --working-dir . --"
"""As in README.md and docs/clusters.md (``tests/unit/test_docs.py``)."""
SPACES = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
FAST_FAILURE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
"""A node that is dead or out of reach is noticed in about 9 s, not in 63; a lost head in 10 s, not in 60."""
API = """
import sys, urllib.request
asked = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]})
print(urllib.request.urlopen(asked, timeout=10).read().decode())
"""


def why_not() -> str | None:
    """The reason why hosts cannot be made here, or None."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "making network namespaces needs root (run make test-multinode with sudo)"
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if not shutil.which(tool)]:
        return f"missing tools: {', '.join(missing)} (Debian: iproute2, util-linux)"
    probe = "ip link add br0 type bridge && ip link add mn0 type veth peer name mn1 && mount -t tmpfs tmpfs /mnt"
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"this kernel or container refuses network namespaces: {done.stderr.strip()}" if done.returncode else None


class Host:
    """One host. ``run`` waits for a command in it, ``start`` does not."""

    def __init__(self, name: str, number: int, folder: Path, env: Mapping[str, str]) -> None:
        self.name, self.ip, self.env = name, f"{NET}.{number}", dict(env)
        self.folder = folder / name
        """Seen as /tmp/ray inside: Ray's logs can be read after the test."""
        self.folder.mkdir(parents=True, exist_ok=True)
        init = (self.folder / "init.log").open("w")
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *SPACES, "sh", "-c", self._first()],
            stdout=subprocess.PIPE, stderr=init, text=True, cwd="/",
        )  # fmt: skip
        if self.process.stdout.readline() != "up\n":
            raise RuntimeError(f"host {name}: {(self.folder / 'init.log').read_text()}")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def _first(self) -> str:
        """The first commands of a host. Its name is no address that others could reach, as on many machines."""
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {self.name}\n")
        return (
            f"hostname {self.name} && ip link set lo up && mount -t tmpfs -o size=1g tmpfs /dev/shm && "
            f"mount -t tmpfs tmpfs /mnt && mkdir -p /tmp/ray && mount --bind {self.folder} /tmp/ray && "
            f"mount --bind {self.folder}/hosts /etc/hosts && echo up && exec sleep infinity"
        )

    def _inside(self, command: tuple, cwd: str | Path) -> list[str]:
        return ["nsenter", f"--target={self.pid}", *("-n", "-m", "-p", "-u", "-i"), f"--wd={cwd}", *map(str, command)]

    def run(self, *command, timeout=120, cwd="/", env=None) -> subprocess.CompletedProcess:
        return subprocess.run(
            self._inside(command, cwd), env={**self.env, **(env or {})}, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def start(self, *command, log: str, cwd="/", env=None) -> subprocess.Popen:
        with (self.folder / log).open("w") as out:
            return subprocess.Popen(self._inside(command, cwd), env={**self.env, **(env or {})}, stdout=out, stderr=out)

    def processes(self) -> dict[int, str]:
        """Command lines of the host's processes, by pid on this machine; none once it is off."""
        if self.process.poll() is not None:
            return {}
        space, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns/pid") == space:
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue
        return found

    def kill(self, *patterns: str) -> None:
        """SIGKILL to the processes that have any of the patterns in their command lines."""
        for pid, line in self.processes().items():
            if any(pattern in line for pattern in patterns):
                os.kill(pid, signal.SIGKILL)

    def power_off(self) -> None:
        self.process.kill()  # its child, the first process of the pid namespace, goes with it, and so does all inside
        self.process.wait(10)


class Hosts:
    """A Ray cluster of hosts with a token: a head without CPUs, workers, and clients without Ray."""

    def __init__(self, folder: Path, workers: Mapping[str, int], clients=("client",), slow=()) -> None:
        """``workers``: the CPUs of each; ``slow``: those whose cables can be slowed down."""
        self.folder, self.cpus, self.slow = folder, {"head": 0, **workers}, [] if without_tun() else list(slow)
        self.numbers = {name: i for i, name in enumerate([*self.cpus, *clients, "switch"], start=1)}
        self.address, self.dashboard = f"{NET}.1:6379", DASHBOARD
        self.env = {
            "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder), "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1",
            "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **FAST_FAILURE,
        }  # fmt: skip
        self.hosts: dict[str, Host] = {}
        self.cables: dict[str, Cable] = {}
        try:
            self.open()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def open(self) -> None:
        self._add("switch")
        self._ip("switch", "link", "add", "br0", "up", "type", "bridge")
        for name in self.numbers:
            if name != "switch":
                self._add(name)
                self._connect(name)
        made = self["head"].run(*MAKE_TOKEN.split())  # into the home folder, which the hosts share
        if made.returncode:
            raise RuntimeError(f"{MAKE_TOKEN}: {made.stdout[-2000:]}")
        self.start_ray("head")
        self.start_ray(*(name for name in self.cpus if name != "head"))

    def close(self) -> None:
        for cable in self.cables.values():
            cable.close()
        for host in self.hosts.values():
            host.power_off()

    def mend(self) -> None:
        """Undo whatever a test did: cables in, hosts up, Ray on every node."""
        if not self.has_ray("head") or not self.alive_nodes():
            self.close()
            self.open()
            return
        for name in self.cpus:
            self._ip("switch", "link", "set", name, "up", check=False)  # one whose host is gone is gone too
            self._ip("switch", "link", "set", name, "type", "bridge_slave", "isolated", "off", check=False)
        lost = [name for name in self.cpus if not self.has_ray(name) or self[name].ip not in self.alive_nodes()]
        for name in lost:
            self[name].power_off()
            self._ip("switch", "link", "del", name, check=False)
            self._add(name)
            self._connect(name)
        self.start_ray(*lost)
        for cable in self.cables.values():
            cable.impair()
        until = time.monotonic() + 30
        while sorted(self.alive_nodes()) != sorted(self[name].ip for name in self.cpus):
            assert time.monotonic() < until, self.alive_nodes()
            time.sleep(0.2)

    def has_ray(self, name: str) -> bool:
        return self[name].process.poll() is None and any(
            "raylet/raylet" in line for line in self[name].processes().values()
        )

    @property
    def token(self) -> str:
        return (self.folder / ".ray" / "auth_token").read_text().strip()

    def api(self, path: str) -> dict:
        """An answer of the head's dashboard."""
        done = self["head"].run(sys.executable, "-S", "-c", API, f"{self.dashboard}{path}", self.token, timeout=20)
        if done.returncode:
            raise OSError(done.stdout)
        return json.loads(done.stdout)

    def alive_nodes(self) -> list[str]:
        """Addresses of the cluster's nodes, one that has died twice until that is noticed; none without a head."""
        try:
            nodes = self.api("/api/v0/nodes")["data"]["result"]["result"]
        except (OSError, subprocess.TimeoutExpired):
            return []
        return [node["node_ip"] for node in nodes if node["state"] == "ALIVE"]

    def hosts_of_actors(self) -> list[tuple[str, str]]:
        """Class and name of every actor of the newest job, with its host; of actors that have ended, too."""
        actors = self.api("/api/v0/actors?detail=1&limit=1000")["data"]["result"]["result"]
        nodes = {node["node_id"]: node["node_ip"] for node in self.api("/api/v0/nodes")["data"]["result"]["result"]}
        names = {host.ip: name for name, host in self.hosts.items()}
        newest = max(actor["job_id"] for actor in actors)
        return [
            (f"{actor['class_name']} {actor['name']}", names[nodes[actor["node_id"]]])
            for actor in actors
            if actor["job_id"] == newest
        ]

    def _add(self, name: str) -> None:
        self.hosts[name] = Host(name, self.numbers[name], self.folder, self.env)

    def _connect(self, name: str) -> None:
        """A cable from a host to the switch."""
        if name in self.slow:
            self.cables[name] = Cable(self["switch"].pid, name, self[name].pid, "eth0")
        else:
            peer = ("type", "veth", "peer", "name", "eth0", "netns", self[name].pid)
            self._ip("switch", "link", "add", name, *peer)
        self._ip("switch", "link", "set", name, "master", "br0", "up")
        self._ip(name, "addr", "add", f"{self[name].ip}/24", "dev", "eth0")
        self._ip(name, "link", "set", "eth0", "up")

    def _ip(self, where: str, *words, check=True) -> None:
        command = ["nsenter", f"--target={self[where].pid}", "-n", "ip", *map(str, words)]
        subprocess.run(command, check=check, capture_output=True)

    def start_ray(self, *names: str, timeout=120) -> None:
        started = {name: self._ray_start(name) for name in names}
        until = time.monotonic() + timeout
        for name, process in started.items():
            if process.wait(max(1, until - time.monotonic())):
                raise RuntimeError(f"ray start on {name}: {(self[name].folder / 'ray_start.log').read_text()[-2000:]}")

    def _ray_start(self, name: str) -> subprocess.Popen:
        words = (HEAD if name == "head" else JOIN.format(f"{NET}.1")).split()
        own = (f"--node-ip-address={self[name].ip}", f"--num-cpus={self.cpus[name]}", "--object-store-memory=104857600")
        return self[name].start(*words, *own, log="ray_start.log")

    def link(self, name: str, state: str) -> None:
        """``down`` pulls the cable: nobody is told, packets just vanish."""
        self._ip("switch", "link", "set", name, state)

    def part(self, *names: str, on: bool = True) -> None:
        """Let the named hosts no longer reach each other; all others still reach them."""
        for name in names:
            self._ip("switch", "link", "set", name, "type", "bridge_slave", "isolated", "on" if on else "off")
