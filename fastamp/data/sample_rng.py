"""Random numbers of one sample, by its place in the epoch, whoever makes it, and when."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Keys: TypeAlias = npt.NDArray[np.uint64]
"""The keys of samples."""
_MASK, _CPU = 2**64 - 1, torch.device("cpu")


def mix(value: Any) -> Any:
    """Return the next number of splitmix64, a bijection of 64 bits; also of a uint64 array."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Order(NamedTuple):
    """The keys that the samples of a pass draw from, by their numbers on this rank."""

    key: int
    """The key of the pass: see `find_pass_key`."""
    first: int = 0
    """The place of this rank's first sample in the epoch's order over all ranks."""
    others: int = 0
    """Samples of other ranks between two of this rank's."""

    def places(self, numbers: Any) -> Any:
        """Return the places in the epoch's order over all ranks; also of an array of numbers."""
        return numbers * (1 + self.others) + self.first

    def find_key(self, number: int) -> int:
        """Return a sample's key as an unsigned number of 64 bits; for its batch's, give ~number."""
        place = self.places(number) if number >= 0 else ~self.places(~number)
        return int(mix(self.key ^ (place & _MASK)))

    def find_keys(self, number: int, count: int) -> Keys:
        """Return the keys of so many samples from a number on."""
        numbers = np.arange(number, number + count, dtype=np.uint64)
        keys: Keys = mix(self.places(numbers) ^ self.key)
        return keys


def find_pass_key(seed: int, epoch: int) -> int:
    """Return the key of a pass over an epoch."""
    return int(mix(mix(seed) ^ epoch))


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed as torch's iterators do, by default from torch's default generator."""
    made = torch.empty((), dtype=torch.int64, device=_CPU).random_(generator=generator)
    return made.item()  # type: ignore[return-value]


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


class Batch:
    """Lets `sample_rng` return the generators of the sample that is being made.

    Its number is `number + len(samples)`, where `samples` is the list that it will be added to.
    """

    __slots__ = ("_before", "_found", "_of", "number", "order", "samples")

    def __init__(self, order: Order, number: int) -> None:
        self.order, self.number = order, number
        self.samples: Sequence[Any] = ()
        self._of: int | None = None

    def __enter__(self) -> "Batch":  # noqa: PYI034 - Self needs Python 3.11
        self._before, current.sample = getattr(current, "sample", None), self
        return self

    def __exit__(self, *_: object) -> None:
        current.sample = self._before

    def rng(self) -> SampleRng:
        """Return the generators of the sample, the same at each call."""
        number = self.number + len(self.samples)
        if self._of != number:
            self._of, self._found = number, SampleRng(self.order.find_key(number))
        return self._found


current = threading.local()
"""Its `sample` is the Batch of the sample that the thread makes."""


def sample_rng() -> SampleRng:
    """Return the random generators of the sample that is being made: `.torch`, `.numpy`, `.python`.

    For a dataset's `__getitem__`: the draws depend on the loader's `seed`, the epoch and the
    sample's place in the epoch, over all ranks; not on workers, or on where a pass was resumed. All
    calls for one sample return the same generators. `__getitems__`, a `collate_fn`, and an iterable
    dataset have generators for each batch. Outside of a `fastamp.DataLoader`, and where workers
    read an iterable dataset, each call returns new ones, seeded from torch's default generator.

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
    batch: Batch | None = getattr(current, "sample", None)
    return SampleRng(draw_seed()) if batch is None else batch.rng()


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
