"""Work on FSDP modules outside a forward pass: freeing gathered parameters, settling the dtypes of gradients."""

from collections.abc import Iterable

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel


def reshard(module: torch.nn.Module) -> None:
    """Free the parameters gathered for a forward pass: they would hide writes into the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        elif isinstance(part, FullyShardedDataParallel) and part._handle and part._handle.uses_sharded_strategy:
            part._handle.reshard(True)


def settle_dtypes(module: torch.nn.Module, trained: Iterable[torch.nn.Parameter]) -> None:
    """Run FSDP2's lazy initialisation now, while all adapters are trainable. It settles the dtype of each group's gradients; in a
    first forward pass with the adapters off, a reference's, or with another adapter, it would find nothing to train in some
    groups, and the first update of these would fail."""
    if not isinstance(module, FSDPModule):
        return
    frozen = [parameter for parameter in trained if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    module._get_fsdp_state()._lazy_init()
    for parameter in frozen:
        parameter.requires_grad_(False)
