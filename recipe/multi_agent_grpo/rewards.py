"""The rewards of multi-agent GRPO: the exact number, likeness to the reference, variety, the format, and their weighted sum.

``reward.custom_reward_function.reward_kwargs`` sets the weights.
"""

import re
from difflib import SequenceMatcher

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
FORMAT = re.compile(r"<response>.*?(?:</response>|$)", re.DOTALL)


def exact_number(text: str, truth: str) -> float:
    """1 if the last number of the text is the truth's last one; thousands separators do not count."""
    said, wanted = (NUMBER.findall(part.replace(",", "")) for part in (text, truth))
    return float(bool(said) and bool(wanted) and float(said[-1]) == float(wanted[-1]))


def likeness(text: str, reference: str) -> float:
    """difflib's ratio, from 0 to 1."""
    return SequenceMatcher(None, text, reference, autojunk=False).ratio()


def variety(text: str) -> float:
    """The share of characters that are different ones."""
    return len(set(text)) / len(text) if text else 0.0


def well_formed(text: str) -> float:
    """1 if there is a response in its tags; the closing one may be the stop string."""
    return float(FORMAT.search(text) is not None)


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
    return {"score": sum(weights[name] * value for name, value in parts.items()), **parts}
