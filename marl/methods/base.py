"""A method makes examples of rows or episodes, and updates every policy on its own.

It sees turns, ragged rows and the protocol of worker groups; never Ray, a server, a tokenizer or a file. The default, ``rl``,
leaves everything to the learner.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from marl.config.sources import Source
from marl.methods.examples import Example, Selection, Speakers
from marl.types import AgentId, Episode, Metrics, PolicyGroup, PolicyName
from marl.utils.metrics import PhaseTimer
from marl.utils.numbers import bounded, count
from marl.utils.registry import Registry

if TYPE_CHECKING:
    from tensordict import TensorDict

Rows = Mapping[PolicyName, "TensorDict"]
Policies = Mapping[PolicyName, PolicyGroup]


class Method:
    """Override :meth:`of_row` or :meth:`of_episodes`, :meth:`gradients` and :meth:`measure`. Facts are class attributes."""

    learns: ClassVar[bool] = False
    """The learner updates the policies, in some steps at least."""
    compares: bool = True
    """Its derivatives depend on ``log_probs`` of the present weights, which need a forward pass before the update."""
    sources: ClassVar[tuple[Source, ...]] = tuple(Source)
    """Sources that it can take."""
    plays_reference: ClassVar[bool] = False
    """Its servers hold the references' weights: the policies play their opponents."""
    joins_agents: ClassVar[bool] = False
    """Its loss is of all agents' log-probs together."""

    @dataclass
    class Config:
        name: str
        source: Source = Source.play
        """Source of examples: rows of ``data.train_files``, episodes that another run dumped there, or this run's play."""
        epochs: int = bounded(1, count(1, 1000))
        """Updates on each step's examples."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def offline(self) -> bool:
        """True if nothing is played: there are no servers."""
        return self.config.source is not Source.play

    @property
    def reads_turn_scores(self) -> bool:
        """True if it compares single turns by their own scores, of which the penalty of a long answer is a part."""
        return False

    @property
    def reads_reference(self) -> bool:
        return bool(getattr(self.config, "reference", False))

    @property
    def imitates(self) -> Source | None:
        """Source of what is imitated before the learner takes over; None for a method without such a phase."""
        return None

    @property
    def columns(self) -> list[tuple[str, ...]]:
        """Columns of a row that are needed: one of each tuple."""
        return []

    def of_row(self, row: Mapping[str, Any], speakers: Speakers) -> list[Example]:
        """Examples of a row of a file; none where it teaches nothing. Raises ValueError for a row that cannot be used."""
        raise NotImplementedError

    def answer_of(self, row: Mapping[str, Any], agent: AgentId) -> str:
        """The data's answer for an agent, of a method that plays its reference. Raises ValueError where there is none."""
        raise NotImplementedError

    def of_episodes(self, episodes: Sequence[Episode], speakers: Speakers) -> Selection:
        """Examples of episodes that were scored."""
        raise NotImplementedError

    def teachers(self, speakers: Speakers) -> list[AgentId] | None:
        """The agents whose turns examples are made of; None for any."""
        return list(speakers)

    def check_teachers(self, spoke: Collection[AgentId], where: str) -> None:
        """Raise ValueError where an agent that the configuration names as a teacher does not speak in these episodes."""

    def gradients(self, rows: "TensorDict") -> Tensor:
        """Derivatives of the loss by every token's log-prob, ragged like ``responses``."""
        raise NotImplementedError

    def measure(self, rows: "TensorDict") -> Metrics:
        """``loss`` and other numbers of rows with ``log_probs``, and ``ref_log_prob`` where there is a reference."""
        raise NotImplementedError

    async def step(self, trainer: Any, tasks: Sequence[Any]) -> Metrics:
        """One step of a :class:`marl.marl_trainer.MARLTrainer`: play the tasks, and train on examples of their episodes. Offline the
        tasks are examples, as they were read."""
        if self.offline:
            return await self.imitate(trainer, tasks)
        phase, started = PhaseTimer(), time.monotonic()
        played = await trainer.play(tasks, phase)
        selection = self.of_episodes(played.episodes, trainer.speakers)
        examples, too_long = trainer.encoded(selection.examples)
        await trainer.free_servers()
        trained = await trainer.learn(examples, phase, played.scored)
        synced = await phase.of("sync_weights", trainer.sync_weights())
        ended = time.monotonic()
        await trainer.dumps.write_played(played.episodes, trainer.step_number)
        metrics = played.counts() | selection.metrics | {"method/too_long": float(too_long)} | trained | synced
        turns = sum(len(episode.turns) for episode in played.episodes)
        return metrics | trainer.controller.metrics() | phase.metrics() | trainer.effort(turns, (started, ended))

    async def imitate(self, trainer: Any, items: Sequence[Any]) -> Metrics:
        """One step on examples that were read: nothing is played."""
        phase, started = PhaseTimer(), time.monotonic()
        trainer.begin_step()
        await trainer.free_servers()
        examples = [example for item in items for example in item]
        trained = await trainer.learn(examples, phase)
        synced = await phase.of("sync_weights", trainer.sync_weights())
        turns = sum(len(side) for example in examples for side in example.sides)
        return trained | synced | phase.metrics() | trainer.effort(turns, (started, time.monotonic()))

    async def sync_weights(self, trainer: Any) -> Metrics:
        """Give every policy's weights to its servers."""
        return {} if self.offline else await trainer.weights.to_step(trainer.step_number)

    async def validate(self, trainer: Any) -> Metrics:
        """Play the validation tasks; offline measure the loss on the examples that were held out."""
        return await (trainer.validate_held_out() if self.offline else trainer.validate_by_play())

    async def update(self, rows: Rows, policies: Policies) -> dict[PolicyName, Metrics]:
        """Update every policy that has rows, all at the same time."""
        return await each(self.fit, rows, policies)

    async def fit(self, rows: "TensorDict", group: PolicyGroup) -> Metrics:
        """``epochs`` updates of one policy. Metrics are the last one's, before its update."""
        await self.read_reference(rows, group)
        metrics: Metrics = {}
        for epoch in range(1, self.config.epochs + 1):
            if self.compares:
                await self.read_log_probs(rows, group)
            metrics = await self.descend(rows, group, last=epoch == self.config.epochs)
        return metrics

    async def descend(self, rows: "TensorDict", group: PolicyGroup, last: bool) -> Metrics:
        """One update of a policy, whose rows have ``log_probs`` where the method compares."""
        rows["gradients"] = self.gradients(rows)
        metrics = await group.descend(rows, last=last)
        metrics |= self.measure(rows) if self.compares else {}
        return metrics | {"trained_tokens": float(rows["response_mask"].values().sum())}

    async def evaluate(self, rows: Rows, policies: Policies) -> dict[PolicyName, Metrics]:
        """Numbers of every policy on rows that it is not trained on."""
        return await each(self.look, rows, policies)

    async def look(self, rows: "TensorDict", group: PolicyGroup) -> Metrics:
        await self.read_reference(rows, group)
        await self.read_log_probs(rows, group)
        return self.measure(rows)

    async def read_log_probs(self, rows: "TensorDict", group: PolicyGroup) -> None:
        rows["log_probs"] = (await group.compute_log_prob(rows))["log_probs"]

    async def read_reference(self, rows: "TensorDict", group: PolicyGroup) -> None:
        if self.reads_reference:
            rows["ref_log_prob"] = (await group.compute_ref_log_prob(rows))["log_probs"]


async def each(do: Callable[..., Awaitable[Any]], rows: Rows, policies: Policies) -> dict[PolicyName, Any]:
    """Do something with every policy's rows, at the same time."""
    results = await asyncio.gather(*(do(own, policies[name]) for name, own in rows.items()))
    return dict(zip(rows, results, strict=True))


METHODS: Registry[Method] = Registry("method")
register_method = METHODS.register


@register_method("rl")
class ReinforcementLearning(Method):
    """The learner's own: episodes are played, credited, and trained on."""

    learns, sources = True, (Source.play,)

    @dataclass
    class Config:
        name: str
        source: Source = Source.play

    def step(self, trainer: Any, tasks: Sequence[Any]) -> Coroutine[Any, Any, Metrics]:
        return trainer.step(tasks)
