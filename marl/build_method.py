"""Builds the data and the trainer of a run's method."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from marl.config.errors import ConfigError
from marl.config.policies import longest_row, own_settings, thinking_of
from marl.config.sources import Source
from marl.controller.chat import ChatEncoder
from marl.controller.method_data import ExampleDataset, Item, read_items, speakers_of, taken, within_limits
from marl.controller.tasks import loader_of
from marl.data.rows import file_list
from marl.methods.examples import Example
from marl.preflight.methods import leaves_steps_to_play
from marl.run_setup import Setup


@dataclass(frozen=True)
class Data:
    """A run's loader of tasks or examples, its validation tasks, and the number of steps."""

    loader: Any
    validation: list[Any]
    steps: int
    encoders: dict[str, ChatEncoder] = field(default_factory=dict)
    """Each policy's, where a method trains on examples."""
    held_out: list[Example] = field(default_factory=list)
    """Examples of ``data.val_files``, of a method that plays nothing."""
    first: Any = None
    """Loader of the examples that are imitated before tasks are played."""


def offline_data(setup: Setup, tokenizers: dict[str, Any]) -> Data:
    """Examples in place of tasks."""
    config, encoders = setup.config, encoders_of(setup.config, tokenizers)
    train, held_out = (items_of(setup, encoders, f"data.{key}") for key in ("train_files", "val_files"))
    if len(train) < config.data.train_batch_size:
        raise ConfigError(
            f"data.train_batch_size={config.data.train_batch_size}: data.train_files give {len(train)} examples; expected at least "
            "one batch, use a smaller batch or more data"
        )
    loader, steps = loader_of(config, train), config.trainer.total_training_steps
    steps = config.trainer.total_epochs * len(loader) if steps is None else steps
    examples = [example for index in range(len(held_out)) for example in held_out[index]]
    return Data(loader, [], steps, encoders, examples)


def method_options(setup: Setup, tokenizers: dict[str, Any], steps: int) -> dict[str, Any]:
    """Further data of a method that plays ``steps``; none for the learner's own."""
    method, config = setup.method, setup.config
    if method.learns and method.imitates is None:
        return {}
    encoders = encoders_of(config, tokenizers)
    if method.imitates is None:
        return {"encoders": encoders}
    leaves_steps_to_play(config.method.sft_steps, steps)
    return {"encoders": encoders, "first": loader_of(config, items_of(setup, encoders, "method.files"))}


def items_of(setup: Setup, encoders: dict[str, Any], key: str) -> ExampleDataset:
    config, method = setup.config, setup.method
    group, name = key.split(".")
    source = Source.of(config) if method.imitates is None else method.imitates
    items: list[Item] = read_items(method, source, file_list(config[group][name]), speakers_of(config), key)
    limits = {name: longest_row(own_settings(config, name).rollout) for name in encoders}
    items = taken(items, config.data, key)
    return ExampleDataset(within_limits(items, encoders, limits, key), encoders)


def encoders_of(config: DictConfig, tokenizers: dict[str, Any]) -> dict[str, ChatEncoder]:
    options = config.data.apply_chat_template_kwargs
    return {name: ChatEncoder(own, options, thinking_of(config, name)) for name, own in tokenizers.items()}
