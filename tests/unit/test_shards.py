"""Writing into a worker's shards changes its model, however that is sharded."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from marl.cluster.local import one_process
from marl.cluster.workers.critic_worker import CriticWorker
from marl.cluster.workers.policy_worker import PolicyWorker, shards
from marl.utils import marks


def plain(module):
    return module


def fsdp1(module):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def fsdp2(module):
    """In half precision what a forward pass gathered is a copy, on one rank too; it is kept afterwards."""
    mesh, half = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in module:
        fully_shard(layer, mesh=mesh, mp_policy=half, reshard_after_forward=False)
    return fully_shard(module, mesh=mesh, mp_policy=half, reshard_after_forward=False)


@pytest.fixture(params=[plain, fsdp1, fsdp2], ids=lambda wrap: wrap.__name__)
def workers(request):
    """Two parts, of a worker each, with models of different weights."""
    with one_process():
        parts = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
            files = SimpleNamespace(release=lambda: None)
            parts.append(
                SimpleNamespace(engine=SimpleNamespace(module=request.param(layers), checkpoint_manager=files))
            )
        yield parts


INPUTS = torch.arange(6.0).view(2, 3)


def output(part):
    """With what the last forward pass gathered, if anything, and with the shards themselves."""
    module, found = part.engine.module, []
    with torch.no_grad():
        for _ in range(2):
            found.append(module(INPUTS).clone())
            for layer in module.modules():
                if isinstance(layer, FSDPModule):
                    layer.reshard()
        module(INPUTS)
    return torch.stack(found)


def test_a_critic_reads_with_its_targets_weights_and_then_with_its_own(workers):
    critic, other = workers
    first, wanted = output(critic), output(other)
    assert not torch.equal(first, wanted)
    critic.target = {name: shard.clone() for name, shard in shards(other)}
    CriticWorker._exchange_target(critic)
    assert torch.equal(output(critic), wanted)
    CriticWorker._exchange_target(critic)
    assert torch.equal(output(critic), first)


def test_a_kept_target_is_a_copy(workers):
    critic, other = workers
    CriticWorker.renew_target(critic)
    kept = {name: shard.clone() for name, shard in critic.target.items()}
    with torch.no_grad():
        for (_, shard), (_, new) in zip(shards(critic), shards(other), strict=True):
            shard.copy_(new)
    assert all(torch.equal(critic.target[name], kept[name]) for name in kept)


def test_a_reference_gets_its_policys_weights(workers):
    reference, policy = workers
    wanted = output(policy)
    output(reference)
    PolicyWorker.renew_reference(SimpleNamespace(ref=reference, actor=policy))
    assert torch.equal(output(reference), wanted)


def test_a_saved_reference_comes_back(workers, tmp_path):
    reference, policy = workers
    first = output(reference)
    host = SimpleNamespace(ref=reference, actor=policy, rank=0, _reference_file=lambda folder: tmp_path / "ref")
    PolicyWorker.save_reference(host, str(tmp_path))
    PolicyWorker.renew_reference(host)  # while the former one is written
    marks.wait_for(marks.marks_of(tmp_path, 1), 10.0, "key")
    PolicyWorker.renew_reference(host)
    assert not torch.equal(output(reference), first)
    PolicyWorker.load_reference(host, str(tmp_path))
    assert torch.equal(output(reference), first)
