"""An iterable dataset for the tests of every loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterable


class Stream(IterableDataset):
    """Items one after the other, and then the error, if there is one."""

    def __init__(self, items: Iterable[object], error: Exception | None = None) -> None:
        self.items, self.error = items, error

    def __iter__(self):
        yield from self.items
        if self.error is not None:
            raise self.error
