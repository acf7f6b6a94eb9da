"""Tasks from verl's datasets and sampler."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler

from marl.rewards import AnswerRules, answer_rules
from marl.types import Task
from marl.utils.seeding import derive_seed

logger = logging.getLogger(__name__)


class TaskDataset(Dataset):
    """verl's dataset, row by row as tasks."""

    def __init__(self, rows: Dataset, split: str, rules: AnswerRules) -> None:
        self.rows, self.split, self.rules = rows, split, rules

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Task:
        return to_task(self.rows[index], f"{self.split}/{index}", self.rules)


def to_task(row: Mapping[str, Any], id: str, rules: AnswerRules) -> Task:
    source, truth = row["data_source"], row["reward_model"]["ground_truth"]
    return Task(
        id=id,
        messages=list(row["raw_prompt"]),
        ground_truth=truth,
        data_source=source,
        extract=rules.extractor(source, truth),
        extra=row["extra_info"] or {},
        hide=rules.hider(source, truth),
    )


def train_loader(config: Any, tokenizer: Any) -> StatefulDataLoader:
    """Batches of training tasks."""
    data = config.data
    rows = create_rl_dataset(data.train_files, data, tokenizer, None, True, data.train_max_samples)
    return loader_of(config, TaskDataset(rows, "train", answer_rules(config)))


def loader_of(config: Any, dataset: Any) -> StatefulDataLoader:
    """Batches of ``data.train_batch_size`` items in an order that ``data.seed`` fixes; its state can be saved. Each of its iterators
    draws a number as it is made: from a generator of their own, since a resumed run makes others at other moments."""
    data = config.data
    if not config.trainer.val_only:
        warn_of_rest(data, len(dataset), config.trainer.total_training_steps)
    return StatefulDataLoader(
        dataset=dataset,
        batch_size=data.train_batch_size,
        sampler=create_rl_sampler(data, dataset),
        num_workers=data.dataloader_num_workers,
        drop_last=True,
        collate_fn=list,
        generator=torch.Generator().manual_seed(derive_seed(config.seed, "workers of the data loader")),
    )


def warn_of_rest(data: Any, rows: int, steps: int | None) -> None:
    """Name the rows that fill no batch."""
    batches, rest = divmod(rows, data.train_batch_size)
    if rest and (steps is None or steps > batches):
        logger.warning(
            "data.train_batch_size=%d: an epoch trains %d of %d rows and leaves out %d, %s",
            data.train_batch_size, rows - rest, rows, rest,
            "others each time" if data.shuffle else "always the last ones (data.shuffle=false)",
        )  # fmt: skip


def validation_tasks(config: Any, tokenizer: Any) -> list[Task]:
    rows = create_rl_dataset(config.data.val_files, config.data, tokenizer, None, False, config.data.val_max_samples)
    dataset = TaskDataset(rows, "val", answer_rules(config))
    return [dataset[index] for index in range(len(dataset))]
