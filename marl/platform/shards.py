"""Work on FSDP modules outside a forward pass: freeing gathered parameters, settling the dtypes of gradients."""

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
    """Run FSDP2's lazy initialisation now, while adapters are trainable. It settles the dtype of each group's gradients; in a
    first forward pass with the adapters off, a reference's, it would find nothing to train, and the first update would fail."""
    if isinstance(module, FSDPModule):
        module._get_fsdp_state()._lazy_init()
