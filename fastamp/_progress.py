"""The progress bar: tqdm's, on a terminal only."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(
    total: int | None, first: int = 0, *, shows: bool = True
) -> Iterator[Callable[..., object]]:
    """Show a progress bar on a terminal if tqdm is installed; yield a function that advances it."""
    if not shows or not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda _=1: None
        return
    with importlib.import_module("tqdm").tqdm(total=total, initial=first, leave=False) as bar:
        yield bar.update
