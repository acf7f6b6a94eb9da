"""Tasks from verl's datasets and sampler."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler

from marl.rewards import extractor, hider
from marl.types import Task


class TaskDataset(Dataset):
    """verl's dataset, row by row as tasks."""

    def __init__(self, rows: Dataset, split: str, answer_rule: str) -> None:
        self.rows, self.split, self.answer_rule = rows, split, answer_rule

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Task:
        return to_task(self.rows[index], f"{self.split}/{index}", self.answer_rule)


def to_task(row: Mapping[str, Any], id: str, answer_rule: str) -> Task:
    return Task(
        id=id,
        messages=list(row["raw_prompt"]),
        ground_truth=row["reward_model"]["ground_truth"],
        data_source=row["data_source"],
        extract=extractor(row["data_source"], answer_rule),
        extra=row["extra_info"] or {},
        hide=hider(row["data_source"], answer_rule),
    )


def train_loader(config: Any, tokenizer: Any) -> StatefulDataLoader:
    """Batches of ``data.train_batch_size`` tasks in an order that ``data.seed`` fixes; its state can be saved."""
    data = config.data
    rows = create_rl_dataset(data.train_files, data, tokenizer, None, True, data.train_max_samples)
    dataset = TaskDataset(rows, "train", config.controller.answer_rule.name)
    return StatefulDataLoader(
        dataset=dataset,
        batch_size=data.train_batch_size,
        sampler=create_rl_sampler(data, dataset),
        num_workers=data.dataloader_num_workers,
        drop_last=True,
        collate_fn=list,
    )


def validation_tasks(config: Any, tokenizer: Any) -> list[Task]:
    rows = create_rl_dataset(config.data.val_files, config.data, tokenizer, None, False, config.data.val_max_samples)
    dataset = TaskDataset(rows, "val", config.controller.answer_rule.name)
    return [dataset[index] for index in range(len(dataset))]
