"""Imitation first, then reinforcement learning: ``sft`` for some steps, or until the team is good enough, then ``rl``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marl.config.errors import ConfigError
from marl.config.sources import Source
from marl.methods.base import register_method
from marl.methods.sft import SFT
from marl.types import Metrics
from marl.utils.numbers import SHARE, bounded, count


@register_method("hybrid")
class Hybrid(SFT):
    learns, sources = True, (Source.play,)

    @dataclass
    class Config(SFT.Config):
        source: Source = Source.play
        imitates: Source = Source.rows
        """Kind of the data in ``files`` that is imitated: rows, or episodes that another run dumped."""
        files: list[str] = field(default_factory=list)
        """Files to imitate; ``data.train_files`` hold the tasks that are played afterwards."""
        sft_steps: int = bounded(10, count(1))
        """Steps of imitation, at most."""
        until: float | None = bounded(None, SHARE.or_null())
        """Imitation ends after the validation in which the team's vote reaches this; null: after ``sft_steps`` alone."""

    config: Config

    @property
    def imitates(self) -> Source:
        return self.config.imitates

    async def step(self, trainer: Any, tasks: Sequence[Any]) -> Metrics:
        imitates = not trainer.tasks.is_second
        if imitates:  # without turns, but not missing between the ledgers of steps that were played
            trainer.controller.ledger.begin(trainer.step_number, trainer.weights.proven)
        metrics = await (self.imitate(trainer, tasks) if imitates else trainer.step(tasks))
        if trainer.step_number >= self.config.sft_steps:
            trainer.tasks.is_second = True
        return metrics | {"method/imitates": float(imitates)}

    async def validate(self, trainer: Any) -> Metrics:
        metrics = await super().validate(trainer)
        if self.config.until is not None and trainer.history[trainer.step_number]["vote"] >= self.config.until:
            trainer.tasks.is_second = True
        return metrics


class TwoStreams:
    """Batches of one stream, and from some step on of another."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second
        self.is_second = False

    @property
    def current(self) -> Any:
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
