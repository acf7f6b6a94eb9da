"""KL penalties against the reference, and rollout correction between servers and trainer. Pure, over rows."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import AdaptiveKLController, get_kl_controller, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from marl.types import Metrics
from marl.utils.ragged import dense, dense_to_jagged


class KLInReward:
    """Subtracts the KL penalty against the reference from the reward, token by token (``algorithm.use_kl_in_reward``).

    ``algorithm.kl_penalty`` names the estimator, ``algorithm.kl_ctrl`` the coefficient: fixed, or adaptive towards
    ``target_kl`` (arXiv:1909.08593). Every policy has a coefficient of its own.
    """

    def __init__(self, algorithm: Any) -> None:
        self.estimator, self.controller = algorithm.kl_penalty, get_kl_controller(algorithm.kl_ctrl)
        self.is_adaptive = isinstance(self.controller, AdaptiveKLController)

    def penalise(self, rows: TensorDict) -> Metrics:
        """Write ``kl_penalty`` [B, T], ragged like ``responses``, and adapt the coefficient."""
        kl_T = kl_penalty(rows["old_log_probs"].values(), rows["ref_log_prob"].values(), self.estimator)
        kl_T = torch.where(rows["response_mask"].values().bool(), kl_T, 0.0)
        coefficient, kl_D = self.controller.value, turn_means(kl_T, rows)
        rows["kl_penalty"] = torch.nested.nested_tensor_from_jagged(coefficient * kl_T, rows["responses"].offsets())
        current = float(kl_D.sum() / max(len(kl_D), 1))
        self.controller.update(current_kl=current, n_steps=len(kl_D))
        return {"reward_kl_penalty": current, "reward_kl_penalty_coeff": float(coefficient)}

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": float(self.controller.value)} if self.is_adaptive else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore an adapted coefficient. A fixed one comes from the configuration, which may have changed."""
        if self.is_adaptive and "coefficient" in state:
            self.controller.value = state["coefficient"]


def turn_means(x_T: Tensor, rows: TensorDict) -> Tensor:
    """The mean of each turn's tokens [D], whether turns share rows or not."""
    own_T = (rows["turn_index"].values() >= 0) & rows["response_mask"].values().bool()
    cells_D, turn_T = rows["turn_index"].values()[own_T].unique(return_inverse=True)
    return torch.zeros(len(cells_D)).index_add(0, turn_T, x_T[own_T].float()) / torch.bincount(turn_T)


def correct(rows: TensorDict, settings: Any) -> Metrics:
    """verl's ``algorithm.rollout_correction``: weights and rejection where servers and trainer differ.

    Writes ``rollout_is_weights``, and takes rejected tokens out of ``response_mask``.
    """
    counted_BT = dense(rows["response_mask"]).bool()
    weights, mask_BT, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=torch.where(counted_BT, dense(rows["old_log_probs"]), 0.0),
        rollout_log_prob=dense(rows["rollout_log_probs"]),
        response_mask=dense(rows["response_mask"]),
        rollout_is=settings.rollout_is,
        rollout_is_threshold=settings.rollout_is_threshold,
        rollout_is_batch_normalize=settings.rollout_is_batch_normalize,
        rollout_rs=settings.rollout_rs,
        rollout_rs_threshold=settings.rollout_rs_threshold,
    )
    if weights is not None:
        rows["rollout_is_weights"] = dense_to_jagged(weights.batch["rollout_is_weights"], rows["responses"])
    rows["response_mask"] = rows["loss_mask"] = dense_to_jagged(mask_BT, rows["responses"])
    return {key: float(value) for key, value in metrics.items()}
