"""How far a pass runs ahead of the loop, and on how many threads: decided here alone."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")

DEFAULT_MAX_BYTES = 1 << 30
COPIES = 2  # gathered batches whose copy to the device begins before the consumer asks for them


class Ahead(NamedTuple):
    """What a pass may have under way."""

    batches: int
    """Batches that are gathered, or made by workers, and not delivered yet."""
    nbytes: int
    """Bytes of all of them; a single batch may be larger if the user gave no limit."""
    threads: int
    """Threads that make them."""


def gather_ahead(max_bytes: int | None, *, pinned: bool, is_computed: bool) -> Ahead:
    """Return how far the core gathers ahead.

    Args:
        max_bytes: the user's limit.
        pinned: whether memory for batches is pinned.
        is_computed: whether the order of the pass is computed. A sampler of the user's is read for
            one batch at a time.
    """
    threads = torch.get_num_threads()
    batches = threads + 1
    if pinned:  # takes time; and COPIES more batches are being copied
        batches = 2
    if not is_computed:
        batches = 1
    # One thread less, since the consumer copies, too, while it waits.
    return Ahead(batches, max_bytes or DEFAULT_MAX_BYTES, max(1, threads - 1))


def read_ahead(batches: Iterator[T], count: int) -> Iterator[T]:
    """Read a sampler as far ahead as torch's iterators do for workers, which begin at once."""
    read = deque(islice(batches, count))

    def rest() -> Iterator[T]:
        while read:
            first = read.popleft()
            read.extend(islice(batches, 1))
            yield first

    return rest()


def too_large(max_bytes: int, nbytes: int) -> ValueError:
    """Return the error of a batch that is larger than all that the loader may hold."""
    return ValueError(f"max_bytes={max_bytes}: one batch takes {nbytes} bytes")
