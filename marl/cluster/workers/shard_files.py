"""A rank's part of a checkpoint: written in a thread beside the next step, and read without executing pickles."""

import logging
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.device import get_torch_device
from verl.utils.fsdp_utils import fsdp_version, get_fsdp_full_state_dict

from marl.cluster.workers import whole_model
from marl.cluster.workers.live_state import LiveState
from marl.utils.dtensors import local
from marl.utils.marks import leave, reserve
from marl.utils.pickles import read, read_by_verl
from marl.utils.trees import on_host

logger = logging.getLogger(__name__)
Job = Callable[[], Any]
THREAD = ThreadPoolExecutor(1, "checkpoint")
WRITES: list[Future] = []
OF_A_RANK = re.compile(r"_rank_(\d+)\.")


def write(folder: str | Path, rank: int, jobs: list[Job], beside: bool = True) -> None:
    """Do the jobs and forget them, in the background, one folder after another, or at once; the mark that then appears there holds
    the error, or nothing."""
    raise_lost()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    reserve(folder, rank)
    WRITES.append(written := THREAD.submit(_write, folder, rank, jobs))
    if not beside:
        wait([written])
        raise_lost()


def raise_lost() -> None:
    """Raise the error of a write that could not even leave a mark: nobody else will."""
    for ended in [future for future in WRITES if future.done()]:
        WRITES.remove(ended)
        ended.result()


def _write(folder: Path, rank: int, jobs: list[Job]) -> None:
    error = ""
    try:
        while jobs:
            jobs.pop(0)()  # what it has written is no longer held
    except Exception as failed:
        error = f"{free_space(folder)}{type(failed).__name__}: {failed}"
        logger.error("writing a checkpoint to %s: %s", folder, error)
        remove_parts(folder, rank)
    try:
        leave(folder, rank, error)
    except OSError as unsaid:
        if folder.exists():  # one that the driver has given up is waited for by nobody
            raise OSError(f"{folder}, rank {rank}: {error or 'written'}, and no mark can be left: {unsaid}") from unsaid


def free_space(folder: Path) -> str:
    """The beginning of an error: of a full disk, torch.save says nothing."""
    try:
        return f"with {shutil.disk_usage(folder).free / 2**20:.0f} MiB free there, "
    except FileNotFoundError:
        return ""


def remove_parts(folder: Path, rank: int) -> None:
    """Free the disk of a rank's files, which are of no use; those that name no rank are the first one's."""
    for path in folder.glob("[!.]*"):
        owner = OF_A_RANK.search(path.name)
        if rank == (int(owner[1]) if owner else 0):
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def save_live(state: Any, file: str) -> None:
    torch.save(on_host(state), file)


def write_whole(shell: Any, folder: Path, gathered: whole_model.Weights, own: LiveState) -> None:
    """Write a whole model from weights that were gathered for it, and from live ones."""
    whole_model.write_into(shell, folder, gathered | own.copied())


def described_in(folder: Path) -> dict[str, bytes]:
    """Contents of the files that belong to no rank, by path within the folder. Other ranks may already be writing theirs."""
    files = chain(folder.glob("*.json"), (folder / "huggingface").rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


class FolderWorker:
    """A worker that writes into a folder, which its host may not share."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def host_without(self, path: str) -> str | None:
        """This host's name where it does not see a file."""
        return None if Path(path).exists() else socket.gethostname()


class ShardFiles(FSDPCheckpointManager):
    """verl's, file for file. FSDP1's states need its own hooks: verl writes and reads them, at once."""

    checkpoint_save_contents: list[str]

    def __init__(self, verls: FSDPCheckpointManager) -> None:
        self.__dict__.update(vars(verls))
        self.jobs: list[Job] = []
        self.beside = True
        """True if the next save is written beside the next step, which calls :meth:`release` before it changes the live states."""
        self.live: list[ref[LiveState]] = []
        """States that a background write may still be reading; its jobs hold them, and drop them when they are done or have failed."""
        self.described: dict[str, bytes] | None = None
        """Files beside the weights (the model's configuration, tokenizer), which are the same in every checkpoint."""
        self.shell: Any = None
        """A model without weights, through which whole models are written."""

    def taken(self) -> list[Job]:
        """The writes that the last save left to do."""
        jobs, self.jobs = self.jobs, []
        return jobs

    @torch.no_grad()  # so that the parts of DTensors record no autograd node
    def save_checkpoint(self, local_path: str, *arguments: Any, **settings: Any) -> None:
        if fsdp_version(self.model) == 1:
            return super().save_checkpoint(local_path, *arguments, **settings)
        self._describe(Path(local_path), *arguments, **settings)
        get_torch_device().synchronize()  # verl moves moments to the host without waiting for the copies
        self.live = [state for state in self.live if state() is not None]
        weights = self.model.state_dict() if self.should_save_model or self.should_save_hf_model else {}
        copies: whole_model.Copies = {}  # of the weights; those of the moments need not live as long
        self.jobs += [
            self._job(state, self._file(local_path, name), copies if name == "model" else {})
            for name, state in self._states(weights)
        ]
        if self.should_save_hf_model:
            whole = self._whole_model(weights)
            if self.rank == 0:
                self.jobs.append(self._job_of_whole_model(whole, Path(local_path) / "huggingface", copies))

    def _describe(self, folder: Path, *arguments: Any, **settings: Any) -> None:
        """The first time verl writes its files beside the weights, at once; afterwards they are rewritten unchanged, by a job."""
        if self.described is not None:
            return self.jobs.append(partial(write_files, folder, self.described))
        with self._contents([]):
            super().save_checkpoint(str(folder), *arguments, **settings)
        self.described = described_in(folder) if self.rank == 0 else {}

    def _job(self, state: Any, file: str, copies: whole_model.Copies) -> Job:
        if not self.beside:
            return partial(save_live, state, file)
        return partial(self._live(state, copies).write, file)

    def _live(self, state: Any, copies: whole_model.Copies) -> LiveState:
        live = LiveState(state, partial(whole_model.copy_of, copies=copies))
        self.live.append(ref(live))
        return live

    def release(self) -> None:
        """Let weights or moments change: to be called before, since a background write may still be reading them."""
        for state in filter(None, (state() for state in self.live)):
            state.release()
        self.live.clear()

    def _whole_model(self, weights: whole_model.Weights) -> whole_model.Weights:
        """The whole model's weights: of a rank that is alone the live ones, of several those that the first rank gathers."""
        if self.world_size == 1:
            return {name: local(weight) for name, weight in weights.items()}
        return dict(get_fsdp_full_state_dict(self.model, offload_to_cpu=True, rank0_only=True))

    def _job_of_whole_model(self, weights: whole_model.Weights, folder: Path, copies: whole_model.Copies) -> Job:
        if self.shell is None:
            self.shell = whole_model.shell_of(self.model.config, folder, self.trust_remote_code, torch.bfloat16)
        whole_model.drop_tied(self.shell, weights)
        if not self.beside:
            return partial(whole_model.write_into, self.shell, folder, weights)
        own = weights if self.world_size == 1 else self._live_among(weights)
        gathered = {name: weight for name, weight in weights.items() if name not in own}
        return partial(write_whole, self.shell, folder, gathered, self._live(own, copies))

    def _live_among(self, weights: whole_model.Weights) -> whole_model.Weights:
        """Those that lie in the model's own memory: what ranks do not share is gathered without a copy."""
        places = {whole_model.place(tensor) for tensor in chain(self.model.parameters(), self.model.buffers())}
        return {name: weight for name, weight in weights.items() if whole_model.place(weight) in places}

    def load_checkpoint(self, local_path: str, *arguments: Any, **settings: Any) -> None:
        self.release()
        if fsdp_version(self.model) == 1:
            with read_by_verl():
                return super().load_checkpoint(local_path, *arguments, **settings)
        if self.should_load_model:
            weights = read(self._file(local_path, "model"))
            self.model.load_state_dict(weights, strict=not self.is_lora_only_state_dict(weights))
        if self.should_load_optimizer:
            self.optimizer.load_state_dict(self._backfill_optimizer_state(read(self._file(local_path, "optim"))))
        if self.should_load_extra:
            extra = read(self._file(local_path, "extra_state"))
            self.load_rng_state(extra["rng"])
            if extra["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        torch.distributed.barrier()

    def _file(self, folder: str, state: str) -> str:
        return f"{folder}/{state}_world_size_{self.world_size}_rank_{self.rank}.pt"

    def _states(self, weights: whole_model.Weights) -> Iterator[tuple[str, Any]]:
        """Live states by the names of verl's files, of a model with these weights."""
        if self.should_save_model:
            only = self.should_save_lora_only and self._has_lora()
            yield "model", {key: w for key, w in weights.items() if not only or "lora_" in key or ".adapter_" in key}
        if self.should_save_optimizer:
            yield "optim", self.optimizer.state_dict()
        if self.should_save_extra:
            schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
            yield "extra_state", {"lr_scheduler": schedule, "rng": self.get_rng_state()}

    @contextmanager
    def _contents(self, kinds: list[str]) -> Iterator[None]:
        before, self.checkpoint_save_contents = self.checkpoint_save_contents, kinds
        try:
            yield
        finally:
            self.checkpoint_save_contents = before
