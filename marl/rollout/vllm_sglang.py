"""vLLM and SGLang servers of several policies on one cluster.

verl names a server's Ray actor, and the socket of its weight sync, by its replica rank, which starts at 0 in every
policy: a second policy would collide with the first or, worse, write its weights into the first one's server without an
error. Every policy therefore gets an offset (``rollout.custom.replica_offset``) for its replica ranks. The adapter, the
replica and the manager must agree on it: they are one unit.

verl's engine classes are subclassed in functions, so that importing this module imports neither vLLM nor SGLang.
"""

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import ray
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, get_rollout_replica_class

from marl.config.policies import ranks_per_server
from marl.rollout.adapter_ids import adapter_ids, adapter_ranks
from marl.utils import segments
from marl.utils.spans import Span, Stopwatch

OFFSET = 1024
"""Ranks between policies: above any policy's replica count."""
ENGINE_POLL_S = 0.5
"""Seconds between two looks at an engine that was asked for something."""
SHUTDOWN_S = 20.0
"""Time that an engine's processes have to end by themselves; vLLM kills them after 5 s, too few on a busy machine."""


def replica_offset(config: Any) -> int:
    return int(config.custom["replica_offset"])


def offset_replica_class(name: str) -> type[RolloutReplica]:
    """verl's replica class of this backend, with replica ranks that start at the policy's offset."""
    base = get_rollout_replica_class(name)
    make_server = {"vllm": vllm_server_class, "sglang": sglang_server_class}.get(name)

    class OffsetReplica(base):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if make_server is not None:
                self.server_class = ray.remote(make_server(self.config))

        async def init_hybrid(self, worker_group: Any) -> None:
            # a colocated server has weights of its own: it sleeps without dropping them
            self.rollout_mode = RolloutMode.COLOCATED if is_frozen(self.config) else RolloutMode.HYBRID
            first = self.world_size * (self.replica_rank - replica_offset(self.config))
            self.workers = worker_group.workers[first : first + self.world_size]
            await self.launch_servers()

    return OffsetReplica


def is_frozen(config: Any) -> bool:
    """True if a policy's servers load their weights themselves, once."""
    return bool(config.custom.get("frozen", False))


def run_id(config: Any) -> str:
    return config.custom["run_id"]


class TimesRequests:
    """Mixin for verl's servers: records when at least one request was being answered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = Stopwatch()

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return await super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.watch.add(began, time.monotonic())

    async def take_spans(self) -> tuple[list[Span], float]:
        """Busy spans since the last call, and the server's current time."""
        return self.watch.take(), time.monotonic()


class NotesSegments:
    """Mixin for verl's servers: the engine's shared memory is known where its processes are killed."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        await super().launch_server(*args, **kwargs)  # type: ignore[misc]
        segments.note_mapped()


class EndsWithEngine:
    """Mixin for verl's vLLM server: a call to the engine ends when the engine dies. vLLM then fails the requests alone; whatever else
    it was asked, sleep or new weights, would be waited for until its deadline."""

    engine: Any = None

    async def sleep(self, *args: Any, **kwargs: Any) -> Any:
        return await self._unless_dead(super().sleep(*args, **kwargs))  # type: ignore[misc]

    async def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        return await self._unless_dead(super().wake_up(*args, **kwargs))  # type: ignore[misc]

    async def clear_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
        return await self._unless_dead(super().clear_kv_cache(*args, **kwargs))  # type: ignore[misc]

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        return await self._unless_dead(super().collective_rpc(*args, **kwargs))  # type: ignore[misc]

    async def wait_for_requests_to_drain(self, *args: Any, **kwargs: Any) -> Any:
        return await self._unless_dead(super().wait_for_requests_to_drain(*args, **kwargs))  # type: ignore[misc]

    async def _unless_dead(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Raises vLLM's EngineDeadError."""
        call = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({call}, timeout=ENGINE_POLL_S))[0]:
                if self.engine is not None and self.engine.errored:
                    raise self.engine.dead_error
            return call.result()
        finally:
            call.cancel()


def vllm_server_class(config: Any) -> type:
    """verl's vLLM server, whose weight-sync socket carries the run, and which can end its engine.

    The socket is named by Ray's job id, which is the same in every fresh local cluster: two runs on one host would read
    each other's weights. An engine that is killed leaves its shared memory behind.
    """
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    class RunServer(TimesRequests, NotesSegments, EndsWithEngine, vLLMHttpServer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            os.environ["VERL_RAY_JOB_ID"] += f"-{run_id(self.config)}"  # inherited by the engine's worker processes

        async def shutdown(self) -> None:
            """End the engine's processes, which free their shared memory."""
            if self.node_rank == 0:  # other nodes' servers have no engine object
                self.engine.shutdown(timeout=SHUTDOWN_S)

    return with_adapters(RunServer) if adapter_ranks(config) else RunServer


def with_adapters(server: type) -> type:
    """A vLLM server that holds every adapter of its pool."""
    from marl.rollout.vllm_adapters import AdapterServing

    return type("AdapterServer", (AdapterServing, server), {})


def sglang_server_class(_: Any) -> type:
    """verl's SGLang server, placed on the GPUs of its own workers, which gives up cancelled requests as vLLM does by itself.

    Where Ray leaves all GPUs visible, verl derives the first GPU from the replica's rank, which is right for a pool that
    starts at GPU 0 and for no other.
    """
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    class PlacedServer(TimesRequests, NotesSegments, SGLangHttpServer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            own = ray.get([worker.__ray_call__.remote(gpu_of) for worker in kwargs["workers"]])
            super().__init__(*args, **kwargs | {"base_gpu_id": first_gpu(kwargs["cuda_visible_devices"], own)})

        async def generate(
            self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, *rest: Any, **settings: Any
        ) -> Any:
            try:
                return await super().generate(prompt_ids, sampling_params, request_id, *rest, **settings)
            except asyncio.CancelledError:
                self.tokenizer_manager.abort_request(request_id)
                raise

    return PlacedServer


def gpu_of(worker: Any) -> str:
    """The id of the GPU that Ray gave a worker, whatever the process can see."""
    from verl.utils.device import get_resource_name

    return str(ray.get_runtime_context().get_accelerator_ids()[get_resource_name()][0])


def first_gpu(visible: str, own: Sequence[str]) -> int:
    """Position of a server's first GPU among the visible ones."""
    listed = visible.split(",")
    return min(listed.index(gpu) for gpu in own)


def offset_rank(config: Any) -> int:
    """The replica that this training rank feeds."""
    return replica_offset(config) + int(os.environ["RANK"]) // ranks_per_server(config)


def socket_seconds(config: Any) -> float:
    """Deadline of each bucket of a weight sync: it ends before the call around it, and names the server."""
    return float(config.custom["timeout_s"]) / 2


def vllm_adapter_class() -> type:
    """verl's adapter, whose weight sync ends when the server fails to take the weights."""
    import torch
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    from marl.rollout.watched_sender import WatchedSender

    class WatchedAdapter(ServerAdapter):
        @torch.no_grad()
        async def update_weights(
            self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
        ) -> None:
            """Send whole tensors as verl's adapter does, with a sender that hears of a receiver that failed."""
            if wire_format != "named_tensors":
                raise ValueError(
                    f"wire_format={wire_format!r}: expected 'named_tensors'; use checkpoint_engine.backend=naive"
                )
            settings = {**kwargs, "use_shm": self.use_shm}
            receiving = await self._execute_method("update_weights_from_ipc", non_block=True, kwargs=settings)
            await self._sender(receiving, kwargs.get("adapter")).async_send_weights(weights)
            if receiving is not None:
                await receiving
            if self._has_server:
                await self.server_handle.clear_kv_cache.remote()
                if global_steps is not None:
                    await self.server_handle.set_global_steps.remote(global_steps)

        async def update_adapter(self, name: str, weights: Any, scaling: float, global_steps: int) -> None:
            """Ship one adapter; without weights, the step alone."""
            if weights is not None:
                rank = adapter_ranks(self.config)[name]
                await self.update_weights(
                    ((f"base_model.model.{key}", weight) for key, weight in weights),
                    peft_config={"r": rank, "lora_alpha": scaling * rank, "target_modules": "all-linear"},
                    base_sync_done=True,
                    adapter=(name, adapter_ids(self.config)[name]),
                )
            if self._ensure_server_handle():
                await self.server_handle.finish_adapter.remote(name, global_steps)

        def _sender(self, receiving: Any, adapter: tuple[str, int] | None = None) -> WatchedSender:
            policy = adapter[0] if adapter else self.config.custom["policy"]
            return WatchedSender(
                receiving=receiving,
                whose=f"the vLLM server of policy {policy!r}",
                seconds=socket_seconds(self.config),
                key=self.config.custom["timeout_key"],
                zmq_handle=self.zmq_handle,
                bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
                use_shm=self.use_shm,
            )

    return WatchedAdapter


class VLLMServerAdapter:
    """Built lazily, so that importing this module does not import vLLM."""

    def __new__(cls, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> Any:
        adapter = vllm_adapter_class()(config, model_config, device_mesh, replica_rank=offset_rank(config))
        adapter.zmq_handle = adapter.zmq_handle.replace("-replica-", f"-{run_id(config)}-replica-")
        return adapter


class SGLangServerAdapter:
    def __new__(cls, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> Any:
        from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

        return ServerAdapter(config, model_config, device_mesh, replica_rank=offset_rank(config))


_ROLLOUT_REGISTRY[("vllm", "async")] = "marl.rollout.vllm_sglang.VLLMServerAdapter"
_ROLLOUT_REGISTRY[("sglang", "async")] = "marl.rollout.vllm_sglang.SGLangServerAdapter"
