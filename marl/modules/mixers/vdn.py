"""The mixer of VDN: a sum (arXiv:1706.05296)."""

from torch import Tensor, nn


class VDNMixer(nn.Module):
    """Q_tot = sum_i q_i, whatever the state. Utilities [B, A], 0 for a silent agent; Q_tot [B]."""

    def forward(self, q_BA: Tensor, state_BS: Tensor | None = None) -> Tensor:
        return q_BA.sum(-1)
