"""The ``hf`` rollout backend: a Ray actor that serves one replica, on the same waist as verl's vLLM and SGLang servers.

Three classes and two registrations make a backend of verl: the server (tokens in, tokens out), the replica (starts
servers) and the adapter (lives in the training ranks and ships their weights).
"""

import os
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import ray
import torch
from verl.utils.device import get_device_name
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from marl.config.policies import ranks_per_server
from marl.rollout.hf_server import HFServer
from marl.rollout.vllm_sglang import gpu_of, offset_rank
from marl.rollout.weights import Weights

LOCAL_SERVERS: dict[str, Any] = {}
"""Servers of this process, by name, where a run has no other (``resources.one_process``)."""


def server_name(config: Any, replica_rank: int) -> str:
    """Ray's actor names are global: they carry the run and the policy."""
    return f"hf-server_{config.custom['run_id']}_{config.custom['policy']}_{replica_rank}"


class HFReplica(RolloutReplica):
    """One server for the ranks of ``tensor_model_parallel_size`` training workers, beside the first of them."""

    def rollout_worker_use_gpu(self) -> bool:
        return get_device_name() != "cpu"

    async def launch_servers(self) -> None:
        device = get_device_name()
        node_id, visible = await self.workers[0].__ray_call__.remote(_placement)
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if device != "cpu":
            env |= {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        name = server_name(self.config, self.replica_rank)
        server = (
            ray.remote(HFServer)
            .options(
                name=name,
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False),
                runtime_env={"env_vars": env},
            )
            .remote(self.config, self.model_config, device)
        )
        await server.ready.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


def _placement(worker: Any) -> tuple[str, str]:
    """A worker's node, and the GPU that Ray gave it: it may see them all."""
    gpu = "" if get_device_name() == "cpu" else gpu_of(worker)
    return ray.get_runtime_context().get_node_id(), gpu


class HFServerAdapter(BaseRollout):
    """Lives in every training rank. The first rank of a replica ships the weights to its server, bucket by bucket."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = offset_rank(self.config)
        self.rollout_rank = int(os.environ["RANK"]) % ranks_per_server(self.config)
        self.server: Any = None

    async def resume(self, tags: list[str]) -> None:
        if self.rollout_rank == 0 and "weights" in tags:
            await self._server().wake_up.remote()

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        for bucket in self._buckets(weights):
            await self._server().load_weights.remote(bucket)
        if self.rollout_rank == 0:
            await self._server().finish_weights.remote(global_steps)

    async def update_adapter(
        self, name: str, weights: Iterable[tuple[str, torch.Tensor]] | None, scaling: float, global_steps: int
    ) -> None:
        """Ship one adapter; without weights, the step alone."""
        for bucket in self._buckets(weights or ()):
            await self._server().load_adapter.remote(bucket)
        if self.rollout_rank == 0:
            await self._server().finish_adapter.remote(name, scaling, global_steps)

    def _buckets(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Weights]:
        """Weights that the first rank of a replica sends at a time. Every rank iterates: gathering a parameter is a collective."""
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        pending = Weights()
        for name, tensor in weights:
            if self.rollout_rank == 0:
                pending[name] = tensor.detach().cpu()
                if sum(t.nbytes for t in pending.values()) >= limit:
                    yield pending
                    pending = Weights()
        if pending:
            yield pending

    def _server(self) -> Any:
        if self.server is None:  # it starts after the training ranks
            name = server_name(self.config, self.replica_rank)
            self.server = LOCAL_SERVERS[name] if name in LOCAL_SERVERS else ray.get_actor(name)
        return self.server


_ROLLOUT_REGISTRY[("hf", "async")] = "marl.rollout.hf.HFServerAdapter"
RolloutReplicaRegistry.register("hf", lambda: HFReplica)
