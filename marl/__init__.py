"""Multi-agent reinforcement learning for teams of language models."""

import gc

if gc.get_threshold() == (700, 10, 10):
    # Python's default walks all objects again and again while torch, verl and Ray create a million that stay: a fifth of the
    # time of their import. Whoever set another threshold keeps it.
    gc.set_threshold(50_000, 100, 50)
