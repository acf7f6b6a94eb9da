"""The rewards of multi-agent GRPO: the exact number, likeness to the reference, variety, the format, and their weighted sum.

``reward.custom_reward_function.reward_kwargs`` sets the weights; ``acc``, what is right, is the exact number alone.
"""

import re
from difflib import SequenceMatcher

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
RESPONSE = re.compile(r"<response>(.*?)(?:</response>|$)", re.DOTALL)


def extract(text: str) -> str | None:
    """The last number of the response; of a text without its tags, of all of it. Thousands separators do not count."""
    found = RESPONSE.search(text)
    numbers = NUMBER.findall((found[1] if found else text).replace(",", ""))
    return numbers[-1] if numbers else None


def exact_number(text: str, truth: str) -> float:
    said, wanted = extract(text), extract(truth)
    return float(said is not None and wanted is not None and float(said) == float(wanted))


def likeness(text: str, reference: str) -> float:
    """100 times difflib's ratio."""
    return 100 * SequenceMatcher(None, text, reference, autojunk=False).ratio()


def variety(text: str) -> float:
    """The number of distinct characters."""
    return float(len(set(text)))


def well_formed(text: str) -> float:
    """10 if there is a response in its tags; the closing one may be the stop string."""
    return 10.0 * (RESPONSE.search(text) is not None)


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, exact=1.0, like=0.0, varied=0.0, format=0.0
):
    """verl's contract: the weighted sum, and every part as a column of the dump."""
    truth = str(ground_truth)
    reference = str((extra_info or {}).get("answer", truth))
    parts = {
        "exact": exact_number(solution_str, truth),
        "like": likeness(solution_str, reference),
        "varied": variety(solution_str),
        "format": well_formed(solution_str),
    }
    weights = {"exact": exact, "like": like, "varied": varied, "format": format}
    return {"score": sum(weights[name] * value for name, value in parts.items()), "acc": parts["exact"], **parts}
