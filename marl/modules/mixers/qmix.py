"""The mixer of QMIX: monotone in every utility, with weights that the state makes (arXiv:1803.11485)."""

from torch import Tensor, nn
from torch.nn import functional


class QMixer(nn.Module):
    """Utilities [B, A] and state [B, S] to Q_tot [B], where dQ_tot / dq_i >= 0 for any state:

        Q_tot = |w_out(s)| . elu(q |W_in(s)| + b_in(s)) + V(s)

    The hypernetworks W_in, b_in and w_out are linear, V has one hidden layer; weights are made positive by their absolute
    value, biases may be negative. A silent agent's utility is 0, and then weighs nothing.
    """

    def __init__(self, num_agents: int, state_dim: int, embed_dim: int = 32) -> None:
        super().__init__()
        self.num_agents, self.embed_dim = num_agents, embed_dim
        self.weights_in = nn.Linear(state_dim, num_agents * embed_dim)
        self.bias_in = nn.Linear(state_dim, embed_dim)
        self.weights_out = nn.Linear(state_dim, embed_dim)
        self.value = nn.Sequential(nn.Linear(state_dim, embed_dim), nn.ReLU(), nn.Linear(embed_dim, 1))

    def forward(self, q_BA: Tensor, state_BS: Tensor) -> Tensor:
        weights_BAM = self.weights_in(state_BS).abs().unflatten(-1, (self.num_agents, self.embed_dim))
        mixed_BM = (q_BA[:, :, None] * weights_BAM).sum(1)
        hidden_BM = functional.elu(mixed_BM + self.bias_in(state_BS))
        return (hidden_BM * self.weights_out(state_BS).abs()).sum(-1) + self.value(state_BS)[:, 0]
