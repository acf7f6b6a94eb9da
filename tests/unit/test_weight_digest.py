"""Digests of weights: sums over shards, equal where and only where the sampled numbers are."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from marl.utils.weight_digest import (
    SAMPLES,
    TensorDigest,
    differing,
    digest_of,
    factors,
    joined,
    sampled_places,
    wrapped,
)

SIZES = [0, 1, 2, SAMPLES - 1, SAMPLES, SAMPLES + 1, 10_007, 3_000_000_000]


def digest(tensor, seed=5, dtype=torch.float32):
    return digest_of([("w", tensor)], dtype, seed)["w"]


@pytest.mark.parametrize("size", SIZES)
def test_places_are_in_order_and_one_lies_in_every_stretch(size):
    for seed in range(3):
        places = sampled_places(size, seed).tolist()
        count = min(size, SAMPLES)
        assert len(places) == count and places == sorted(set(places))
        assert all(i * size // count <= place < (i + 1) * size // count for i, place in enumerate(places))


def test_a_digest_is_the_sum_of_bit_patterns_times_their_factors():
    """By hand: 1.0 is 0x3f800000 in float32 and 0x3f80 in bfloat16, -2.0 is 0xc0000000 and 0xc000 with its sign."""
    values, (first, second) = torch.tensor([1.0, -2.0]), factors(torch.tensor([0, 1]), 5).tolist()
    assert first % 2 == second % 2 == 1 and first != second
    assert digest(values) == TensorDigest((2,), 2, wrapped(0x3F800000 * first + (0xC0000000 - 2**32) * second))
    assert digest(values, dtype=torch.bfloat16).total == wrapped(0x3F80 * first + (0xC000 - 2**16) * second)
    assert digest(torch.tensor([7, -3])).total == wrapped(7 * first - 3 * second), "buffers of whole numbers"


def test_tensors_of_several_types_have_the_digests_that_each_has_alone():
    tensors = {"w": torch.randn(300), "half": torch.randn(5).bfloat16(), "count": torch.tensor([2**40 + 1, -3])}
    found = digest_of(tensors.items(), torch.bfloat16, 5)
    assert found == {name: digest(tensor, dtype=torch.bfloat16) for name, tensor in tensors.items()}


def test_every_read_number_counts_to_its_last_bit_and_at_its_place():
    values = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    same = digest(values)
    places = sampled_places(600, 5).tolist()
    for place in places[::25]:
        other = values.clone()
        other.view(-1)[place] = torch.nextafter(other.view(-1)[place], torch.tensor(9.0))
        assert digest(other) != same
    swapped = values.clone().view(-1)
    swapped[places[:2]] = swapped[places[:2]].flip(0)
    assert digest(swapped.view(20, 30)) != same
    assert digest(values.view(30, 20)) != same, "another shape"
    assert digest(values.clone()) == same and digest(values, seed=6) != same


def test_other_seeds_read_other_numbers():
    read = set()
    for seed in range(40):
        read |= set(sampled_places(2 * SAMPLES, seed).tolist())
    assert read == set(range(2 * SAMPLES))


def test_a_block_of_two_stretches_that_was_left_out_is_seen_whatever_the_seed():
    old, size = torch.zeros(64, 1000), 64_000
    for start in range(0, size, 7_777):
        new = torch.ones_like(old)
        new.view(-1)[start : start + 2 * -(-size // SAMPLES)] = 0
        assert all(digest(new, seed) != digest(torch.ones_like(old), seed) for seed in range(5))


def test_master_weights_are_compared_in_the_servers_precision():
    master = torch.randn(500, generator=torch.Generator().manual_seed(1))
    served = torch.empty(500, dtype=torch.bfloat16).copy_(master)
    assert digest(master, dtype=torch.bfloat16) == digest(served, dtype=torch.bfloat16)
    assert digest(master) != digest(served.float())


LAYOUTS = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "copies of shards": ((2, 2), (Replicate(), Shard(0))),
    "copies": ((4,), (Replicate(),)),
    "both": ((2, 2), (Shard(0), Shard(1))),
}


def shards(whole, shape, placements):
    """Each of four ranks' part as its rank sees it, without the other ranks."""
    for rank in range(4):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", shape)
            local = whole
            for axis, placement in enumerate(placements):
                if isinstance(placement, Shard):
                    parts = torch.chunk(local, shape[axis], placement.dim)
                    at = mesh.get_coordinate()[axis]
                    local = parts[at] if at < len(parts) else local.narrow(placement.dim, 0, 0)
            yield DTensor.from_local(
                local.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        finally:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(37, 5), (3, 200), (64, 64)], ids=str)
def test_shards_add_up_to_the_whole_tensor(layout, shape):
    """Rows that do not divide among the ranks, ranks without any, and ranks that hold the same."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    shares = [digest_of([("w", part)], torch.float32, 5) for part in shards(whole, *LAYOUTS[layout])]
    assert joined(shares) == digest_of([("w", whole)], torch.float32, 5)
    assert sum(share["w"].read > 0 for share in shares) > 1 or layout == "copies"


def test_shards_that_miss_a_part_or_hold_it_twice_are_an_error():
    share = {"w": TensorDigest((10, 10), 50, 3)}
    assert joined([share, share]) == {"w": TensorDigest((10, 10), 100, 6)}
    for shares in ([share], [share] * 3):
        with pytest.raises(ValueError, match=r"w: the ranks' shards hold \d+ of the 100 numbers"):
            joined(shares)


def test_tensors_that_differ_or_that_one_side_lacks_are_named():
    expected = digest_of(
        [(name, torch.full((3,), number)) for name, number in (("a", 1.0), ("b", 2.0), ("c", 3.0))], torch.float32, 0
    )
    held = digest_of(
        [(name, torch.full((3,), number)) for name, number in (("d", 1.0), ("b", 9.0), ("c", 3.0))], torch.float32, 0
    )
    assert differing(expected, held) == ["a", "b", "d"] and differing(expected, dict(expected)) == []
    assert digest_of([], torch.float32, 0) == {}
