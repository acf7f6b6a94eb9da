"""Packing: turns of an agent whose prompts extend one another share a row (``controller.pack_turns``). Pure.

A packed row is its last turn's prompt and answer, with further tokens of it trained: never longer than that turn alone, so
that whatever limit a turn keeps, a packed row keeps too.
"""

from typing import Any

TOKEN_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "cispo", "dro")
"""Policy losses of verl that treat every token by itself."""
SEQUENCE_LOSSES = {
    "gspo": "its ratio is a sequence's",
    "geo_mean": "its ratio is a sequence's",
    "sapo": "it is a mean over sequences",
}


def obstacle(algorithm: Any, own: Any) -> str | None:
    """The first setting under which packed turns would get another gradient, with the remedy; None without one. ``own``:
    ``actor_rollout_ref`` as one policy has it."""
    correction, actor = algorithm.rollout_correction, own.actor
    sequences = [f"{key}={value}" for key in ("rollout_is", "rollout_rs") if "seq" in str(value := correction[key])]
    if sequences:
        return (
            f"algorithm.rollout_correction.{sequences[0]}: a packed sequence holds several "
            "answers; correct by token, or set controller.pack_turns=false"
        )
    if correction.bypass_mode and correction.rollout_is and correction.rollout_is_batch_normalize:
        return (
            "algorithm.rollout_correction.rollout_is_batch_normalize=true in bypass mode: verl's loss divides by the mean of a "
            "micro-batch, which depends on how turns are packed; set it to false, or set controller.pack_turns=false"
        )
    if actor.loss_agg_mode != "token-mean":
        return (
            f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}: a mean over "
            "sequences would depend on how turns are packed; use token-mean, or controller.pack_turns=false"
        )
    loss = actor.policy_loss.loss_mode
    if loss in SEQUENCE_LOSSES:
        return (
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}: {SEQUENCE_LOSSES[loss]}, and a packed sequence holds several "
            "answers; set controller.pack_turns=false"
        )
    return None


def packs_by_default(algorithm: Any, own: Any) -> bool:
    """True if ``pack_turns=auto`` packs the turns of a policy with these settings. A loss that is not known to treat tokens by
    themselves (clip_cov and kl_cov select tokens by micro-batch; a user's own) gets its turns apart."""
    return obstacle(algorithm, own) is None and own.actor.policy_loss.loss_mode in TOKEN_LOSSES
