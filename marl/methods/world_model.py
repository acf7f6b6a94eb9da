"""World-model SFT: beside imitation of good episodes, every agent learns to predict what its peers say next in all of them
(``method.peers_weight``), so that it can plan with its predictions (``runner=debate runner.foresee=true``)."""

from dataclasses import dataclass

from marl.config.sources import Source
from marl.methods.base import register_method
from marl.methods.sft import SFT
from marl.utils.numbers import POSITIVE, bounded


@register_method("world_model")
class WorldModel(SFT):
    sources = (Source.episodes, Source.play)

    @dataclass
    class Config(SFT.Config):
        source: Source = Source.episodes
        peers_weight: float = bounded(1.0, POSITIVE)

    config: Config
