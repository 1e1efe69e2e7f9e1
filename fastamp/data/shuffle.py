"""The order of a shuffled epoch: stored, or for a long dataset computed place by place."""

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler

from fastamp.data.sample_rng import SPLITMIX, mix

_Numbers: TypeAlias = npt.NDArray[np.uint64]

_KEPT_ROWS = 1 << 28  # the longest permutation that is kept: 2 GB
_CHUNK = 1 << 15  # indices made at a time, which torch still computes in one thread
_ROUNDS = 6  # even
_FIRST, _SECOND = map(np.uint64, SPLITMIX[:2])
_HALF = np.uint64(32)


class Permutation:
    """A permutation of `range(length)` that is computed, not kept: `permutation[places]`.

    It is a Feistel network on pairs (left, right) of numbers below `rows` and `columns`, the
    square root of the length each: place = left * columns + right. A round adds a hash of `right`
    to `left`, modulo its size, and swaps the two; it can be undone whatever the hash (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). If the result is not below the length,
    as for one pair in about `rows`, the rounds are repeated until it is: this walks along a cycle
    of the network, which leads back below the length.
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        rows = math.isqrt(max(length - 1, 0)) + 1
        columns = max(1, -(-length // rows))
        self._columns, key = np.uint64(columns), mix(seed)
        sizes = (rows, columns) * (_ROUNDS // 2)
        self._rounds = [(np.uint64(size), np.uint64(mix(key ^ i))) for i, size in enumerate(sizes)]

    def __getitem__(self, places: Tensor) -> Tensor:
        """Return the indices at the places, int64 both."""
        found = self._encrypt(places.numpy().astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self._length)):
            found[outside] = self._encrypt(found[outside])
        return torch.from_numpy(found.view(np.int64))

    def _encrypt(self, numbers: _Numbers) -> _Numbers:
        left, right = np.divmod(numbers, self._columns)
        for size, key in self._rounds:
            left += _hash(right, key, size)
            left -= size * (left >= size)
            left, right = right, left
        return left * self._columns + right


def _hash(numbers: _Numbers, key: np.uint64, size: np.uint64) -> _Numbers:
    """Return a hash below `size` of each of the numbers."""
    hashed = (numbers ^ key) * _FIRST
    hashed ^= hashed >> _HALF
    hashed *= _SECOND
    hashed >>= _HALF
    hashed *= size
    hashed >>= _HALF
    return hashed


class FeistelSampler(RandomSampler):
    """The shuffled order of a long dataset in a loader with `seed=` that is not sharded.

    The permutation's seed is the one that the generator was last given.
    """

    def chunks(self, start: int = 0, size: int = 1) -> Iterator[Tensor]:
        """Yield the indices from `start` on, many batches of a size at a time."""
        length = len(self.data_source)
        order = Permutation(length, self.generator.initial_seed())
        return (order[places] for places in ranges(start, length, size))

    def __iter__(self) -> Iterator[int]:
        for chunk in self.chunks():
            yield from chunk.tolist()


def is_long(dataset: Any) -> bool:
    """Say whether a permutation of the dataset is computed."""
    return not isinstance(dataset, IterableDataset) and len(dataset) > _KEPT_ROWS


def make_order(dataset: Any, seed: int) -> Tensor | Permutation:
    """Return a shuffled epoch's permutation: torch's, or for a long dataset a computed one."""
    if is_long(dataset):
        return Permutation(len(dataset), seed)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(len(dataset), generator=generator, device="cpu")


def ranges(start: int, stop: int, size: int) -> Iterator[Tensor]:
    """Yield the numbers of a range as int64 tensors, each of whole batches but the last."""
    span = size * max(1, _CHUNK // size)
    for begin in range(start, stop, span):
        yield torch.arange(begin, min(stop, begin + span), device="cpu")
