"""QMIX: VDN with a mixer that is monotone in every utility, and conditioned on the state (arXiv:1803.11485).

The state is the joint observation: the task, every agent's private observation, the turns of earlier rounds.
"""

from dataclasses import dataclass

from marl.learners.base import register_learner
from marl.learners.mixing import Mixing
from marl.learners.vdn import VDN
from marl.modules.mixers import QMixer, StateEncoder
from marl.utils.numbers import bounded, count


@register_learner("qmix")
class QMIX(VDN):
    reads_joint = True

    @dataclass
    class Config(VDN.Config):
        embed_dim: int = bounded(32, count(1, 2**20))
        """Width of the mixer."""
        state_dim: int = bounded(32, count(1, 2**20))
        """Width of the state that is made of the joint observation."""
        state_buckets: int = bounded(4096, count(1, 2**20))
        """Number of hash buckets for its tokens, and as many for token pairs."""

    config: Config

    def make_mixing(self, num_agents: int) -> Mixing:
        config = self.config
        mixer = QMixer(num_agents, config.state_dim, config.embed_dim)
        return Mixing(mixer, StateEncoder(config.state_dim, config.state_buckets))
