"""Kinds of critics: their names, the rows that they read, and what they ask of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from marl.batch.critic_inputs import CENTRAL, CentralTokens, CentralTurns, LocalTokens, LocalTurns
from marl.batch.joint import CriticRows, JointBatch
from marl.batch.utility_inputs import SHARED, UtilityTurns
from marl.config.errors import ConfigError
from marl.config.schema import CriticLevel, PackTurns
from marl.types import CriticName, Episode, Message, PolicyName


class Reader(Protocol):
    """Turns a step's episodes into the rows of every critic."""

    def rows(self, episodes: Sequence[Episode], batch: JointBatch) -> CriticRows: ...


class Encoder(Protocol):
    """Writes conversations in a tokenizer of the critic's own."""

    def encode(self, messages: Sequence[Message]) -> list[int]: ...

    def answer(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class CriticSpec(ABC):
    """The critics of a learner. Override :meth:`names` and :meth:`reader`.

    Facts are class attributes, so that nothing outside branches on the kind.
    """

    levels: tuple[CriticLevel, ...] = field(default=tuple(CriticLevel), kw_only=True)
    """Values of ``critic.level`` that the learner can work with."""

    kind: ClassVar[str]
    """Name used in error messages only."""
    fits_first: ClassVar[bool] = False
    """Fitted before they credit a step's turns; else while the policies are updated."""
    keeps_target: ClassVar[bool] = False
    """Every worker also holds a target copy of its weights."""
    reads_joint: ClassVar[bool] = False
    """Reads the joint observation: plain text, as long as the conversation. Otherwise, each agent's own observation."""
    values_ends: ClassVar[bool] = False
    """Reads values at the end of answers, so its tokenizer needs an end-of-text token."""

    @abstractmethod
    def names(self, policies: Sequence[PolicyName]) -> list[CriticName]:
        """The critics of these trained policies."""

    @abstractmethod
    def reader(self, level: CriticLevel, tokenizer: Any, encoder: Encoder | None = None) -> Any:
        """Make the :class:`Reader` for values of turns or of tokens.

        ``encoder``: for a critic with a tokenizer of its own; None where it shares the policies'."""

    def packing_obstacle(self, config: Any) -> str | None:
        """Reason why the policies' rows must be a turn each, with the remedy; None where turns may share rows."""
        return None

    def check(self, config: Any) -> None:
        """Raise ConfigError for settings that these critics cannot work with."""
        if CriticLevel.of(config) not in self.levels:
            expected = " or ".join(f"critic.level={level.value}" for level in self.levels)
            raise ConfigError(
                f"critic.level={config.critic.level}: learner={config.learner.name} does not support this level; set {expected}"
            )
        obstacle = self.packing_obstacle(config)
        if obstacle and PackTurns.of(config) is PackTurns.true:
            raise ConfigError(f"controller.pack_turns=true: {obstacle}")


@dataclass(frozen=True)
class LocalCritics(CriticSpec):
    """One for every trained policy, of its name; it reads what the agent itself was shown."""

    kind = "local"

    def names(self, policies: Sequence[PolicyName]) -> list[CriticName]:
        return list(policies)

    def reader(self, level: CriticLevel, tokenizer: Any, encoder: Encoder | None = None) -> Reader:
        return LocalTokens() if level is CriticLevel.token else LocalTurns(encoder.encode if encoder else None)

    def packing_obstacle(self, config: Any) -> str | None:
        if CriticLevel.of(config) is CriticLevel.turn or config.critic.loss_agg_mode == "token-mean":
            return None
        return (
            "with critic.level=token the critics read the policies' rows, and critic.loss_agg_mode="
            f"{config.critic.loss_agg_mode} is a mean over sequences; set controller.pack_turns=false or "
            "critic.loss_agg_mode=token-mean"
        )


@dataclass(frozen=True)
class CentralCritic(CriticSpec):
    """One for all agents; it reads the joint observation."""

    kind = "central"
    reads_joint = True

    def names(self, policies: Sequence[PolicyName]) -> list[CriticName]:
        return [CENTRAL]

    def reader(
        self, level: CriticLevel, tokenizer: Any, encoder: Encoder | None = None
    ) -> CentralTurns | CentralTokens:
        return CentralTokens(tokenizer) if level is CriticLevel.token else CentralTurns(tokenizer)

    def packing_obstacle(self, config: Any) -> str | None:
        if CriticLevel.of(config) is CriticLevel.turn:
            return None
        return (
            f"with critic.level=token the central critic of learner={config.learner.name} reads a "
            "row a turn, each after its own joint observation; set controller.pack_turns=false or critic.level=turn"
        )


@dataclass(frozen=True)
class UtilityCritics(CriticSpec):
    """Local critics that read a turn before and after its answer, for a mixer.

    What a utility says of answers that it has not met is noise at first, which whitening makes as large as a signal: they
    are fitted first.
    """

    shared: bool = False
    """One for all agents; else one for every trained policy."""
    levels: tuple[CriticLevel, ...] = field(default=(CriticLevel.turn,), kw_only=True)

    kind = "utility"
    fits_first = True
    keeps_target = True
    values_ends = True

    def names(self, policies: Sequence[PolicyName]) -> list[CriticName]:
        return [SHARED] if self.shared else list(policies)

    def reader(self, level: CriticLevel, tokenizer: Any, encoder: Encoder | None = None) -> Reader:
        return UtilityTurns(self.shared, encoder.encode, encoder.answer) if encoder else UtilityTurns(self.shared)

    def check(self, config: Any) -> None:
        super().check(config)
        learner, tasks = f"learner={config.learner.name}", config.data.train_batch_size
        if config.critic.ppo_epochs != 1 or config.critic.ppo_mini_batch_size != tasks:
            raise ConfigError(
                f"critic.ppo_epochs={config.critic.ppo_epochs}, critic.ppo_mini_batch_size={config.critic.ppo_mini_batch_size}: "
                f"{learner} takes the derivatives of all utilities together, anew for every pass; set critic.ppo_epochs=1 and "
                f"critic.ppo_mini_batch_size={tasks}, and the passes by learner.mixer_epochs"
            )
