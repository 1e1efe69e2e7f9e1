"""Command-line options: how numbers are read, and how a bad value is refused."""

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
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
        refuse(text, message)

    return parse


def refuse(value: object, problem: str, option: str = "") -> NoReturn:
    """Refuse a value while argparse reads an option, or one that is named here after it."""
    said = f"{value!r} {problem}"
    if option:
        raise argparse.ArgumentError(None, f"argument {option}: {said}")
    raise argparse.ArgumentTypeError(said)
