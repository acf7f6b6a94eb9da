"""Checks of the files that a method reads in place of tasks."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from marl.config.errors import ConfigError
from marl.config.policies import longest_row, own_settings
from marl.config.sources import Source
from marl.controller.method_data import read_items, speakers_of, taken, within_limits
from marl.data.rows import BadRows, asked, file_list, places_in, read_table, rows_in, warn_of_shared
from marl.run_setup import Setup


def check_examples(setup: Setup, encoders: Mapping[str, Any]) -> None:
    """Raise ConfigError for files that a method cannot read, or learns nothing from."""
    config, method = setup.config, setup.method
    keys = ("method.files",) if method.imitates is not None else ("data.train_files", "data.val_files")
    limits = {name: longest_row(own_settings(config, name).rollout) for name in encoders}
    questions: dict[str, list[str]] = {}
    for key in keys:
        files = file_list(OmegaConf.select(config, key))
        items = read_items(method, method.imitates or Source.of(config), files, speakers_of(config), key, counts=True)
        items = within_limits(taken(items, config.data, key), encoders, limits, key)
        if key != "data.val_files" and len(items) < config.data.train_batch_size:
            raise ConfigError(
                f"data.train_batch_size={config.data.train_batch_size}: {key} give {len(items)} examples; expected at least one "
                "batch, use a smaller batch or more data"
            )
        questions[key] = [asked(item[0].sides[0][0].observation) for item in items]
    if method.imitates is None:
        warn_of_shared(*questions.values())


def check_demonstrations(setup: Setup, encoders: Mapping[str, Any]) -> None:
    """Raise ConfigError for data that a method that plays needs beside its tasks, and cannot use."""
    if setup.method.imitates is not None:
        check_examples(setup, encoders)
    if setup.method.plays_reference:
        check_answers(setup, encoders)


def check_answers(setup: Setup, encoders: Mapping[str, Any]) -> None:
    """Raise ConfigError for training rows without an answer that a trained agent could say: an opponent's turns are
    compared with it."""
    config, speakers = setup.config, speakers_of(setup.config)
    policies = dict.fromkeys((agent, policy) for agent, own in speakers.items() for policy in own)
    limits = {name: own_settings(config, name).rollout.response_length for _, name in policies}
    for file in file_list(config.data.train_files):
        bad = BadRows(file)
        for row, place in zip(rows_in(read_table(file), file), places_in(file), strict=False):
            try:
                for agent, policy in policies:
                    check_answer(setup, row, place, agent, (encoders[policy], limits[policy]))
            except ConfigError as error:
                bad.add(error)
        bad.refuse()


def check_answer(setup: Setup, row: Mapping[str, Any], where: str, agent: str, within: tuple[Any, int]) -> None:
    encoder, limit = within
    try:
        text = setup.method.answer_of(row, agent)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {error} for agent {agent!r}, the data's answer; method.answer_key names its column: extra_info.…, or "
            "reward_model.ground_truth, where data.columns puts it"
        ) from None
    asked = encoder.encode([{"role": "user", "content": ""}])
    if len(text.encode()) + len(encoder.reply("", asked)) <= limit:  # no token is shorter than a byte
        return
    length = len(encoder.reply(text, asked))
    if length > limit:
        raise ConfigError(
            f"{where}: the answer of agent {agent!r} has {length} tokens, data.max_response_length allows {limit}; raise it, or leave "
            "the row out"
        )
