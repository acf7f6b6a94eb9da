"""Mixers combine the agents' utilities into the team's value: plain modules over a batch of joint actions."""

from marl.modules.mixers.qmix import QMixer
from marl.modules.mixers.state import StateEncoder
from marl.modules.mixers.vdn import VDNMixer

__all__ = ["QMixer", "StateEncoder", "VDNMixer"]
