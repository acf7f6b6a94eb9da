"""Rejection-sampling fine-tuning (arXiv:2308.01825): play, keep the best episodes, imitate them, and repeat."""

from dataclasses import dataclass

from marl.config.sources import Source
from marl.methods.base import register_method
from marl.methods.sft import SFT


@register_method("rft")
class RFT(SFT):
    sources = (Source.play,)

    @dataclass
    class Config(SFT.Config):
        source: Source = Source.play

    config: Config
