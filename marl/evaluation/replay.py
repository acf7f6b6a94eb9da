"""``marl replay``: a recorded step is played again from the run's ledger, without servers, and compared with what the run left.

The newest checkpoint before the step is restored; the steps between are replayed too. What is compared: the step's metrics, its
dump (turns, scores, rewards, advantages), the checkpoint after it, and the digest of the weights with which the next step began.
"""

import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from marl.build import build
from marl.cluster.absent_servers import AbsentEndpoint, NotRecorded, NoWeightSync
from marl.cluster.session import session
from marl.cluster.weight_arrival import digest_seed
from marl.config.errors import ConfigError
from marl.config.external import naming_modules
from marl.config.identity import identity_of, key_of, refused
from marl.controller.endpoint_client import EndpointClient
from marl.controller.ledger import FOLDER, folder_of, read_step
from marl.controller.recorded_ledger import RecordedLedger
from marl.evaluation.recorded_run import (
    SHOWN,
    RecordedRun,
    comparable,
    different_files,
    different_lines,
    different_metrics,
)
from marl.marl_trainer import MARLTrainer
from marl.preflight.prepare import prepare
from marl.run_setup import Setup
from marl.types import Metrics
from marl.utils.seeding import derive_seed

DECIDE_SCORES = ("reward", "custom_reward_function", "controller.")
"""Beginnings of keys under which a score may be another: the reward function is then called again."""


@dataclass(frozen=True)
class LiveFrom:
    """The first turns that are generated, not replayed."""

    step: int
    round: int
    episode: tuple[str, int] | None = None
    """Task and sample; None for every episode."""
    agent: str | None = None

    @classmethod
    def of(cls, step: int, text: str) -> "LiveFrom":
        """``ROUND``, or ``TASK/SAMPLE/AGENT/ROUND`` for one episode. Raises ConfigError."""
        parts = text.rsplit("/", 3)
        if text.isdecimal():
            return cls(step, int(text))
        if len(parts) == 4 and parts[1].isdecimal() and parts[3].isdecimal():
            return cls(step, int(parts[3]), (parts[0], int(parts[1])), parts[2])
        raise ConfigError(
            f"from={text}: expected a round, as in from=2, or one turn, as in from=train/7/0/alice/2 (task, sample, agent, round)"
        )

    def __str__(self) -> str:
        episode = [] if self.episode is None else [*self.episode, self.agent]
        return "/".join(map(str, [*episode, self.round]))

    def leaves_out(self, run_seed: int, step: int, seed: int, turn: Mapping[str, Any]) -> bool:
        """True for a recorded turn that this one, or a later one, replaces."""
        if step != self.step or turn["round"] < self.round:
            return False
        if self.episode is None:
            return True
        later = turn["round"] > self.round or turn["agent"] == self.agent
        branch = [turn["branch"]] if turn["branch"] else []
        return later and seed == derive_seed(run_seed, step, *self.episode, turn["agent"], turn["round"], *branch)


@dataclass(frozen=True)
class Wanted:
    """The arguments of a replay."""

    run: Path
    step: int
    live: LiveFrom | None = None
    rescore: bool = False
    """Call the reward function again, even where its settings and its file are those of the run."""
    changes: tuple[str, ...] = ()


@dataclass
class Outcome:
    notes: list[str] = field(default_factory=list)
    differences: dict[str, list[str]] = field(default_factory=dict)
    """Differences by kind of comparison; an empty list where both are equal."""

    @property
    def equal(self) -> bool:
        return bool(self.differences) and not any(self.differences.values())


def replay(wanted: Wanted) -> Outcome:
    """Play, compare. Raises ConfigError for what was not recorded, or was played with other weights."""
    run = RecordedRun.at(wanted.run)
    origin, damaged = run.checkpoint_before(wanted.step)
    first = 1 if origin is None else int(origin.name.rsplit("_", 1)[1]) + 1
    run.must_hold(range(first, wanted.step + 1))
    outcome = Outcome([f"{name} is not used: {why}" for name, why in damaged.items()])
    outcome.notes.append(f"from {origin.name if origin else 'the first weights'}, steps {first} to {wanted.step}")
    with tempfile.TemporaryDirectory(prefix="marl_replay_") as scratch:
        with naming_modules(run.identity.get("modules")):
            config = run.config(wanted.changes)
            place(config, Path(scratch), origin)
            setup = prepare(config)
        ledger = ledger_of(run, wanted, setup.config, changes_of(run, setup.config, outcome))
        with session(setup):
            asyncio.run(play(setup, wanted, ledger, run, outcome))
    return outcome


def place(config: DictConfig, scratch: Path, origin: Path | None) -> None:
    """Let a run write into a folder of its own, and begin with a checkpoint."""
    with open_dict(config):
        config.trainer.default_local_dir = str(scratch)
        config.trainer.rollout_data_dir = str(scratch / "rollouts")
        config.trainer.validation_data_dir = None
        config.trainer.logger, config.baseline = [], []
        config.trainer.save_freq, config.trainer.save_final, config.trainer.save_in_background = -1, False, False
        config.trainer.resume_mode = "resume_path" if origin else "disable"
        config.trainer.resume_from_path, config.trainer.resume_changes = str(origin) if origin else None, []
        config.controller.num_workers, config.controller.ledger = 0, False


def changes_of(run: RecordedRun, config: DictConfig, outcome: Outcome) -> list[str]:
    """Keys whose values, or the contents of whose files, are other than the run's; they are noted."""
    now = json.loads(json.dumps(identity_of(config), default=str))
    found = refused(run.identity, now, ())
    outcome.notes += [
        f"other than in the run: {key}: {before} then, {after} now" for key, (before, after) in found.items()
    ]
    return [key_of(key) for key in found]


def ledger_of(run: RecordedRun, wanted: Wanted, config: DictConfig, changed: list[str]) -> RecordedLedger:
    rescored = wanted.rescore or any(key.startswith(DECIDE_SCORES) for key in changed)
    live = wanted.live
    if live is None:
        return RecordedLedger(run.folder, not rescored)

    def keeps(step: int, seed: int, turn: Mapping[str, Any]) -> bool:
        return not live.leaves_out(config.seed, step, seed, turn)

    records = read_step(folder_of(run.folder / FOLDER, wanted.step)).items()
    if all(keeps(wanted.step, seed, content) for (kind, seed, _), content in records if kind == "turn"):
        raise ConfigError(
            f"from={live}: {run.folder}/ledger holds no such turn of step {wanted.step}; expected one that it holds"
        )
    return RecordedLedger(run.folder, not rescored, keeps)


async def play(setup: Setup, wanted: Wanted, ledger: RecordedLedger, run: RecordedRun, outcome: Outcome) -> None:
    with ExitStack() as cleanup:
        trainer = await build(setup, cleanup, servers=wanted.live is not None)
        trainer.controller.ledger = ledger
        if wanted.live is None:
            without_servers(trainer)
        await trainer.resume()
        await trainer.sync_weights()
        metrics: Metrics = {}
        while trainer.step_number < wanted.step:
            trainer.step_number += 1
            await must_be_of_these_weights(trainer, ledger)
            try:
                metrics = await trainer.method.step(trainer, await trainer.tasks.next())
            except NotRecorded as error:
                raise ConfigError(f"step {trainer.step_number} of {wanted.run}: {error}") from None
        await compare(trainer, metrics, ledger, run, outcome)


def without_servers(trainer: MARLTrainer) -> None:
    trainer.weights = NoWeightSync(trainer.policies)  # type: ignore[assignment]
    for name, client in trainer.controller.clients.items():
        if isinstance(client, EndpointClient):
            client.server = AbsentEndpoint(name, client.server)  # type: ignore[assignment]


async def must_be_of_these_weights(trainer: MARLTrainer, ledger: RecordedLedger) -> None:
    """Raise ConfigError for a ledger whose turns other weights have generated than those that the trainer has now."""
    step = trainer.step_number
    ledger.open(step)
    different = await different_weights(trainer, ledger, step)
    if different:
        raise ConfigError(
            f"{ledger.root}/step_{step} was written with other weights than those before step {step} "
            f"({', '.join(different)}): it is another run's, or of a run that was resumed with other settings; expected the "
            "ledger of this run, whose steps follow one another from this checkpoint"
        )


async def different_weights(trainer: MARLTrainer, ledger: RecordedLedger, step: int) -> list[str]:
    """Policies whose weights before a step are other than the ledger's. Only ``hf`` servers' weights are recorded."""
    recorded, seed = ledger.weights(step) or {}, digest_seed(trainer.config.seed, step - 1)
    return [
        f"policy {name!r}"
        for name, digest in recorded.items()
        if name not in trainer.policies
        or json.loads(json.dumps(await trainer.policies[name].weight_digest(seed))) != digest
    ]


async def compare(
    trainer: MARLTrainer, metrics: Metrics, ledger: RecordedLedger, run: RecordedRun, outcome: Outcome
) -> None:
    """Note what differs from each of the run's records of the step."""
    step, found = trainer.step_number, outcome.differences
    recorded = run.metrics(step)
    if recorded is not None:
        found[f"metrics.jsonl ({len(recorded)} numbers)"] = different_metrics(recorded, comparable(metrics))
    await trainer.dumps.flush()
    if dump := run.dump(step):
        found[f"{dump.name} (turns, scores, rewards, advantages)"] = different_lines(
            dump, trainer.folder / "rollouts" / dump.name
        )
    if saved := run.checkpoint(step):
        await trainer.save(wait=False)
        await trainer.saving.flush()
        found[f"{saved.name} (weights, optimizers, learner)"] = different_files(saved, trainer.folder / saved.name)
    ledger.open(step + 1)
    if ledger.weights(step + 1):
        found[f"weights with which step {step + 1} began"] = await different_weights(trainer, ledger, step + 1)
    if not found:
        outcome.notes.append(
            f"the run left nothing to compare with: no line of step {step} in metrics.jsonl (trainer.logger=[file]), no dump "
            "(trainer.rollout_data_dir), no checkpoint after it (trainer.save_freq)"
        )


def lines_of(outcome: Outcome) -> list[str]:
    """The outcome as text."""
    lines = list(outcome.notes)
    for what, differences in outcome.differences.items():
        lines.append(f"{what}: {f'{len(differences)} differ' if differences else 'equal'}")
        lines += [f"  {difference}" for difference in differences[:SHOWN]]
        lines += [f"  … {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
    return [*lines, "equal" if outcome.equal else "different" if outcome.differences else "not compared"]
