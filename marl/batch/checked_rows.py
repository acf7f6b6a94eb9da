"""Rows of a policy's batch on which the servers' log-probs are checked. Pure."""

import random

import torch
from tensordict import TensorDict


def rows_to_check(rows: TensorDict, num_agents: int, count: int, seed: int) -> list[int]:
    """Indices of the longest row, of a row of every agent, and of as many random ones as make ``count``."""
    lengths_B, agents_B = rows["input_ids"].offsets().diff().tolist(), agents_of(rows, num_agents)
    order = [i for i, agent in enumerate(agents_B) if agent >= 0]
    if not order:
        return []
    random.Random(seed).shuffle(order)
    longest = max(order, key=lambda i: lengths_B[i])
    by_agent = {agents_B[i]: i for i in reversed(order)} | {agents_B[longest]: longest}
    chosen = list(dict.fromkeys([*by_agent.values(), *order]))
    return sorted(chosen[: max(count, len(by_agent))])


def agents_of(rows: TensorDict, num_agents: int) -> list[int]:
    """Each row's agent, by its place in the team; -1 for a row without a generated token."""
    index = rows["turn_index"]
    row_T = torch.repeat_interleave(torch.arange(len(rows)), index.offsets().diff())
    cells_B = torch.full((len(rows),), -1).scatter_reduce(0, row_T, index.values(), "amax")
    return torch.where(cells_B >= 0, cells_B % num_agents, -1).tolist()
