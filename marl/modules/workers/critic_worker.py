"""The FSDP worker of one critic: verl's training worker with a value model."""

import time
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig

from marl.modules.critics.loss import read_values, value_loss
from marl.modules.workers.policy_worker import EngineWorker, timed
from marl.utils.memory import settle


def critic_settings(config: DictConfig) -> Any:
    """verl's critic dataclass, with the engine's micro-batch sizes that verl's own trainer copies by hand."""
    settings = omega_conf_to_dataclass(config)
    engine = settings.engine
    engine.use_dynamic_bsz = settings.use_dynamic_bsz
    engine.max_token_len_per_gpu = settings.ppo_max_token_len_per_gpu
    engine.infer_max_token_len_per_gpu = settings.ppo_max_token_len_per_gpu
    engine.micro_batch_size_per_gpu = settings.ppo_micro_batch_size_per_gpu
    engine.infer_micro_batch_size_per_gpu = settings.ppo_micro_batch_size_per_gpu
    return settings


class CriticWorker(EngineWorker):
    def __init__(self, config: DictConfig, seed: int) -> None:
        self.settings, self.seed = critic_settings(config), seed
        super().__init__(
            TrainingWorkerConfig(
                model_type="value_model",
                model_config=self.settings.model,
                engine_config=self.settings.engine,
                optimizer_config=self.settings.optim,
                checkpoint_config=self.settings.checkpoint,
                profiler_config=None,
            )
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        torch.manual_seed(self.seed)  # the value head is drawn
        self.reset()
        self.set_loss_fn(partial(value_loss, self.settings))
        settle()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def compute_values(self, data: TensorDict) -> TensorDict | None:
        """``values``, ragged like ``read_at``."""
        started = time.perf_counter()
        output = self.infer_batch(data)
        if output is None:
            return None  # a rank whose outputs another one collects
        return tu.get_tensordict({"values": read_values(output["values"], data)}, {"metrics": timed(output, started)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def update_critic(self, data: TensorDict) -> TensorDict | None:
        started = time.perf_counter()
        output = self.train_mini_batch(data)
        return None if output is None else tu.get_tensordict({}, {"metrics": timed(output, started)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(*args, **kwargs)
