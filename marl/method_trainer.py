"""Trainers of methods beside reinforcement learning: examples are played or read, and every policy is updated on its own.

Checkpoints, data position, validation and dumps are those of :class:`marl.marl_trainer.MARLTrainer`.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from marl.checkpoint import seconds_of
from marl.config.errors import ConfigError
from marl.config.policies import longest_row, own_settings
from marl.controller.collection import with_turns
from marl.controller.method_data import Item, speakers_of
from marl.controller.task_stream import TaskStream
from marl.marl_trainer import MARLTrainer
from marl.methods import Method
from marl.methods.examples import Example, encoded, policy_rows, without_long_turns
from marl.methods.hybrid import Hybrid
from marl.report.run_summary import write_json
from marl.report.step_metrics import count_metrics, episode_metrics, policy_metrics
from marl.types import Episode, Metrics, PolicyName
from marl.utils.metrics import PhaseTimer, must_be_finite, prefixed


class MethodTrainer(MARLTrainer):
    """Plays episodes and trains on examples that its method makes of them."""

    def __init__(self, *parts: Any, method: Method, encoders: Mapping[PolicyName, Any], **options: Any) -> None:
        super().__init__(*parts, **options)
        self.method, self.encoders = method, encoders
        self.speakers = speakers_of(self.config)
        self.limits = {name: longest_row(own_settings(self.config, name).rollout) for name in encoders}

    async def step(self, tasks: Sequence[Any]) -> Metrics:
        phase, started = PhaseTimer(), time.monotonic()
        episodes, played = await self.play(tasks, phase)
        await self.free_servers()
        selection = self.method.of_episodes(episodes, self.speakers)
        examples = [encoded(example, self.encoders) for example in selection.examples]
        examples, too_long = without_long_turns(examples, self.limits)
        trained = await self.learn(examples, phase) | {"method/too_long": float(too_long)}
        synced = await phase.of("sync_weights", self.sync_weights())
        ended = time.monotonic()
        await self.dumps.write_played(episodes, self.step_number)
        turns = sum(len(episode.turns) for episode in episodes)
        effort = self.effort(turns, (started, ended))
        return played | selection.metrics | trained | synced | self.controller.metrics() | phase.metrics() | effort

    async def imitate(self, items: Sequence[Item]) -> Metrics:
        """A step on examples that were read."""
        phase, started = PhaseTimer(), time.monotonic()
        for group in self.groups:
            group.busy.clear()
        await self.free_servers()
        examples = [example for item in items for example in item]
        trained = await self.learn(examples, phase)
        synced = await phase.of("sync_weights", self.sync_weights())
        turns = sum(len(side) for example in examples for side in example.sides)
        return trained | synced | phase.metrics() | self.effort(turns, (started, time.monotonic()))

    async def play(self, tasks: Sequence[Any], phase: PhaseTimer) -> tuple[list[Episode], Metrics]:
        collection = await phase.of("collect", self.collect(tasks))
        scored = await phase.of("score", self.controller.score(collection.episodes, self.step_number))
        episodes = with_turns(scored, self.step_number)
        self._count(episodes)
        self.tables.show_training(self.tracking, scored, self.step_number)
        counts = count_metrics(collection.started, len(scored), collection.refused, collection.retried)
        return episodes, episode_metrics(scored, self.config.agents) | counts

    async def learn(self, examples: Sequence[Example], phase: PhaseTimer) -> Metrics:
        """Update every policy on its rows, and references that are due. Without an example nothing is updated."""
        rows = policy_rows(examples, self.packed)
        update = self.method.update(rows, self.policies)
        updates, _ = await phase.of("update", asyncio.gather(update, self.beside_update()))
        must_be_finite("policy", updates, self.step_number)
        await self.references.renew(self.step_number)
        return policy_metrics(updates, self.labels(updates)) | {"method/examples": float(len(examples))}

    async def free_servers(self) -> None:
        """Release the memory of the servers; the next sync wakes them, and wants them asleep."""
        await asyncio.gather(*(group.free_servers() for group in self.policies.values()))

    def labels(self, updates: Mapping[PolicyName, Metrics]) -> dict[PolicyName, list[str]]:
        known = self.policy_map.labels(self.trained_agents)
        return {name: list(known[name]) for name in updates}


class OpponentTrainer(MethodTrainer):
    """The servers hold the references' weights: the policies play their opponents, except in validations."""

    async def sync_weights(self) -> Metrics:
        async with self.exchanged():
            return await super().sync_weights()

    @asynccontextmanager
    async def exchanged(self) -> AsyncIterator[None]:
        """The policies have their references' weights meanwhile."""
        groups = self.references.groups.values()
        await asyncio.gather(*(group.exchange_reference() for group in groups))
        try:
            yield
        finally:
            await asyncio.gather(*(group.exchange_reference() for group in groups))

    async def validate(self) -> Metrics:
        """Measure the policies, and let the opponents return."""
        await self.free_servers()
        await super().sync_weights()
        metrics = await super().validate()
        await self.free_servers()
        await self.sync_weights()
        return metrics


class OfflineTrainer(MethodTrainer):
    """Trains on what was read: there are no servers, and a validation measures the loss on held-out examples."""

    def __init__(self, *parts: Any, held_out: Sequence[Item], **options: Any) -> None:
        super().__init__(*parts, **options)
        self.held_out = [example for item in held_out for example in item]
        texts = repr([[(turn.observation, turn.text) for side in e.sides for turn in side] for e in self.held_out])
        self.validation_id = hashlib.sha256(texts.encode()).hexdigest()[:12]

    async def step(self, tasks: Sequence[Any]) -> Metrics:
        return await self.imitate(tasks)

    async def sync_weights(self) -> Metrics:
        return {}

    async def validate(self) -> Metrics:
        """Each policy's loss on the held-out examples."""
        rows = policy_rows(self.held_out, self.packed)
        found = await self.method.evaluate(rows, self.policies)
        metrics = policy_metrics(found, self.labels(found))
        self.history[self.step_number] = metrics
        return prefixed(self._of_other_data() or "val", metrics)

    def summarise(self, baselines: Mapping[str, Metrics] | None = None) -> None:
        """Leave ``summary.json``, with the first and the last validation, where there are any."""
        self.report_folder.mkdir(parents=True, exist_ok=True)
        seconds = round(seconds_of(self), 2)
        counts = {"steps": self.step_number, "seconds": seconds, "seed": self.config.seed, "restarts": self.restarts}
        history = self.history if self.held_out else {}
        ends = {"before": history[min(history)], "after": history[max(history)]} if history else {}
        write_json(counts | ends, self.report_folder / "summary.json")


class HybridTrainer(MethodTrainer):
    """Imitates, then learns by playing."""

    tasks: Any
    method: Hybrid

    def __init__(self, *parts: Any, first: Any, **options: Any) -> None:
        """``first``: the loader of the examples that are imitated."""
        super().__init__(*parts, **options)
        self.tasks = TwoStreams(TaskStream(first, self.tasks.reads_ahead), self.tasks)

    async def step(self, tasks: Sequence[Any]) -> Metrics:
        imitates = not self.tasks.is_second
        if imitates:  # without turns, but not missing between the ledgers of steps that were played
            self.controller.ledger.begin(self.step_number, self.weights.proven)
        metrics = await (self.imitate(tasks) if imitates else MARLTrainer.step(self, tasks))
        if self.step_number >= self.method.config.sft_steps:
            self.tasks.is_second = True
        return metrics | {"method/imitates": float(imitates)}

    async def validate(self) -> Metrics:
        metrics = await super().validate()
        until = self.method.config.until
        if until is not None and self.history[self.step_number]["vote"] >= until:
            self.tasks.is_second = True
        return metrics


class TwoStreams:
    """Batches of one stream, and from some step on of another."""

    def __init__(self, first: TaskStream, second: TaskStream) -> None:
        self.first, self.second = first, second
        self.is_second = False

    @property
    def current(self) -> TaskStream:
        return self.second if self.is_second else self.first

    async def next(self) -> Sequence[Any]:
        return await self.current.next()

    async def read_ahead(self) -> None:
        await self.current.read_ahead()

    def state_dict(self) -> dict[str, Any]:
        """The position in every stream that was begun: a loader's state draws from the global generator where it was not."""
        streams = {"first": self.first, "second": self.second}
        return {"is_second": self.is_second} | {
            name: stream.state_dict() for name, stream in streams.items() if stream.begun
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "is_second" not in state:
            raise ConfigError(
                "method=hybrid: the checkpoint is of a run of another method, which read one stream of data; expected one of "
                "method=hybrid: keep the method that saved it, or begin anew with trainer.resume_mode=disable"
            )
        self.is_second = state["is_second"]
        for name in ("first", "second"):
            if name in state:
                getattr(self, name).load_state_dict(state[name])
