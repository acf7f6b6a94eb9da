"""Data sources: the kind of each by its name, and the rule that finds and hides the answers of its texts."""

import functools
import re
from collections.abc import Callable
from typing import Any

from marl.rewards import answers
from marl.rewards.answers import Extract
from marl.rewards.prose import HideProse, Prose, wanted_by

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


def extractor(data_source: str, answer_rule: str = "strict", truth: Any = None) -> Extract:
    """The rule of a data source. ``answer_rule``, strict or flexible, is how a GSM8K answer is read; ``truth`` says whether one's
    own data asks for numbers, words or letters. The embedded tasks (``marl/…``) allow nothing around the answer."""
    if data_source in PROGRAMS or data_source.startswith(SEARCH):
        return answers.program if data_source in PROGRAMS else answers.tagged_answer
    gsm8k = {"strict": answers.strict_number, "flexible": answers.last_number}
    rules: dict[str, Extract] = {
        "embedded": answers.only_answer, "gsm8k": gsm8k[answer_rule], "math": answers.math_answer, "verl": answers.final_answer
    }  # fmt: skip
    return rules.get(kind_of(data_source)) or Prose(wanted_by(truth))


def hider(data_source: str, answer_rule: str = "strict", truth: Any = None) -> Callable[[str], str]:
    """Function that removes the final answer from a text of a data source."""
    if data_source in PROGRAMS or data_source.startswith(SEARCH):
        return answers.hide_programs if data_source in PROGRAMS else answers.hide_tagged
    if kind_of(data_source) == "own":
        return HideProse(Prose(wanted_by(truth)))
    loose = kind_of(data_source) == "gsm8k" and answer_rule == "flexible"
    return answers.hide_last_number if loose else answers.hide_answer


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
