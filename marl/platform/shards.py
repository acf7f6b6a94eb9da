"""What FSDP leaves to a forward pass: parameters that it gathered, and dtypes that the first one settles."""

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel


def reshard(module: torch.nn.Module) -> None:
    """Free the parameters gathered for a forward pass: they would hide writes into the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        elif isinstance(part, FullyShardedDataParallel) and part._handle and part._handle.uses_sharded_strategy:
            part._handle.reshard(True)


def settle_dtypes(module: torch.nn.Module) -> None:
    """Let FSDP2 choose the dtype of each group's gradients now. Otherwise it asks which parameters can be trained in the first
    forward pass; where that is the reference's, with the adapters off, none can, and the first update fails."""
    if isinstance(module, FSDPModule):
        module._get_fsdp_state()._lazy_init()
