"""Command-line options: how numbers are read, and how a bad value is refused."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import NoReturn

DEFAULT = "(default: %(default)s)"


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


def refuse(option: str, value: object, problem: str) -> NoReturn:
    """Refuse a value after parsing; the command ends with exit status 2."""
    raise argparse.ArgumentError(None, f"argument {option}: {value!r} {problem}")


class OutputError(OSError):
    """The standard output cannot be written: a full disk, or a pipe that nobody reads."""


def escape_output() -> None:
    """Escape what the encoding of the standard output lacks."""
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):  # a file that has become a pipe: "Illegal seek"
            sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print to the standard output at once, or raise an OutputError."""
    try:
        print(text, flush=True)
    except OSError as error:
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - what is buffered is not tried again
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        raise OutputError(error.errno, f"the standard output: {error.strerror}") from error
