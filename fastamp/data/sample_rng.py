"""Random numbers of one sample, by its place in the epoch, whoever makes it, and when."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_MASK = 2**64 - 1
SPLITMIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GAMMA, _FIRST, _SECOND = map(np.uint64, SPLITMIX)


def mix(value: int) -> int:
    """Return the next number of splitmix64, a bijection of 64 bits."""
    gamma, first, second = SPLITMIX
    value = (value + gamma) & _MASK
    value = ((value ^ (value >> 30)) * first) & _MASK
    value = ((value ^ (value >> 27)) * second) & _MASK
    return value ^ (value >> 31)


def mix_all(values: Tensor) -> Tensor:
    """Return `mix` of each of the int64 numbers, whose 64 bits are taken as they are."""
    bits = values.numpy().view(np.uint64) + _GAMMA
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return torch.from_numpy((bits ^ (bits >> np.uint64(31))).view(np.int64))


def _signed(value: int) -> int:
    return value - 2**64 if value >> 63 else value


class Order(NamedTuple):
    """The keys that the samples of a pass draw from, by their numbers on this rank."""

    key: int
    """The key of the pass: see `find_pass_key`."""
    first: int = 0
    """The place of this rank's first sample in the epoch's order over all ranks."""
    others: int = 0
    """Samples of other ranks between two of this rank's."""

    def places(self, numbers: Any) -> Any:
        """Return the places in the epoch's order over all ranks; also of a tensor of numbers."""
        return numbers * (1 + self.others) + self.first

    def find_key(self, number: int) -> int:
        """Return a sample's key as an unsigned number of 64 bits; for its batch's, give ~number."""
        place = self.places(number) if number >= 0 else ~self.places(~number)
        return mix(self.key ^ (place & _MASK))

    def find_keys(self, number: int, count: int) -> Tensor:
        """Return the keys of so many samples from a number on, as int64 of the same bits."""
        numbers: Any = np.arange(number, number + count, dtype=np.int64)
        return mix_all(torch.from_numpy(self.places(numbers) ^ _signed(self.key)))


def find_pass_key(seed: int, epoch: int) -> int:
    """Return the key of a pass over an epoch."""
    return mix(mix(seed) ^ epoch)


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed as torch's iterators do, by default from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


class SampleRng:
    """The generators of one sample. Each is made when it is asked for."""

    def __init__(self, key: int) -> None:
        self._key = self._next = key

    def take_key(self) -> int:
        """Return a key for draws of the caller's own, another one at each call."""
        key, self._next = self._next, mix(self._next)
        return key

    @cached_property
    def python(self) -> random.Random:
        """A generator of the standard library."""
        return random.Random(self._key)  # noqa: S311 - augmentation, no secrets

    @cached_property
    def numpy(self) -> np.random.Generator:
        """A generator of NumPy."""
        return np.random.default_rng(self._key)

    @cached_property
    def torch(self) -> torch.Generator:
        """A generator of torch, on the CPU. torch uses 32 bits of its seed."""
        return torch.Generator("cpu").manual_seed(self._key)


class _Current(threading.local):
    sample: "Batch | SampleRng | None" = None
    """What says which sample the thread makes, or its generators."""


class Batch:
    """The samples of a pass, one after the other: a plain attribute says which is being made.

    As a context manager it lets `sample_rng` return the generators of that sample.
    """

    __slots__ = ("_before", "_found", "_of", "number", "order")

    def __init__(self, order: Order, number: int) -> None:
        self.order, self.number = order, number
        self._of: int | None = None

    def __enter__(self) -> "Batch":  # noqa: PYI034 - Self needs Python 3.11
        self._before, current.sample = current.sample, self
        return self

    def __exit__(self, *_: object) -> None:
        current.sample = self._before

    def rng(self) -> SampleRng:
        """Return the generators of the sample, the same at each call."""
        if self._of != self.number:
            self._of, self._found = self.number, SampleRng(self.order.find_key(self.number))
        return self._found


current = _Current()


def sample_rng() -> SampleRng:
    """Return the random generators of the sample that is being made: `.torch`, `.numpy`, `.python`.

    For a dataset's `__getitem__`: the draws depend on the loader's `seed`, the epoch and the
    sample's place in the epoch, over all ranks; not on workers, or on where a pass was resumed. All
    calls for one sample return the same generators.

    `__getitems__`, a `collate_fn`, and an iterable dataset with its `collate_fn` have generators
    for each batch. Outside of a `fastamp.DataLoader`, and where workers read an iterable dataset,
    each call returns new ones, seeded from torch's default generator.

    Example:
        >>> class Noise(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 2
        ...
        ...     def __getitem__(self, index):
        ...         return torch.rand(1, generator=fastamp.sample_rng().torch)
        >>> first, again = (next(iter(fastamp.DataLoader(Noise(), 2, seed=0))) for _ in range(2))
        >>> torch.equal(first, again)
        True
    """
    found = current.sample
    if type(found) is Batch:
        return found.rng()
    return found or SampleRng(draw_seed())  # type: ignore[return-value]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the program's generators at the end, whatever a dataset draws from them."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
