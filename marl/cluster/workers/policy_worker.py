"""The FSDP worker of one policy: verl's actor, rollout adapter and reference, called without blocking the driver."""

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.model import convert_weight_keys
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

import marl.platform.engine
import marl.rollout.hf
import marl.rollout.vllm_sglang  # noqa: F401 - these three register the CPU's engines and our rollout backends
from marl.cluster.workers import lora
from marl.cluster.workers.dispatch import rows_by_rank
from marl.cluster.workers.interface import at_the_nodes_interface, loopback_store
from marl.cluster.workers.policy_loss import policy_loss
from marl.cluster.workers.shard_files import FolderWorker, ShardFiles, raise_lost, write
from marl.config.targets import built
from marl.platform.adapters import of_adapters, shard
from marl.platform.determinism import seed_generators
from marl.platform.shards import reshard, settle_dtypes
from marl.utils.allocator import keep_freed_memory
from marl.utils.garbage import collect_garbage, freeze_gc
from marl.utils.ragged import of_responses
from marl.utils.trees import copied, load_tree, save_tree
from marl.utils.weight_digest import Digest, digest_of

PG_TIMEOUT_SECONDS = "MARL_PROCESS_GROUP_TIMEOUT"


def ensure_process_group() -> None:
    """Make the group of all ranks, if there is none: verl makes it only with the first model, and on a CPU asks for
    ``cpu:gloo,cpu:gloo``, which torch refuses."""
    if torch.distributed.is_initialized():
        return
    rank, ranks, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None
    if get_device_name() == "cpu":
        keep_freed_memory()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        timeout = timedelta(seconds=float(os.environ[PG_TIMEOUT_SECONDS]))
    with at_the_nodes_interface(ranks):
        store = loopback_store(rank, ranks)
        torch.distributed.init_process_group(
            process_group_backend(), store=store, rank=rank, world_size=ranks, timeout=timeout
        )


def process_group_backend() -> str:
    return "cpu:gloo" if get_device_name() == "cpu" else f"cpu:gloo,{get_device_name()}:nccl"


class EngineWorker(FolderWorker, TrainingWorker):
    def __init__(self, config: Any) -> None:
        ensure_process_group()
        super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        super().reset()
        self.engine.checkpoint_manager = files = ShardFiles(self.engine.checkpoint_manager)
        if self.engine.optimizer is not None:
            self.engine.optimizer.register_step_pre_hook(lambda *_: files.release())
        if lora.has_adapters(self.engine):
            settle_dtypes(self.engine.module, (adapted for _, adapted in of_adapters(self.engine.module)))

    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """verl's; where a step has several passes, the learning rate moves on after the last."""
        if tu.get(data, "last_pass") is False:
            tu.assign_non_tensor(data, update_lr_scheduler=False)
        return super().train_batch(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """verl's; but learning rate, weight decay and the like stay the configuration's, which a resumed run may change: the
        saved optimizer and schedule hold the former ones."""
        optimizer, schedule = self.engine.optimizer, self.engine.lr_scheduler
        settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        base_lrs = list(schedule.base_lrs)
        super().load_checkpoint(*args, **kwargs)
        schedule.base_lrs = base_lrs
        for group, own, base, factor in zip(
            optimizer.param_groups, settings, base_lrs, schedule.lr_lambdas, strict=True
        ):
            group.update(own, lr=base * factor(schedule.last_epoch))


class PolicyWorker(FolderWorker, ActorRolloutRefWorker):
    """Overrides change one thing of verl's methods: they return at once, so that policies work at the same time."""

    role: str
    config: Any
    actor_worker_cls: Any = EngineWorker
    ref_worker_cls = EngineWorker

    def __init__(self, config: Any, role: str, **kwargs: Any) -> None:
        super().__init__(config, role, **kwargs)
        ensure_process_group()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        """verl's, part by part where there is a reference: its model may be another than the policy's."""
        seed_generators(self.config.rollout.custom["seed"] + torch.distributed.get_rank())
        role, config = self.role, self.config
        self.config = sections(config)
        if self._is_ref:
            self.role, self.config.model = "ref", built(reference_model(config))
            super().init_model()
            self.role = "actor_rollout"
        self.config.model = built(config.model)
        super().init_model()
        self.role = role
        self.actor.set_loss_fn(partial(policy_loss, self.loss_fn))
        if lora.has_adapters(self.actor.engine):
            dtype = getattr(torch, self.config.rollout.dtype)
            self.actor.engine._merged_lora_per_tensor_param = partial(lora.merged_parameters, self.actor.engine, dtype)
        freeze_gc()

    def _use(self, rows: TensorDict) -> None:
        """Make the model ready for a call on these rows."""

    @register(dispatch_mode=rows_by_rank("actor"), blocking=False)
    def compute_log_prob(self, data: TensorDict) -> TensorDict | None:
        """``log_probs`` and ``entropy`` of the responses alone, ragged like ``responses``."""
        started = time.perf_counter()
        self._use(data)
        return log_probs_of(super().compute_log_prob(data), data, started)

    @register(dispatch_mode=rows_by_rank("actor"), blocking=False)
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict | None:
        """The same under the reference: its own weights, or the policy's without its adapters."""
        started = time.perf_counter()
        self._use(data)
        if self._is_ref:
            return log_probs_of(super().compute_ref_log_prob(data), data, started)
        data = data.copy()
        tu.assign_non_tensor(data, no_lora_adapter=True)
        return log_probs_of(super().compute_log_prob(data), data, started)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def renew_reference(self) -> None:
        """Copy the policy's weights into the reference, each rank its own shards."""
        with torch.no_grad():
            for kept, new in same_shards(self.ref, self.actor):
                kept.copy_(new)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def exchange_reference(self) -> None:
        """Let policy and reference exchange their weights, each rank its own shards."""
        with torch.no_grad():
            for kept, own in same_shards(self.ref, self.actor):
                before = own.clone()
                own.copy_(kept)
                kept.copy_(before)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_reference(self, folder: str, beside: bool = True) -> None:
        weights = dict(shards(self.ref))
        job = partial(save_tree, copied(weights) if beside else weights, self._reference_file(folder))
        write(folder, self.rank, [job], beside)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_reference(self, folder: str) -> None:
        saved = load_tree(self._reference_file(folder))
        with torch.no_grad():
            for name, kept in shards(self.ref):
                kept.copy_(saved[name])

    def _reference_file(self, folder: str) -> Path:
        return Path(folder) / f"reference_world_size_{self.world_size}_rank_{self.rank}.safetensors"

    @register(dispatch_mode=rows_by_rank("actor"), blocking=False)
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        raise_lost()
        started = time.perf_counter()
        self._use(data)
        output = super().update_actor(data)
        collect_garbage()
        return None if output is None else tu.get_tensordict({}, {"metrics": timed(output, started)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> tuple[float, float]:
        """verl's; returns its seconds and when it ended."""
        started = time.perf_counter()
        await super().update_weights(global_steps=global_steps, mode=mode)
        return time.perf_counter() - started, time.time()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def weight_digest(self, seed: int, *read_as: Any) -> tuple[Digest, float, float]:
        """This rank's share of the digest, its seconds, and when it was done."""
        started = time.perf_counter()
        get_torch_device().synchronize()  # as in shards()
        digest = self._digest(seed, *read_as)
        return digest, time.perf_counter() - started, time.time()

    def _digest(self, seed: int) -> Digest:
        """This rank's share of the digest of the weights that servers should hold: read from its shards, not from what a sync
        sends, which may be wrong. Adapters are merged for it, which gathers; the first rank has all of that."""
        engine, dtype = self.actor.engine, getattr(torch, self.config.rollout.dtype)
        if lora.has_adapters(engine):
            merged = digest_of(lora.merged_parameters(engine, dtype), dtype, seed)
            return merged if self.rank == 0 else {}
        with lora.on_device(engine) if fsdp_version(engine.module) == 1 else nullcontext():
            tensors = convert_weight_keys(engine.module.state_dict(), lora.unwrapped(engine))
            return digest_of(tensors.items(), dtype, seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, local_path: str, beside: bool = True) -> None:
        """verl's, written beside the next step or at once; a policy with adapters also leaves them in PEFT's form, and
        ``hf_model`` is the merged model."""
        engine = self.actor.engine
        engine.checkpoint_manager.beside = beside
        adapted = lora.has_adapters(engine)
        with lora.without_whole_model(engine) if adapted else nullcontext(False) as whole_model:
            super().save_checkpoint(local_path)
        exports = lora.exports(engine, Path(local_path), self.rank, whole_model) if adapted else []
        write(local_path, self.rank, engine.checkpoint_manager.taken() + exports, beside)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(*args, **kwargs)


class SeatWorker(Worker):
    """Holds a rank's accelerator for a server whose policy is not trained. It has no model, no optimizer and no process group; verl's replicas ask it where it is."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def empty_cache(self) -> None:
        """Return to the accelerator what trainers of the same process have freed, and torch has kept."""
        get_torch_device().empty_cache()


def sections(config: DictConfig) -> Any:
    """A policy's ``actor_rollout_ref``, its actor and rollout as objects, which verl's ``init_model`` takes as they are. ``ref`` stays
    a section: verl changes its keys before it builds it. The caller builds ``model``."""
    return SimpleNamespace(actor=built(config.actor), rollout=built(config.rollout), ref=config.ref)


def reference_model(config: DictConfig) -> Any:
    """The policy's model, with what ``ref.model`` changes in it; verl's own dataclass knows no such key."""
    with open_dict(config.ref):
        changes = {key: value for key, value in (config.ref.pop("model", None) or {}).items() if value is not None}
    return OmegaConf.merge(config.model, changes) if changes else config.model


def shards(worker: TrainingWorker) -> Iterator[tuple[str, torch.Tensor]]:
    """The live parameters and buffers of this rank, by name: writing to them changes the model.

    ``state_dict()`` is not an option: under FSDP1 it returns copies.
    """
    module = worker.engine.module
    worker.engine.checkpoint_manager.release()
    reshard(module)
    get_torch_device().synchronize()  # verl moves weights to the host without waiting for the copies
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        yield name, shard(tensor)


def same_shards(reference: TrainingWorker, policy: TrainingWorker) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each shard of a reference beside the policy's. Raises ValueError for models of two kinds, before any is changed."""
    pairs = list(zip(shards(reference), shards(policy), strict=True))
    for (name, _), (other, _) in pairs:
        if name != other:
            raise ValueError(f"the reference has {name} where the policy has {other}: models of one kind are needed")
    return [(kept, own) for (_, kept), (_, own) in pairs]


def log_probs_of(output: TensorDict | None, data: TensorDict, started: float) -> TensorDict | None:
    if output is None:
        return None  # a rank whose outputs another one collects
    responses = {key: of_responses(output[key], data) for key in ("log_probs", "entropy") if key in output}
    # a new one: what is added to a TensorDict that arrived consolidated is lost on its way back
    return tu.get_tensordict(responses, {"metrics": timed(output, started)})


def timed(output: TensorDict, started: float) -> dict[str, Any]:
    times = {"worker_seconds": time.perf_counter() - started, "worker_ended": time.time()}
    return tu.get(output, "metrics") | times
