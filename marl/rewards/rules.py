"""One rule for each data source by which texts give their final answers: for votes, credit, reports and what is hidden."""

import functools
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from marl.config.errors import ConfigError
from marl.rewards import answers
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
HIDERS: Mapping[Extract, Callable[[str], str]] = {
    answers.last_number: answers.hide_last_number,
    answers.program: answers.hide_programs,
    answers.tagged_answer: answers.hide_tagged,
}
"""Functions that hide the answers of a rule, where it is not :func:`marl.rewards.answers.hide_answer`."""

PROGRAMS, SEARCH = ("codecontests", "apps", "codeforces", "taco"), "searchR1_"
DATA = {
    "gsm8k": ("openai/gsm8k",),
    "embedded": ("marl/",),
    # verl's own functions: programs, geometry with pictures, search
    "verl": (*PROGRAMS, "hiyouga/geometry3k", SEARCH),
    # competition mathematics, whose prompts ask for a box
    "math": (
        "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math", "math_dapo",
        "math_dapo_reasoning", "aime", "numina_",
    ),
}  # fmt: skip
"""Kinds of data sources by name; a source of any other name is one's own."""
BEGINNINGS = ("openai/gsm8k", "marl/", "hiyouga/geometry3k", SEARCH, "aime", "numina_")
"""Names that others begin with."""

CODE = re.compile(
    r"human_?eval|mbpp|bigcodebench|livecodebench|code_?contests|codeforces|leetcode|kodcode|evalplus|multipl-?e|ds-?1000|cruxeval"
    r"|swe-?(?:bench|gym|smith)|(?:^|(?<!own)/)(?:apps|taco|spider|wikisql|bird)(?![a-z0-9_])",
    re.IGNORECASE,
)
OPEN = re.compile(
    r"ifeval|alpaca|mt_?bench|ultra(?:feedback|chat)|hh-rlhf|cnn_?dailymail|xsum|samsum|gigaword|(?:^|/)wmt[0-9]|flores|opus", re.IGNORECASE
)  # fmt: skip
LABELS = re.compile(
    r"(?:^|[/_-])(?:anli|[ms]nli|multi_nli|xnli|nli|rte|qnli|wnli|cb|boolq|mrpc|qqp|cola|sst2?|imdb|ag_?news|emotion|trec|yelp\w*"
    r"|hellaswag|piqa|siqa|social_i_qa|winogrande|copa|mmlu\w*|truthful_?qa|swag|logiqa)(?:$|[/_-])",
    re.IGNORECASE,
)
TESTS = re.compile(r"^\s*(?:def \w+\(|assert |import \w|from \w+ import |class \w+)", re.MULTILINE)


@functools.cache
def kind_of(data_source: str) -> str:
    named = (kind for kind, names in DATA.items() if data_source in names)
    begun = (kind for kind, names in DATA.items() if data_source.startswith(tuple({*names} & {*BEGINNINGS})))
    return next(named, None) or next(begun, "own")


def unscorable(data_source: str, truth: Any) -> str:
    """Reason why a row cannot be scored as an answer; empty for none."""
    if kind_of(data_source) != "own":
        return ""
    if CODE.search(data_source) or TESTS.search(str(truth)):
        return "its answers are programs, which have to be run"
    if OPEN.search(data_source):
        return "its answers are free texts, which equal no reference"
    if LABELS.search(data_source) and re.fullmatch(r"-?[0-9]", str(truth).strip()):
        return f"its ground truth {truth} is the number of a label, where texts name the label"
    return ""


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
    """strict or flexible: how a GSM8K answer is read."""
    by_source: Mapping[str, str] = field(default_factory=dict)
    """Data source, or how its name begins: the name of a rule, or ``<file>:<function>``."""
    of_reward: Own | None = None

    def extractor(self, data_source: str, truth: Any = None) -> Extract:
        """``truth``, or that of another row of the source, says whether texts answer with numbers, words or letters."""
        chosen = self._chosen(data_source)
        if isinstance(chosen, Own):
            return chosen
        if chosen is None:
            return extractor(data_source, self.answer_rule, truth)
        return Prose(wanted_by(truth)) if chosen == "prose" else NAMED[chosen]

    def hider(self, data_source: str, truth: Any = None) -> Callable[[str], str]:
        return hider_of(self.extractor(data_source, truth))

    def chooses(self, data_source: str) -> bool:
        """True if the user has named the rule."""
        return self._chosen(data_source) is not None

    def _chosen(self, data_source: str) -> str | Own | None:
        keys = [key for key in self.by_source if data_source.startswith(key)]
        return own_or_named(self.by_source[max(keys, key=len)]) if keys else self.of_reward


def extractor(data_source: str, answer_rule: str = "strict", truth: Any = None) -> Extract:
    """The built-in rule of a data source. The embedded tasks (``marl/…``) allow nothing around the answer."""
    if data_source in PROGRAMS or data_source.startswith(SEARCH):
        return answers.program if data_source in PROGRAMS else answers.tagged_answer
    rules = {"embedded": NAMED["only"], "gsm8k": NAMED[answer_rule], "math": NAMED["math"], "verl": NAMED["hashes"]}
    return rules.get(kind_of(data_source)) or Prose(wanted_by(truth))


def hider(data_source: str, answer_rule: str = "strict", truth: Any = None) -> Callable[[str], str]:
    """Function that removes the final answer from a text of a data source."""
    return hider_of(extractor(data_source, answer_rule, truth))


def hider_of(extract: Extract) -> Callable[[str], str]:
    if isinstance(extract, Own):
        return HideFound(extract)
    return HideProse(extract) if isinstance(extract, Prose) else HIDERS.get(extract, answers.hide_answer)


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
