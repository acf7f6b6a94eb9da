"""vLLM and SGLang servers of several policies on one cluster.

verl names a server's Ray actor, and the socket of its weight sync, by its replica rank, which starts at 0 in every
policy: a second policy would collide with the first or, worse, write its weights into the first one's server without an
error. Every policy therefore gets an offset (``rollout.custom.replica_offset``) for its replica ranks. The adapter, the
replica and the manager must agree on it: they are one unit.
"""

import os
from typing import Any

import ray
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, get_rollout_replica_class

from marl.config.policies import ranks_per_server

OFFSET = 1024
"""Ranks between policies: above any policy's replica count, and a multiple of the GPUs of a node, which SGLang needs."""


def replica_offset(config: Any) -> int:
    return int(config.custom["replica_offset"])


def offset_replica_class(name: str) -> type[RolloutReplica]:
    """verl's replica class of this backend, with replica ranks that start at the policy's offset."""
    base = get_rollout_replica_class(name)

    class OffsetReplica(base):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if name == "vllm":
                self.server_class = ray.remote(vllm_server_class())

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


def vllm_server_class() -> type:
    """verl's vLLM server, whose weight-sync socket carries the run.

    The socket is named by Ray's job id, which is the same in every fresh local cluster: two runs on one host would read
    each other's weights.
    """
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    class RunServer(vLLMHttpServer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            os.environ["VERL_RAY_JOB_ID"] += f"-{run_id(self.config)}"  # inherited by the engine's worker processes

    return RunServer


def offset_rank(config: Any) -> int:
    """The replica that this training rank feeds."""
    return replica_offset(config) + int(os.environ["RANK"]) // ranks_per_server(config)


def socket_seconds(config: Any) -> float:
    """Deadline of a weight sync's socket: it ends before the call around it, and names the server. zmq counts milliseconds in
    31 bits."""
    return min(config.custom["timeout_s"] / 2, (2**31 - 1) / 1000)


def vllm_adapter_class() -> type:
    """verl's adapter, whose weight sync names the key that limits its wait."""
    import zmq
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    class BoundedAdapter(ServerAdapter):
        async def update_weights(self, *args: Any, **kwargs: Any) -> None:
            try:
                await super().update_weights(*args, **kwargs)
            except zmq.Again:
                raise TimeoutError(
                    f"the vLLM server of policy {self.config.custom['policy']!r} took no weights for "
                    f"{socket_seconds(self.config):g} s, half of {self.config.custom['timeout_key']}; look at its log, and raise the key if it "
                    "only needs longer"
                ) from None

    return BoundedAdapter


class VLLMServerAdapter:
    """Built lazily, so that importing this module does not import vLLM."""

    def __new__(cls, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> Any:
        import zmq

        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):  # verl's sender waits for ever for a receiver that died
            zmq.Context.instance().setsockopt(option, round(1000 * socket_seconds(config)))
        adapter = vllm_adapter_class()(config, model_config, device_mesh, replica_rank=offset_rank(config))
        adapter.zmq_handle = adapter.zmq_handle.replace("-replica-", f"-{run_id(config)}-replica-")
        return adapter


class SGLangServerAdapter:
    def __new__(cls, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> Any:
        from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

        return ServerAdapter(config, model_config, device_mesh, replica_rank=offset_rank(config))


_ROLLOUT_REGISTRY[("vllm", "async")] = "marl.rollout.vllm_sglang.VLLMServerAdapter"
_ROLLOUT_REGISTRY[("sglang", "async")] = "marl.rollout.vllm_sglang.SGLangServerAdapter"
