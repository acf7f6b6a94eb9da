"""``marl run-one``: play one conversation and print it, so that a runner and its prompts can be debugged in seconds.

marl run-one runner=summary +agents.editor.role="Merge." question="What is 2+2?" answers='[4,5,"so: 4"]'
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from marl import main as marl_main
from marl.config.errors import ConfigError, resolve
from marl.config.overrides import hydra_overrides
from marl.config.rules.agents import templates_can_be_filled
from marl.config.values import check_values
from marl.controller.scores import priced
from marl.report import dump
from marl.rewards import AnswerRules, Reward, answer_rules, build_reward, check_extractors
from marl.run_setup import make_runner
from marl.runners import Generate, RecordedAnswers, instructions_of, scripted
from marl.runners.episode import Judge
from marl.types import Episode, Score, Task, Turn
from marl.utils.quiet import quiet
from marl.utils.secret_masking import masked_logs


class Model(Enum):
    scripted = "scripted"
    """No model: what agents say is ``answers``, one after another, or names the agent and the round."""
    tiny = "tiny"
    """The quick start's model, on its problems."""
    own = "own"
    """The configuration's models and data, in this process."""


@dataclass
class Options:
    """Arguments of the command that are not configuration keys."""

    model: Model = Model.scripted
    question: str | None = None
    """The question; null: 2 + 2 for a scripted model, the question of ``row`` for any other."""
    truth: str | None = None
    """The right answer to the question; null for 4 with a scripted model, and for not known with another one."""
    answers: list[str] = field(default_factory=list)
    row: int = 0
    """With another model: index of the validation task, whose question ``question`` replaces."""
    dump: str | None = None
    """A file of trainer.rollout_data_dir or trainer.validation_data_dir, whose episode is played again from its answers."""
    episode: int = 0
    """Index of the episode within ``dump``."""
    instead: list[str] = field(default_factory=list)
    """Answers that replace recorded ones, ``agent/round=text``; the model gives the later turns."""


def main(arguments: Sequence[str]) -> int:
    return marl_main.exit_code(lambda: asyncio.run(run(arguments, Console())))


async def run(arguments: Sequence[str], console: Console) -> Episode:
    """Raises ConfigError for what cannot be played."""
    options, where, overrides = parsed(arguments)
    config = composed(where, overrides)
    with quiet(bool(config.verbose)), masked_logs():
        async with stage(options, config) as (task, generate, judge):
            episode = await play(options, config, task, generate, judge)
            for turn in episode.turns:
                if turn.score is None and turn.answers and episode.task.ground_truth != UNKNOWN:
                    turn.score = await judge(episode.task, turn)
    show(episode, console)
    return episode


def parsed(arguments: Sequence[str]) -> tuple[Options, argparse.Namespace, list[str]]:
    """The command's own options, the configuration's location, and its overrides."""
    parser = argparse.ArgumentParser(prog="marl run-one", allow_abbrev=False)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    where, words = parser.parse_known_args(list(arguments))
    own = [word for word in words if word.partition("=")[0] in Options.__dataclass_fields__]
    rest = [word for word in words if word not in own]
    if flag := next((word for word in rest if word.startswith("-")), None):
        raise ConfigError(f"{flag}: marl run-one has no such option; expected --config-name, --config-dir or key=value")
    options = options_of(own)
    where.config_name = where.config_name or ("quickstart" if options.model is Model.tiny else "marl")
    if options.model is not Model.scripted:
        rest.append("resources.one_process=true")
    return options, where, rest


TEXTS = ("question", "truth", "dump")
"""Taken as they are: as YAML, a text with a colon would be something else."""
LISTS = ("answers", "instead")


def options_of(words: Sequence[str]) -> Options:
    """Raises ConfigError for a value that an option cannot have, and for options of which one would be ignored."""
    given = [word.partition("=") for word in words]
    others = OmegaConf.from_dotlist(
        [word for word, (key, *_) in zip(words, given, strict=True) if key not in TEXTS + LISTS]
    )
    own = {key: unquoted(text) if key in TEXTS else listed(key, text) for key, _, text in given if key in TEXTS + LISTS}
    options: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Options), others))
    for key, value in own.items():  # as they are: `${…}` in a text is no interpolation
        setattr(options, key, value)
    for key in ("row", "episode"):
        if getattr(options, key) < 0:
            raise ConfigError(f"{key}={getattr(options, key)}: expected a number from 0 on")
    for key in ("question", "truth") if options.dump else ():
        if getattr(options, key) is not None:
            raise ConfigError(
                f"{key}={getattr(options, key)}: dump={options.dump} holds its own; leave one of them out"
            )
    if options.answers and options.model is not Model.scripted:
        raise ConfigError(f"answers={options.answers}: model={options.model.name} gives its own; leave one of them out")
    return options  # type: ignore[no-any-return]


def listed(key: str, text: str) -> list[str]:
    """A list of texts, each as it was typed: to YAML 4.10 would be a number, and yes a truth value. Raises ConfigError."""
    with suppress(yaml.YAMLError):
        found = yaml.load(text, yaml.BaseLoader)
        if isinstance(found, list) and all(isinstance(item, str) for item in found):
            return found
    raise ConfigError(f"{key}={text}: expected a list of texts, as in {key}=\"['so: 4','5']\"")


def unquoted(text: str) -> str | None:
    """A text without its command-line quotes."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return None if text == "null" else text


def composed(where: argparse.Namespace, overrides: list[str]) -> DictConfig:
    """A configuration of ours, or of the user's folder, which may build on ours."""
    if where.config_dir is None:
        with initialize_config_module("marl.configs", version_base="1.3"):
            return compose(where.config_name, overrides=hydra_overrides(overrides))
    ours = "hydra.searchpath=[pkg://marl.configs]"
    with initialize_config_dir(str(Path(where.config_dir).resolve()), version_base="1.3"):
        return compose(where.config_name, overrides=hydra_overrides([ours, *overrides]))


@asynccontextmanager
async def stage(options: Options, config: DictConfig) -> AsyncIterator[tuple[Task, Generate, Judge]]:
    """The task, the generate function and the judge."""
    if options.model is Model.scripted:
        resolve(config)
        check_values(config)
        templates_can_be_filled(config)
        check_extractors(config)
        rules, source = answer_rules(config), "question"
        question = [{"role": "user", "content": "What is 2 + 2?" if options.question is None else options.question}]
        truth = "4" if options.truth is None else options.truth
        task = Task("question", question, truth, source, rules.extractor(source, truth), {}, rules.hider(source, truth))
        script = scripted.listed(options.answers) if options.answers else scripted.numbered
        with ExitStack() as cleanup:
            yield task, scripted.scripted(script), judge_of(config, build_reward(config, cleanup))
        return
    if options.model is Model.tiny:
        from marl.quickstart.assets import ensure_for

        ensure_for(config)
    # heavy: a scripted conversation needs none of them
    from marl.build import build
    from marl.cluster.session import session
    from marl.preflight.prepare import prepare

    config.trainer.logger, config.controller.ledger = [], False
    setup = prepare(config)
    with session(setup), ExitStack() as cleanup:
        trainer = await build(setup, cleanup)
        await trainer.sync_weights()
        controller = trainer.controller
        if options.row >= len(trainer.validation):
            raise ConfigError(f"row={options.row}: data.val_files hold {len(trainer.validation)} rows, counted from 0")
        task, key = (
            asked(options, trainer.validation[options.row], answer_rules(config)),
            (config.seed, "run-one", options.row),
        )
        yield task, controller.generate(task, key, step=0, validate=True), controller.judge


def judge_of(config: DictConfig, reward: Reward) -> Judge:
    """Scores as in training."""

    async def judge(task: Task, turn: Turn) -> Score:
        score = await reward.judge_or_fail(task, turn.text, config.judge.failure_score)
        limit = config.actor_rollout_ref.rollout.response_length
        return score if score.failure is not None else priced(score, turn, config.judge, limit)

    return judge


def asked(options: Options, row: Task, rules: AnswerRules) -> Task:
    """A validation task, or the question of the command line in its place: to all agents, after the row's system prompt."""
    if options.truth is not None:
        of = row.data_source, options.truth
        row = replace(row, ground_truth=options.truth, extract=rules.extractor(*of), hide=rules.hider(*of))
    if options.question is None:
        return row
    system = [message for message in row.messages if message["role"] == "system"]
    extra = {key: value for key, value in row.extra.items() if key != "agent_prompts"}
    question = [*system, {"role": "user", "content": options.question}]
    return replace(row, id="question", messages=question, ground_truth=options.truth or UNKNOWN, extra=extra)


UNKNOWN = ""
"""The ground truth of a question whose answer is unknown."""


async def play(options: Options, config: DictConfig, task: Task, generate: Generate, judge: Judge) -> Episode:
    agents, seed, accuracy = list(config.agents), config.seed, {}
    if options.dump:
        record = recorded(options.dump, options.episode, config)
        task, agents, seed, accuracy = record.task, record.agents, record.seed, record.accuracy
        generate = RecordedAnswers(record, generate if options.instead else None, instead(options, record))
    roles = instructions_of(config.agents)
    try:
        runner = make_runner(config)
        runner.check(agents)
        return await scripted.play(
            runner, task, agents, generate, judge=judge, roles=roles, seed=seed, accuracy=accuracy
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def recorded(path: str, number: int, config: DictConfig) -> Episode:
    """An episode of a dump. Raises ConfigError for another file, and for one that holds fewer."""
    if not Path(path).is_file():
        raise ConfigError(f"dump={path}: no such file; expected <step>.jsonl of trainer.rollout_data_dir")
    rules = answer_rules(config)
    try:
        record = next(islice(dump.read(path, rules.extractor, rules.hider), number, None), None)
    except ValueError as error:
        raise ConfigError(f"dump={error}") from None
    if record is None:
        raise ConfigError(f"episode={number}: {path} holds fewer episodes, counted from 0")
    return record


def instead(options: Options, record: Episode) -> dict[tuple[str, int, int], Turn | None]:
    turns = {f"{turn.agent}/{turn.round}": turn for turn in record.path}
    changed: dict[tuple[str, int, int], Turn | None] = {}
    for word in options.instead:
        where, _, text = word.partition("=")
        if where not in turns:
            raise ConfigError(f"instead={word}: expected agent/round=text, with one of {', '.join(turns)}")
        was = turns[where]
        changed[was.place] = Turn(was.agent, was.round, was.observation, text)
    return changed


def show(episode: Episode, console: Console) -> None:
    """Every turn: the agent's observation, with the parts it had seen before dimmed, and its response."""
    for turn in episode.turns:
        marks = (
            [f"branch {turn.branch}"] * bool(turn.branch)
            + ["not kept"] * (not turn.kept)
            + ["no answer"] * (not turn.answers)
        )
        console.rule(Text(" · ".join([f"round {turn.round}", turn.agent, *marks]), style="bold"), align="left")
        before = max(
            (len(t.observation) + 1 for t in episode.trajectory(turn.agent) if t.round < turn.round), default=0
        )
        for index, message in enumerate(turn.observation):
            console.print(Text(f"{message['role']}: {message['content']}", style="dim" if index < before else ""))
        if turn.thought is not None:
            console.print(Text(f"{turn.agent} thought: {turn.thought}", style="dim"))
        failed = f", {fault}" if (fault := fault_of(turn.score)) else ""
        score = f"   [{turn.score.value:g}{failed}]" if turn.score else ""
        console.print(Text(f"{turn.agent} ⟶ {turn.text}{score}", style="green"))
    console.rule()
    counts = "".join(f"  {name}: {count}" for name, count in episode.counts.items())
    if episode.failure is not None:
        console.print(Text(f"ended early ({episode.failure}): {episode.failure_message}", style="red"))
    right = "" if episode.task.ground_truth == UNKNOWN else f"   right: {episode.task.ground_truth}"
    console.print(Text(f"the team's answer: {episode.answer}{right}{counts}", style="bold"))


def fault_of(score: Score | None) -> str:
    """Why an answer could not be judged; empty where it was."""
    judged = score.extra.get("math_verify", "right") if score else "right"
    return (score.failure if score else None) or (f"math-verify: {judged}" if judged not in ("right", "wrong") else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
