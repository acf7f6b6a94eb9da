"""The FSDP worker of one base model and the adapters of several policies (``sharing=lora``)."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_torch_device
from verl.workers.utils.losses import ppo_loss

from marl.cluster.workers.lora import collected, save_adapter, unwrapped
from marl.cluster.workers.policy_loss import policy_loss
from marl.cluster.workers.policy_worker import EngineWorker, PolicyWorker
from marl.cluster.workers.shard_files import write
from marl.cluster.workers.whole_model import drop_tied, shell_of, write_into
from marl.config.targets import built
from marl.modules.adapters import first_weights, lora_arguments
from marl.platform.adapters import ADAPTED, AdapterEngine, AdapterSpec, merged, of_adapters, unnamed, whole
from marl.utils.trees import load_tree, on_host, save_tree
from marl.utils.weight_digest import Digest, digest_of


def spec_of(own: DictConfig, seed: int) -> AdapterSpec:
    """An adapter as a policy's ``actor_rollout_ref`` describes it."""
    return AdapterSpec(lora_arguments(own.model), built(own.actor).optim, seed, first_weights(own.model))


def loss_of(own: DictConfig) -> Any:
    """A policy's loss, from its ``actor_rollout_ref``."""
    return partial(policy_loss, partial(ppo_loss, config=built(own.actor)))


class AdapterEngineWorker(EngineWorker):
    engine: AdapterEngine

    def __init__(self, config: Any, adapters: Mapping[str, AdapterSpec]) -> None:
        super().__init__(replace(config, model_type=ADAPTED))
        self.engine.adapters = adapters


class AdapterWorker(PolicyWorker):
    """Each call is about one adapter, which rows name in ``adapter`` and other calls in their first argument."""

    def __init__(
        self, config: DictConfig, role: str, policies: Mapping[str, DictConfig], seeds: Mapping[str, int]
    ) -> None:
        """``policies``: every policy's ``actor_rollout_ref``; ``config`` is the first one's, and holds for base and server."""
        super().__init__(config, role)
        self.specs = {name: spec_of(own, seeds[name]) for name, own in policies.items()}
        self.losses = {name: loss_of(own) for name, own in policies.items()}
        self.actor_worker_cls = partial(AdapterEngineWorker, adapters=self.specs)
        self.base: dict[str, torch.Tensor] | None = None
        """The base's weights in the first rank's host memory once it was saved: it never changes."""
        self.base_is_served = config.rollout.name == "vllm"  # whose servers load it from its path

    @property
    def engine(self) -> AdapterEngine:
        assert self.actor is not None
        return self.actor.engine  # type: ignore[return-value]

    def _use(self, rows: TensorDict) -> None:
        name = tu.get(rows, "adapter")
        self.engine.use(name)
        self.actor.set_loss_fn(self.losses[name])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def sync_adapter(self, name: str, step: int, changed: bool) -> tuple[float, float]:
        """Ship an adapter's weights, where they have changed, and the step that they are of; before the first one the base's.
        Returns its seconds and when it ended."""
        started = time.perf_counter()
        if self.config.rollout.free_cache_engine:
            get_torch_device().empty_cache()  # of what the update's activations took
            await self.rollout.resume(tags=["weights"])
        if not self.base_is_served:
            await self.rollout.update_weights(self.engine.base_weights(), global_steps=step)
            self.base_is_served = True
        weights = self.engine.adapter_weights(name) if changed else None
        await self.rollout.update_adapter(name, weights, self.specs[name].scaling, step)
        if self.config.rollout.free_cache_engine:
            get_torch_device().empty_cache()
            await asyncio.to_thread(torch.distributed.barrier)  # a server's first rank wakes its others
            await self.rollout.resume(tags=["kv_cache"])
        return time.perf_counter() - started, time.time()

    def _digest(self, seed: int, adapter: str | None = None, with_base: bool = True) -> Digest:
        """This rank's share of the digest of the base, of an adapter, or of both, as servers should hold them."""
        parts = [self.engine.base_shards()] if with_base else []
        parts += [self.engine.adapter_shards(adapter)] if adapter else []
        return digest_of(chain.from_iterable(parts), getattr(torch, self.config.rollout.dtype), seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_adapter(self, name: str, folder: str, beside: bool = True) -> None:
        """Write what a resumed run needs of one adapter, and ``lora_adapter`` in PEFT's form."""
        manager = self.engine.checkpoint_manager
        state = on_host({**self.engine.adapter_state(name), "random": manager.get_rng_state()})  # copies already
        jobs = [partial(save_tree, state, self._adapter_file(folder))]
        parts = ((unnamed(key, name), whole(p)) for key, p in of_adapters(self.engine.module, name))
        weights, config = collected(parts, self.rank), self.engine.module.peft_config[name]
        exports: list[Callable[[], Any]] = [partial(save_adapter, config, weights, Path(folder) / "lora_adapter")]
        if "hf_model" in manager.checkpoint_save_contents:
            exports += self._exports_of_whole_model(name, Path(folder) / "huggingface")
        write(folder, self.rank, jobs + (exports if self.rank == 0 else []), beside)

    def _exports_of_whole_model(self, name: str, folder: Path) -> list[Callable[[], Any]]:
        """Writers of the base with the adapter merged in, and of the tokenizer; called by every rank. Adapters are merged as they
        are written, into the one copy of the base that all saves share."""
        engine, settings = self.engine, self.engine.model_config
        if self.base is None:
            self.base = collected(engine.base_weights(), self.rank)
        base, scaling = self.base, self.specs[name].scaling
        added = collected(engine.adapter_weights(name), self.rank)
        if self.rank > 0:
            return []
        shell = shell_of(unwrapped(engine).config, folder, settings.trust_remote_code)
        written = dict(base)
        drop_tied(shell, written)

        def write_merged() -> None:
            write_into(shell, folder, dict(merged(written.items(), added, scaling)))

        return [write_merged, partial(settings.get_processor().save_pretrained, folder)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_adapter(self, name: str, folder: str) -> None:
        file = self._adapter_file(folder)
        if not file.is_file():
            raise ValueError(
                f"{folder} holds no {file.name}: its adapters were saved by another number of ranks, and this run has "
                f"{self.world_size}; resume with as many ranks as before"
            )
        state = load_tree(file)
        self.engine.load_adapter_state(name, state)
        self.engine.checkpoint_manager.load_rng_state(state["random"])

    def _adapter_file(self, folder: str) -> Path:
        return Path(folder) / f"adapter_world_size_{self.world_size}_rank_{self.rank}.safetensors"
