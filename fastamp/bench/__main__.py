"""The command line of the benchmark; without a subcommand it trains a task, the main job."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastamp._files import write
from fastamp.bench import doctor, latency, loader, main_job, page, record, step, timer
from fastamp.bench.environment import describe
from fastamp.bench.options import DEFAULT, number, refuse
from fastamp.bench.record import BASELINE, Measurement, read_baseline, read_bound
from fastamp.bench.tasks import BrokenTask

PROGRAM = "python -m fastamp.bench"
# Each has prepare(args), and add_options(add) or none.
COMMANDS: dict[str, Any] = {
    "train": main_job,
    "all": main_job.All,
    "step": step,
    "loader": loader,
    "timer": timer,
    "latency": latency,
    "doctor": doctor,
}
STATUS = """Exit status: 0; 1 a loss has become NaN, with --check a target is missed, or a bound of
--fail-on; 2 a bad argument, a task that breaks its contract, or a result that cannot be written; 3
there is no verdict: with --check one is inconclusive, all are n/a, or there is no target; with
--fail-on the change is inconclusive or this run lacks the metric; or the --baseline is of another
schema, command, job or machine."""
MOVES = """a metric and how far it may move from the baseline, as in 'speedup:-5%%' or
'step_time:+10%%'; may be given several times"""


def _writable_file(text: str) -> Path:
    path = Path(text).absolute()
    needed = path if path.exists() else f"{path.parent}/."  # a folder
    if path.is_dir() or not os.access(needed, os.W_OK):
        refuse(text, "is no file that can be written")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    args = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        job, work = COMMANDS[args.command].prepare(args)
        run = {"command": args.command, "environment": describe(args.device), "job": job}
        if args.baseline is not None and (found := record.differences(args.baseline, run)):
            return _say(args, f"no verdict: the baseline cannot be compared: {'; '.join(found)}", 3)
        for name, _ in args.fail_on:
            if args.baseline is None:
                refuse(name, "needs a --baseline", "--fail-on")
            if name not in args.baseline["metrics"]:
                has = ", ".join(args.baseline["metrics"])
                refuse(name, f"is no metric of the baseline, which has {has}", "--fail-on")
        report = work()
        known = {each.name: each for each in report.measurements}
        changes = [
            record.hold(known.get(name, Measurement(name=name, interval=None)), args.baseline, most)
            for name, most in args.fail_on
        ]
        measurements = record.doubt([*report.measurements, *changes], report.races)
        _write(record.make_record(replace(report, measurements=measurements), run), args)
    except argparse.ArgumentError as error:
        return _say(args, f"error: {error}")
    except BrokenTask as error:
        task = f"argument task: {args.task!r}" if "task" in args else "a task"
        print(error.trace, end="", file=sys.stderr)
        return _say(args, f"error: {task} breaks its contract: {error}")
    except OSError as error:
        return _say(args, f"error: cannot write {error.filename or 'the output'}: {error.strerror}")
    held = [each for each in measurements if each.target]
    judged = {each.verdict for each in held if args.check or each.base == BASELINE}
    if args.check and not judged and not report.failures:
        return _say(args, f"no verdict: {args.command} has no targets for --check", 3)
    status = 3 if "inconclusive" in judged or judged == {"n/a"} else 0
    return 1 if "fail" in judged or report.failures else status


def _say(args: argparse.Namespace, text: str, status: int = 2) -> int:
    """Print why there is no result, or no verdict; return the exit status."""
    print(f"{PROGRAM} {args.command}: {text}", file=sys.stderr)
    return status


def _write(found: dict[str, Any], args: argparse.Namespace) -> None:
    """Print a record, and write the requested files."""
    try:
        print(record.render(found), flush=True)
    finally:
        saved = json.dumps(found, indent=1, allow_nan=False) + "\n"
        for option, text in {"json": saved, "report": page.make(found)}.items():
            if (path := vars(args)[option]) is not None:
                try:
                    write(path, text.encode(errors="replace"))  # as in the name of a file
                except OSError as error:
                    raise OSError(error.errno, error.strerror, f"--{option} {path}") from None


def _parse(words: list[str]) -> argparse.Namespace:
    """Return the options; exit with 2 for a bad argument."""
    if not words or words[0] not in {*COMMANDS, "-h", "--help"}:
        words.insert(0, "train")
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure what mixed precision and fastamp gain on this machine.",
        epilog=f"Without a command: train; 'train --help' for its options. {STATUS}",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    where = "cuda or cpu (default: cuda where torch finds a GPU)"
    for name, command in COMMANDS.items():
        added = subparsers.add_parser(
            name,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            help=command.__doc__,
            description=command.__doc__,
            epilog=f"{STATUS}\n{getattr(command, 'VERBATIM', '')}",
        )
        add: Any = added.add_argument
        add("--device", choices=devices, default=devices[0], help=where)
        seed = f"of all random numbers {DEFAULT}"
        add("--seed", type=number(int, 0, 2**32), default=0, help=seed)
        add("--json", type=_writable_file, metavar="FILE", help="write what was measured to FILE")
        add("--report", type=_writable_file, metavar="FILE", help="write an HTML page to FILE")
        add("--baseline", type=read_baseline, metavar="FILE", help="a file of --json to be held to")
        add("--fail-on", type=read_bound, action="append", default=[], metavar="BOUND", help=MOVES)
        add("--check", action="store_true", help="exit with 1 if a target is missed")
        getattr(command, "add_options", lambda _: None)(add)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
