"""`nox -s fuzz`: every fuzzer for a count or a time.

`python -m support.fuzz_run [--count N] [--seconds S] [--first N] [NAME ...]`; all fuzzers share the
seconds. `--first` with `--count 1` runs a finding again. Exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from support import fuzz_files, fuzz_states
from support.fuzz import fuzz

TARGETS = {**fuzz_states.TARGETS, **fuzz_files.TARGETS}


def run(name: str, count: int, first: int, limit_s: float) -> bool:
    """Run one fuzzer of Python; return whether nothing was found."""
    with tempfile.TemporaryDirectory() as folder:
        target = TARGETS[name](Path(folder))
        try:
            findings = fuzz(target, name, count=count, first=first, limit_s=limit_s)
        finally:
            target.close()
    print(findings, flush=True)  # noqa: T201
    return not findings.found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, help="of inputs for each")
    parser.add_argument("--seconds", type=float, help="for all together (default: 600)")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    known = [*TARGETS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    args = parser.parse_args()
    names = args.names or known
    if unknown := {*names} - {*known}:
        parser.error(f"no fuzzer is called {', '.join(sorted(unknown))}")
    seconds = args.seconds or (1e9 if args.count else 600.0)
    count, limit_s = args.count or 10**12, seconds / len(names)
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    good = [run(name, count, args.first, limit_s) for name in names]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
