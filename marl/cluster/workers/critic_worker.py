"""The FSDP worker of one critic: verl's training worker with a value model, and its losses at the positions where values are read."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import compute_value_loss
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.utils.torch_functional import masked_mean
from verl.workers.config import TrainingWorkerConfig

from marl.cluster.workers.dispatch import rows_by_rank
from marl.cluster.workers.policy_worker import EngineWorker, shards, timed
from marl.cluster.workers.shard_files import raise_lost, write
from marl.config.targets import built
from marl.platform.determinism import seed_generators
from marl.utils.garbage import collect_garbage, freeze_gc
from marl.utils.ragged import dense
from marl.utils.trees import copied, load_tree, save_tree


def critic_settings(config: DictConfig) -> Any:
    """verl's critic dataclass, with the engine's micro-batch sizes that verl's own trainer copies by hand."""
    settings = built(config)
    engine = settings.engine
    engine.use_dynamic_bsz = settings.use_dynamic_bsz
    engine.max_token_len_per_gpu = settings.ppo_max_token_len_per_gpu
    engine.infer_max_token_len_per_gpu = settings.ppo_max_token_len_per_gpu
    engine.micro_batch_size_per_gpu = settings.ppo_micro_batch_size_per_gpu
    engine.infer_micro_batch_size_per_gpu = settings.ppo_micro_batch_size_per_gpu
    return settings


class CriticWorker(EngineWorker):
    target: dict[str, torch.Tensor] | None = None
    """This rank's shards of the weights that the last renewal kept."""

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
        seed_generators(self.seed)  # the value head is drawn
        self.reset()
        self.set_loss_fn(partial(critic_loss, self.settings))
        freeze_gc()

    @register(dispatch_mode=rows_by_rank("train"), blocking=False)
    def compute_values(self, data: TensorDict) -> TensorDict | None:
        """``values``, ragged like ``read_at``."""
        started = time.perf_counter()
        output = self.infer_batch(data)
        if output is None:
            return None  # a rank whose outputs another one collects
        return tu.get_tensordict({"values": read_values(output["values"], data)}, {"metrics": timed(output, started)})

    @register(dispatch_mode=rows_by_rank("train"), blocking=False)
    def compute_targets(self, data: TensorDict) -> TensorDict | None:
        """The same under the target's weights."""
        with self._target_weights():
            return self.compute_values(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def renew_target(self) -> None:
        self.target = {name: shard.detach().clone() for name, shard in shards(self)}

    @contextmanager
    def _target_weights(self) -> Iterator[None]:
        self._exchange_target()
        try:
            yield
        finally:
            self._exchange_target()

    def _exchange_target(self) -> None:
        """Each rank its own shards: no other weight is moved, and no second model is held."""
        if self.target is None:
            raise ValueError("the critic has no target yet: renew_target keeps one")
        with torch.no_grad():
            for name, shard in shards(self):
                current = shard.clone()
                shard.copy_(self.target[name])
                self.target[name].copy_(current)

    @register(dispatch_mode=rows_by_rank("train"), blocking=False)
    def update_critic(self, data: TensorDict) -> TensorDict | None:
        raise_lost()
        started = time.perf_counter()
        output = self.train_mini_batch(data)
        collect_garbage()
        return None if output is None else tu.get_tensordict({}, {"metrics": timed(output, started)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, local_path: str, beside: bool = True) -> None:
        self.engine.checkpoint_manager.beside = beside
        super().save_checkpoint(local_path)
        jobs = self.engine.checkpoint_manager.taken()
        if self.target is not None:
            target = copied(self.target) if beside else self.target
            jobs.append(partial(save_tree, target, self._target_file(local_path)))
        write(local_path, self.rank, jobs, beside)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(local_path, *args, **kwargs)
        if self._target_file(local_path).is_file():
            self.target = load_tree(self._target_file(local_path))

    def _target_file(self, folder: str) -> Path:
        return Path(folder) / f"target_world_size_{self.world_size}_rank_{self.rank}.safetensors"


def read_values(values: torch.Tensor, rows: TensorDict) -> torch.Tensor:
    """Cut the jagged values of whole rows down to those that are read, ragged like ``read_at``."""
    read_at = rows["read_at"]
    counts = read_at.offsets().diff()
    starts = torch.repeat_interleave(rows["input_ids"].offsets()[:-1], counts)
    return torch.nested.nested_tensor_from_jagged(
        values.values()[starts + read_at.values()].float(), offsets=read_at.offsets()
    )


def critic_loss(config: Any, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None):
    """Linear loss for rows with ``gradients``, PPO's clipped value loss for the others."""
    if "gradients" in data:
        return linear_loss(model_output, data)
    return value_loss(config, model_output, data, dp_group)


def linear_loss(model_output: dict[str, torch.Tensor], data: TensorDict):
    """sum_t g_t V_t, where g_t are the derivatives of a loss by the values: its gradient is that loss's, at these weights.

    A sum over the whole batch, however ranks and micro-batches cut it: verl takes the mean over ``dp_size`` ranks.
    """
    values = read_values(model_output["values"], data).values()
    values = torch.where(data["value_mask"].values().bool(), values, 0.0)
    loss = (data["gradients"].values() * values).sum() * data["dp_size"]
    return loss, {}


def value_loss(config: Any, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None):
    """verl's value loss (``critic.cliprange_value``, ``critic.loss_agg_mode``) on values, returns and mask of our rows.

    Normalised over the whole mini-batch, so that the gradient does not depend on how micro-batches cut it.
    """
    predicted = dense(read_values(model_output["values"], data))
    mask = dense(data["value_mask"]).bool()
    loss, clipped_share = compute_value_loss(
        vpreds=predicted,
        values=dense(data["values"]),
        returns=dense(data["returns"]),
        response_mask=mask,
        cliprange_value=config.cliprange_value,
        loss_agg_mode=config.loss_agg_mode,
        dp_size=data["dp_size"],
        batch_num_tokens=data["batch_num_tokens"],
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=config.loss_scale_factor,
    )
    share = mask.sum() * data["dp_size"] / max(data["batch_num_tokens"], 1)  # verl takes the mean over ranks
    parts = {
        "vf_loss": loss,
        "vf_clipfrac": clipped_share.detach() * share,
        "vpred_mean": masked_mean(predicted, mask).detach() * share,
    }
    return loss, {name: Metric(value=part, aggregation=AggregationType.SUM) for name, part in parts.items()}
