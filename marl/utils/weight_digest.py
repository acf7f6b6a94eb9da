"""A digest of weights that shards add up to, so that a trainer needs not gather a tensor to compare it with a server's.

Of every tensor a sample of numbers is read, at places that follow from a seed and the tensor's size: one at random in each of
``SAMPLES`` equal stretches, so that a block of two stretches that was left out is seen for certain. Its digest is

    sum over the places i of  bits(x_i) * (2 * mix(i, seed) + 1)  mod 2^64

with x_i in the server's precision: exact, and a sum, which ranks compute each over its own places.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from marl.utils.dtensors import local

SAMPLES = 256
"""Numbers of a tensor that are read; all of a smaller one."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorDigest(NamedTuple):
    """A tensor's shape, how many numbers of it were read, and their sum."""

    shape: tuple[int, ...]
    read: int
    total: int


Digest = dict[str, TensorDigest]
"""By the name of the tensor."""


class Held(NamedTuple):
    """A server's own account: the step of its weights, and their digest."""

    version: int | None
    digest: Digest


@torch.no_grad()
def digest_of(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, seed: int) -> Digest:
    """The digest of whole tensors, or of this rank's shards, whose numbers a server holds as ``dtype``."""
    sample = Sample(seed)
    found: list[tuple[str, tuple[int, ...], Tensor, Tensor]] = []
    for name, tensor in tensors:
        places, own_factors = sample.of(tensor)
        numbers = local(tensor).reshape(-1)[places.to(tensor.device)]
        found.append((name, tuple(tensor.shape), numbers, own_factors))
    if not found:
        return {}
    names, shapes, parts, chosen = zip(*found, strict=True)
    counts, held = [len(part) for part in parts], joined_bits(parts, dtype)
    digests = map(TensorDigest, shapes, counts, sums_of(held * torch.cat(chosen).to(held.device), counts))
    return dict(zip(names, digests, strict=True))


def sums_of(products: Tensor, counts: Sequence[int]) -> list[int]:
    """The sum of each of these stretches, from one running sum, which wraps as they do."""
    running = torch.nn.functional.pad(products.cumsum(0), (1, 0))
    ends = torch.tensor([0, *counts], device=products.device).cumsum(0)
    totals: list[int] = running[ends].diff().tolist()
    return totals


class Sample:
    """Places and factors for one seed. Tensors of one size and layout share them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.by_size: dict[int, tuple[Tensor, Tensor]] = {}
        self.by_layout: dict[tuple, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The flat places of the numbers that this rank holds, in its own part of the tensor, and their factors."""
        if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
            return self._whole(tensor.numel())
        layout = (tensor.shape, tensor.placements, tensor.device_mesh)
        if layout not in self.by_layout:
            places, own_factors = self._whole(tensor.numel())
            here, own_places = local_part(tensor, places)
            self.by_layout[layout] = own_places, own_factors[here]
        return self.by_layout[layout]

    def _whole(self, size: int) -> tuple[Tensor, Tensor]:
        if size not in self.by_size:
            places = sampled_places(size, self.seed)
            self.by_size[size] = places, factors(places, self.seed)
        return self.by_size[size]


def sampled_places(size: int, seed: int) -> Tensor:
    """Flat places of the numbers to read, in ascending order."""
    count = min(size, SAMPLES)
    edges = torch.arange(count + 1) * size // max(count, 1)
    return edges[:-1] + mixed(torch.arange(count), seed) % edges.diff()


def factors(places: Tensor, seed: int) -> Tensor:
    """Odd numbers, so that no bit of a number is lost; another one for every place."""
    return 2 * mixed(places, seed + 1) + 1


def mixed(numbers: Tensor, seed: int) -> Tensor:
    """Pseudo-random numbers of 31 bits: splitmix's steps, which wrap in 64 bits on every device."""
    state = numbers * 0x5851F42D4C957F2D + (seed & 0x7FFFFFFFFFFFFFFF)
    state = (state ^ (state >> 31)) * 0x14057B7EF767814F
    return (state >> 29) & 0x7FFFFFFF


def joined_bits(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The bits of all parts, on one device; read in one pass where their types agree."""
    device = parts[0].device
    if len({part.dtype for part in parts}) == 1:
        return bits(torch.cat([part.to(device) for part in parts]), dtype)
    return torch.cat([bits(part, dtype).to(device) for part in parts])


def bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers' bit patterns in the server's precision, as integers."""
    if not values.is_floating_point():
        return values.to(torch.int64)
    held = values.to(dtype)
    return held.view(INTEGERS[held.element_size()]).to(torch.int64)


def local_part(tensor: DTensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The places that lie in this rank's shard, and their positions in it. A part that several ranks hold belongs to the first."""
    mesh = tensor.device_mesh
    shape, start = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    copies = [
        at for at, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate)
    ]
    here = torch.full(places.shape, not any(copies))
    flat, rest = torch.zeros_like(places), places
    stride = 1
    for size, length, first in reversed(list(zip(tensor.shape, shape, start, strict=True))):
        index = rest % size - first
        here &= (index >= 0) & (index < length)
        flat += index * stride
        rest, stride = rest // size, stride * length
    return here, flat[here]


def joined(shares: Sequence[Mapping[str, TensorDigest]]) -> Digest:
    """The digest of whole tensors from those of the ranks' shards. Raises ValueError where they do not cover a tensor."""
    whole: Digest = {}
    for share in shares:
        for name, (shape, count, total) in share.items():
            _, others, sum_of_others = whole.get(name, (shape, 0, 0))
            whole[name] = TensorDigest(shape, others + count, wrapped(sum_of_others + total))
    for name, (shape, count, _) in whole.items():
        wanted = min(torch.Size(shape).numel(), SAMPLES)
        if count != wanted:
            raise ValueError(
                f"{name}: the ranks' shards hold {count} of the {wanted} numbers to compare; expected each once"
            )
    return whole


def wrapped(total: int) -> int:
    """A sum as 64 bits hold it."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def differing(expected: Digest, held: Digest) -> list[str]:
    """Names of the tensors that a server does not hold as expected, in the trainer's order, then those that it alone has."""
    wrong = [name for name, digest in expected.items() if held.get(name) != digest]
    return wrong + [name for name in held if name not in expected]
