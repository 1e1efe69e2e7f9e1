"""The command line of the benchmark; without a subcommand it runs the main job, ``amp``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from fastamp.bench import amp
from fastamp.bench.options import BadArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

DEFAULT_COMMAND = "amp"
COMMANDS = (amp,)  # modules with add_parser(subparsers) and run(args) -> exit status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0].startswith("-") and words[0] not in {"-h", "--help"}):
        words.insert(0, DEFAULT_COMMAND)
    parser = argparse.ArgumentParser(
        prog="python -m fastamp.bench",
        description="Measure what mixed precision and fastamp gain on this machine.",
        epilog=f"Without a command: {DEFAULT_COMMAND}; '{DEFAULT_COMMAND} --help' for its options.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(words)
    try:
        return int(args.run(args))
    except BadArgumentError as error:
        subparsers.choices[args.command].error(str(error))  # prints the usage and exits with 2


if __name__ == "__main__":
    sys.exit(main())
