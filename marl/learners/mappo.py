"""MAPPO: IPPO with one critic that reads the joint observation, and the team's reward by default (arXiv:2103.01955).

With ``credit=influence`` it is MAPoRL (arXiv:2502.18439), whose paper asks for such a critic.
"""

from marl.learners.base import register_learner
from marl.learners.ippo import IPPO


@register_learner("mappo")
class MAPPO(IPPO):
    critic = "central"
    default_credit = "team"
