"""GPUs, shared memory, disk, and the limits of processes."""

import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from marl.health.finding import Finding, note, ok, problem

GB = 1e9
SHARED_GB, DISK_GB = 1.0, 5.0
FILES, PROCESSES = 4096, 512
"""Fewer open files, or processes and threads, end runs of Ray."""
PIDS = Path("/sys/fs/cgroup/pids.max")


def gpus() -> list[Finding]:
    """The driver's GPUs and torch's must be the same; several of them need NCCL."""
    names, ours = driver_gpus(), torch_gpus()
    if not names:
        return [ok("GPUs", "none: hardware=cpu")]
    if ours < len(names):
        said = f"the driver has {len(names)} ({names[0]}), torch finds {ours}"
        return [
            problem(
                "GPUs", said, "install torch's CUDA build for this driver: make clean gpu; look at CUDA_VISIBLE_DEVICES"
            )
        ]
    found = ok("GPUs", f"{len(names)} x {names[0]}")
    return [found, nccl()] if len(names) > 1 else [found]


def driver_gpus() -> list[str]:
    try:
        words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def torch_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def nccl() -> Finding:
    import torch

    if not torch.distributed.is_nccl_available():
        return problem("NCCL", "torch was built without it", "install torch's CUDA build: make clean gpu")
    return ok("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """Ray keeps its objects there; Docker gives 64 MB unless asked."""
    if not Path(folder).is_dir():
        return note(folder, "there is none; Ray writes its objects to the disk", "mount a tmpfs there")
    free = shutil.disk_usage(folder).free
    if free < SHARED_GB * GB:
        return problem(
            folder,
            f"{free / GB:.2f} GB free, expected {SHARED_GB:g}",
            "docker run --shm-size=8g, or remove what lies there",
        )
    return ok(folder, f"{free / GB:.1f} GB free")


def disk(folder: str = "outputs") -> Finding:
    """Free space where runs write by default."""
    wanted = Path(folder).absolute()
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < DISK_GB * GB:
        mend = (
            "remove old checkpoints, set trainer.max_actor_ckpt_to_keep, or trainer.default_local_dir to another disk"
        )
        return problem(folder, f"{free / GB:.1f} GB free, expected {DISK_GB:g}", mend)
    return ok(folder, f"{free / GB:.0f} GB free")


def limits() -> Iterator[Finding]:
    """Limits of this user, and of the container."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limit("open files", max(files), FILES, "-n")  # Ray raises its own to the hard limit
    yield limit("processes", resource.getrlimit(resource.RLIMIT_NPROC)[0], PROCESSES, "-u")
    pids = PIDS.read_text().strip() if PIDS.is_file() else "max"
    if pids.isdigit() and int(pids) < PROCESSES:
        yield problem(
            "container's processes", f"{pids}, expected {PROCESSES}", f"docker run --pids-limit={8 * PROCESSES}"
        )


def limit(name: str, value: int, least: int, flag: str) -> Finding:
    if value != resource.RLIM_INFINITY and value < least:
        return problem(
            name,
            f"at most {value}, expected {least}",
            f"ulimit {flag} {least}, or raise it in /etc/security/limits.conf",
        )
    return ok(name, "no limit" if value == resource.RLIM_INFINITY else f"at most {value}")
