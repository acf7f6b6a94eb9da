"""Direct preference optimisation (arXiv:2305.18290), with IPO's and SLiC's losses, against each policy's own reference.

Of a team's episodes every agent learns from its own pairs: turns of the same task and place, with different scores. In later rounds
they may follow other prompts: ``same_prompt`` keeps the pairs for which the loss was derived.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from marl.config.sources import Source
from marl.methods.base import Method, register_method
from marl.methods.choice import CompareBy, contrasts
from marl.methods.examples import Example, Selection, Speakers, distinct
from marl.methods.losses import PreferenceLoss, log_ratios, pair_gradients, preference_loss, preference_slope
from marl.methods.rows import prompt_of, speakers_of, text_of
from marl.types import Episode, Metrics, Turn
from marl.utils.numbers import POSITIVE, Number, bounded

if TYPE_CHECKING:
    from tensordict import TensorDict


@register_method("dpo")
class DPO(Method):
    @dataclass
    class Config(Method.Config):
        source: Source = Source.rows
        prompt_key: str = "prompt"
        """Column of the prompt."""
        chosen_key: str = "chosen"
        """Column of the better answer."""
        rejected_key: str = "rejected"
        """Column of the worse one."""
        loss: PreferenceLoss = PreferenceLoss.sigmoid
        beta: float = bounded(0.1, POSITIVE)
        """Strength of the tie to the reference."""
        label_smoothing: float = bounded(0.0, Number(0, 0.499))
        """Share of pairs that are taken to be the wrong way round, for the sigmoid loss."""
        reference: bool = True
        """False: the loss of the policy's log-probs alone."""
        compare_by: CompareBy = CompareBy.own
        """Score by which the turns of episodes are compared: their own, or that of the team's answer."""
        same_prompt: bool = False
        """Take from episodes only pairs that follow the same prompt."""

    config: Config

    @property
    def reads_turn_scores(self) -> bool:
        return self.config.compare_by is CompareBy.own

    @property
    def columns(self) -> list[tuple[str, ...]]:
        return [(self.config.prompt_key,), (self.config.chosen_key,), (self.config.rejected_key,)]

    def of_row(self, row: Mapping[str, Any], speakers: Speakers) -> list[Example]:
        return distinct(self.pairs_of_row(row, speakers))

    def pairs_of_row(self, row: Mapping[str, Any], speakers: Speakers) -> list[Example]:
        """Each agent's pair, where its two answers differ."""
        found = []
        for agent, policies in speakers_of(row, speakers).items():
            prompt = prompt_of(row, self.config.prompt_key, agent)
            chosen, rejected = (text_of(row, key, agent) for key in (self.config.chosen_key, self.config.rejected_key))
            if chosen != rejected:
                found.append(pair(agent, policies[0], prompt, chosen, rejected))
        return found

    def of_episodes(self, episodes: Sequence[Episode], speakers: Speakers) -> Selection:
        pairs, without = contrasts(episodes, speakers, self.config.compare_by, self.config.same_prompt)
        metrics = {"method/pairs": float(len(pairs)), "method/places_without_contrast": float(without)}
        return Selection(pairs, metrics)

    def gradients(self, rows: "TensorDict") -> Tensor:
        return pair_gradients(preference_slope(self.config.loss, self.margins(rows), *self._shape), rows)

    def measure(self, rows: "TensorDict") -> Metrics:
        ratios_PS = log_ratios(rows)
        margin_P, beta = self.margins(rows), self.config.beta
        return {
            "loss": float(preference_loss(self.config.loss, margin_P, *self._shape).mean()),
            "preference_accuracy": float((margin_P > 0).double().mean()),
            "preference_margin": float(beta * margin_P.mean()),
            "chosen_reward": float(beta * ratios_PS[:, 0].mean()),
            "rejected_reward": float(beta * ratios_PS[:, 1].mean()),
        }

    def margins(self, rows: "TensorDict") -> Tensor:
        """Each pair's log-ratio of the chosen side less that of the rejected one [P]."""
        ratios_PS = log_ratios(rows)
        return ratios_PS[:, 0] - ratios_PS[:, 1]

    @property
    def _shape(self) -> tuple[float, float]:
        return self.config.beta, self.config.label_smoothing


def pair(agent: str, policy: str, prompt: list, chosen: str, rejected: str) -> Example:
    better, worse = (Turn(agent, 1, list(prompt), text, policy=policy) for text in (chosen, rejected))
    return Example(([better], [worse]))
