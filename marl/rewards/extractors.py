"""One rule for each data source by which texts give their final answers: for votes, credit, reports and what is hidden."""

import functools
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from marl.config.errors import ConfigError
from marl.rewards import answers, sources
from marl.rewards.answers import HIDDEN, Extract
from marl.rewards.custom import custom_function, load, module_of
from marl.rewards.prose import HideProse, Prose, wanted_by
from marl.utils.registry import did_you_mean

logger = logging.getLogger(__name__)

KEY = "judge.extractors"
NAMED: dict[str, Extract] = {
    "only": answers.only_answer,
    "strict": answers.strict_number,
    "flexible": answers.last_number,
    "hashes": answers.final_answer,
    "math": answers.math_answer,
    "prose": Prose(),
}


@dataclass(frozen=True)
class Own:
    """A user's function by file path and name, which travel to other processes in place of the function."""

    path: str
    name: str

    def __call__(self, text: str) -> str | None:
        try:
            answer = load(self.path, self.name)(text)
        except Exception as error:  # the user's: it costs the text its answer, and nothing else
            warn_of(self, type(error).__name__, str(error))
            return None
        return None if answer is None else str(answer)


@functools.cache
def warn_of(own: Own, kind: str, message: str) -> None:
    logger.warning("%s of %s failed on a text, which gives no answer: %s: %s", own.name, own.path, kind, message)


@dataclass(frozen=True)
class HideFound:
    """A text without the answer that a user's function finds in it."""

    extract: Extract

    def __call__(self, text: str) -> str:
        answer = self.extract(text)
        if not answer:
            return answers.hide_answer(text)
        hidden = answers.hide_answer(re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", HIDDEN, text))
        return HIDDEN if self.extract(hidden) == answer else hidden  # it writes the answer in its own way


@dataclass(frozen=True)
class AnswerRules:
    """The rule of each data source: the one that a key names, else that of the user's reward file, else the built-in one."""

    answer_rule: str = "strict"
    by_source: Mapping[str, str] = field(default_factory=dict)
    """Data source, or how its name begins: the name of a rule, or ``<file>:<function>``."""
    of_reward: Own | None = None

    def extractor(self, data_source: str, truth: Any = None) -> Extract:
        """``truth``, or that of another row of the source, says whether texts answer with numbers, words or letters."""
        chosen = self._chosen(data_source)
        if isinstance(chosen, Own):
            return chosen
        if chosen == "prose":
            return Prose(wanted_by(truth))
        return sources.extractor(data_source, self.answer_rule, truth) if chosen is None else NAMED[chosen]

    def hider(self, data_source: str, truth: Any = None) -> Callable[[str], str]:
        chosen = self._chosen(data_source)
        if isinstance(chosen, Own):
            return HideFound(chosen)
        if chosen is None:
            return sources.hider(data_source, self.answer_rule, truth)
        if chosen == "prose":
            return HideProse(Prose(wanted_by(truth)))
        return answers.hide_last_number if chosen == "flexible" else answers.hide_answer

    def chooses(self, data_source: str) -> bool:
        """True if the user has named the rule."""
        return self._chosen(data_source) is not None

    def _chosen(self, data_source: str) -> str | Own | None:
        keys = [key for key in self.by_source if data_source.startswith(key)]
        return own_or_named(self.by_source[max(keys, key=len)]) if keys else self.of_reward


def rule_of(extract: Extract) -> str:
    """A rule as ``judge.extractors`` names it."""
    if isinstance(extract, Own):
        return f"{extract.path}:{extract.name}"
    if isinstance(extract, Prose):
        return "prose"
    return next((name for name, rule in NAMED.items() if rule == extract), "of verl's own function")


def own_or_named(value: str) -> str | Own:
    path, _, name = value.rpartition(":")
    return value if value in NAMED else Own(path, name)


def answer_rules(config: Any) -> AnswerRules:
    """The rules of a configuration: ``judge.extractors``, ``extract(text)`` of the reward's file, the built-in ones."""
    custom = custom_function(config)
    exported = custom is not None and callable(getattr(module_of(custom.path), "extract", None))
    of_reward = Own(custom.path, "extract") if custom is not None and exported else None
    settings = config.judge
    return AnswerRules(settings.answer_rule.name, dict(settings.extractors), of_reward)


def check_extractors(config: Any) -> None:
    """Raise ConfigError for an unknown rule, or a function that cannot be loaded."""
    for source, value in config.judge.extractors.items():
        chosen = own_or_named(value)
        if not isinstance(chosen, Own):
            continue
        if not (chosen.path and chosen.name):
            raise ConfigError(
                f"{KEY}.{source}={value}: no such rule; expected one of {', '.join(NAMED)}, or <file>.py:<function> of your own."
                f"{did_you_mean(value, NAMED)}"
            )
        try:
            load(chosen.path, chosen.name)
        except Exception as error:  # the user's file is run
            raise ConfigError(
                f"{KEY}.{source}={value}: {type(error).__name__}: {error}; expected a file with a function {chosen.name}(text)"
            ) from error
