"""Checks of the output of an agent loop: a turn is trained only on tokens that its servers gave."""

import math
from collections import Counter
from typing import Any

import numpy as np
from verl.experimental.agent_loop import AgentLoopOutput

from marl.controller.client import BadAnswer


def check_output(output: Any, who: str, vocabulary: int, longest_prompt: int, longest: int) -> None:
    """Raise BadAnswer naming the field, what it holds and what was expected."""
    if not isinstance(output, AgentLoopOutput):
        raise BadAnswer(f"{who} a {type(output).__name__}; expected one AgentLoopOutput, for one turn")
    if output.multi_modal_data and any(output.multi_modal_data.values()):
        raise BadAnswer(f"{who} multi_modal_data, which is not part of this version; expected text alone")
    limits = {"prompt_ids": ("prompt", longest_prompt), "response_ids": ("response", longest)}
    for name, (kind, limit) in limits.items():
        ids = getattr(output, name)
        if not 1 <= len(ids) <= limit:
            raise BadAnswer(
                f"{who} {len(ids)} {name}; expected at least one, and at most data.max_{kind}_length={limit}"
            )
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocabulary]
        if wrong:
            raise BadAnswer(f"{who} {name} that hold {str(wrong)[:80]}; expected numbers of 0 to {vocabulary - 1}")
    check_tokens(output, who)
    if output.reward_score is not None and not math.isfinite(output.reward_score):
        raise BadAnswer(f"{who} reward_score={output.reward_score}; expected a finite number, or None")


def check_tokens(output: AgentLoopOutput, who: str) -> None:
    size, mask, log_probs = len(output.response_ids), output.response_mask, output.response_logprobs
    if log_probs is None:
        raise BadAnswer(
            f"{who} no response_logprobs; expected one a token: give AgentLoopOutput the log_probs of what "
            "server_manager.generate returned, and 0.0 for what tools said"
        )
    for name, values in {"response_mask": mask, "response_logprobs": log_probs}.items():
        if len(values) != size:
            raise BadAnswer(f"{who} {len(values)} {name} for {size} response_ids; expected one a token")
    if not set(mask) <= {0, 1} or 1 not in mask:
        raise BadAnswer(
            f"{who} response_mask={str(mask)[:80]}; expected 1 on tokens that the agent generated, at least one, and 0 on "
            "all others"
        )
    wrong = [p for p, on in zip(log_probs, mask, strict=True) if on and not math.isfinite(p)]
    if wrong:
        raise BadAnswer(
            f"{who} response_logprobs that hold {str(wrong)[:80]}; expected finite numbers where the mask is 1"
        )


def check_sampled(output: AgentLoopOutput, who: str, sampled: Counter[tuple[int, Any]]) -> None:
    """Raise BadAnswer where a token to be trained is none that the servers gave in this turn, with this log-prob."""
    tokens = zip(output.response_ids, output.response_mask, map(np.float32, output.response_logprobs), strict=True)
    missing = Counter((token, p) for token, on, p in tokens if on) - sampled
    if missing:
        (token, p), count = next(iter(missing)), missing.total()
        raise BadAnswer(
            f"{who} {count} tokens with response_mask=1 that its requests did not give, such as id {token} with log-prob {p:g}; "
            "expected response_mask=0 on what tools and templates add, and ids and log-probs as server_manager.generate "
            "returned them"
        )
