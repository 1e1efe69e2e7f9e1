"""What the subcommands' options accept, and the error for a value that only running can refuse."""

from __future__ import annotations

import argparse
import math
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BadArgumentError", "number", "writable_file"]


class BadArgumentError(ValueError):
    """Names an option and its value, and says what is wrong with it; ends with exit status 2."""

    def __init__(self, *, option: str, value: object, problem: str) -> None:
        super().__init__(f"argument {option}: {value!r} {problem}")


def number(kind: type[int | float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type for an `int` or a `float` within bounds, which nan never is."""
    bounds = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
    message = f"is not {'an integer' if kind is int else 'a number'} {bounds}"

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = kind(text)
            if least <= value <= most:
                return value
        raise argparse.ArgumentTypeError(repr(text) + " " + message)

    return parse


def writable_file(text: str) -> Path:
    """Return the path of a file that can be written, found out by writing beside it."""
    path = Path(text).resolve()  # a link stays a link: its target is what gets replaced
    if path.exists() and not path.is_file():
        message = f"{text!r} is not a regular file"
        raise argparse.ArgumentTypeError(message)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        message = f"{text!r} cannot be written: {error.strerror}"
        raise argparse.ArgumentTypeError(message) from error
    return path
