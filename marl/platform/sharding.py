"""Weights that a rank has gathered from all of them."""

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel


def reshard(module: torch.nn.Module) -> None:
    """Free the parameters gathered for a forward pass: they would hide writes into the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        elif isinstance(part, FullyShardedDataParallel) and part._handle and part._handle.uses_sharded_strategy:
            part._handle.reshard(True)
