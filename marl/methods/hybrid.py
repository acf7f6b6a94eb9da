"""Imitation first, then reinforcement learning: ``sft`` for some steps, or until the team is good enough, then ``rl``."""

from dataclasses import dataclass, field

from marl.config.sources import Source
from marl.methods.base import register_method
from marl.methods.sft import SFT
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
