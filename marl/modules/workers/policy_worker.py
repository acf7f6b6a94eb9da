"""The FSDP worker of one policy: verl's actor, rollout adapter and reference, called without blocking the driver."""

import os
import time
from datetime import timedelta
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

import marl.platform.engine
import marl.rollout.hf
import marl.rollout.offsets  # noqa: F401 - these three register the CPU's engines and our rollout backends
from marl.utils.memory import settle

PG_TIMEOUT_SECONDS = "MARL_PROCESS_GROUP_TIMEOUT"


def ensure_process_group() -> None:
    """gloo for a CPU: verl would ask for ``cpu:gloo,cpu:gloo``, which torch refuses; it skips what is there already."""
    if get_device_name() != "cpu" or torch.distributed.is_initialized():
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.distributed.init_process_group(
        "cpu:gloo",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=float(os.environ[PG_TIMEOUT_SECONDS])),
    )


class EngineWorker(TrainingWorker):
    def __init__(self, config: Any) -> None:
        ensure_process_group()
        super().__init__(config)


class PolicyWorker(ActorRolloutRefWorker):
    """Overrides change one thing of verl's methods: they return at once, so that policies work at the same time."""

    actor_worker_cls = EngineWorker
    ref_worker_cls = EngineWorker

    def __init__(self, config: Any, role: str, **kwargs: Any) -> None:
        super().__init__(config, role, **kwargs)
        ensure_process_group()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        super().init_model()
        settle()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        """``log_probs`` and ``entropy`` of the responses alone, ragged like ``responses``."""
        started = time.perf_counter()
        output = super().compute_log_prob(data)
        responses = {key: of_responses(output[key], data) for key in ("log_probs", "entropy") if key in output}
        # a new one: what is added to a TensorDict that arrived consolidated is lost on its way back
        return tu.get_tensordict(responses, {"metrics": timed(output, started)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def update_actor(self, data: TensorDict) -> TensorDict:
        started = time.perf_counter()
        output = super().update_actor(data)
        return tu.get_tensordict({}, {"metrics": timed(output, started)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(*args, **kwargs)


def timed(output: TensorDict, started: float) -> dict[str, Any]:
    return tu.get(output, "metrics") | {"worker_seconds": time.perf_counter() - started}


def of_responses(values: torch.Tensor, rows: TensorDict) -> torch.Tensor:
    """Cut the jagged outputs of whole rows down to the responses; output t predicts token t + 1."""
    offsets = rows["responses"].offsets()
    lengths = offsets.diff()
    row_ends = rows["input_ids"].offsets()[1:]
    shift = torch.repeat_interleave(row_ends - 1 - offsets[1:], lengths)
    index = torch.arange(int(offsets[-1]), device=shift.device) + shift
    return torch.nested.nested_tensor_from_jagged(values.values()[index].float(), offsets=offsets)
