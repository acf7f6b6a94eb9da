"""Tasks from verl's datasets and sampler, and the stream of a run's batches."""

import asyncio
import copy
import logging
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
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


Read = tuple[Sequence[Task] | None, Exception | None]
"""A batch, or the error raised while reading it."""


class TaskStream:
    """Endless batches of a loader. The next one can be read in the background."""

    def __init__(self, loader: StatefulDataLoader, reads_ahead: bool = True) -> None:
        # a loader's own processes read ahead already, and may not be forked from a thread
        self.loader, self.reads_ahead = loader, reads_ahead and not loader.num_workers
        self._restart()

    def _restart(self) -> None:
        self.batches = chain.from_iterable(repeat(self.loader))
        self.begun = False
        self.ahead: Read | None = None
        self.before: dict[str, Any] = {}
        """The loader's state before the batch that is read ahead."""

    async def next(self) -> Sequence[Task]:
        self.begun = True
        (tasks, error), self.ahead = self.ahead or self._read(), None
        if error is not None:
            raise error
        assert tasks is not None
        return tasks

    async def read_ahead(self) -> None:
        """Read the next batch in a thread. Errors are raised by :meth:`next`."""
        if self.reads_ahead and self.begun and self.ahead is None:
            self.before = copy.deepcopy(self.loader.state_dict())
            self.ahead = await asyncio.to_thread(self._read)

    def _read(self) -> Read:
        try:
            return next(self.batches), None
        except Exception as error:
            return None, error

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch returned by :meth:`next`."""
        return self.loader.state_dict() if self.ahead is None else self.before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch of :meth:`state_dict`."""
        self.loader.load_state_dict(state)
        self._restart()
        self.begun = True
        self.batches = chain(iter(self.loader), self.batches)
