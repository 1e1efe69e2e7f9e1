"""The command line of the benchmark; without a subcommand it trains a task, the main job."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastamp._files import write
from fastamp.bench import doctor, latency, loader, main_job, page, record, step, timer
from fastamp.bench.environment import describe
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.record import BASELINE, Measurement, Task, read_baseline, read_bound
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
        message = f"{text!r} is no file that can be written"
        raise argparse.ArgumentTypeError(message)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    args, (job, work) = _parse(list(sys.argv[1:] if argv is None else argv))
    run = {"command": args.command, "environment": describe(args.device), "job": job}
    for problem, status in _find_problems(args, run):
        return _say(args, problem, status)
    try:
        report = work()
        known = {each.name: each for each in report.measurements}
        changes = [
            record.hold(known.get(name, Measurement(name=name, interval=None)), args.baseline, most)
            for name, most in args.fail_on
        ]
        measurements = record.doubt([*report.measurements, *changes], report.races)
        _write(record.make_record(replace(report, measurements=measurements), run), args)
    except BrokenTask as error:
        task = f"argument task: {args.task!r}" if "task" in args else "a task"
        print(error.trace, end="", file=sys.stderr)
        return _say(args, f"error: {task} breaks its contract: {error}")
    except OSError as error:
        return _say(args, f"error: cannot write {error.filename or 'the output'}: {error.strerror}")
    held = [each for each in measurements if each.target]
    judged = {each.verdict for each in held if args.check or each.base == BASELINE}
    if "fail" in judged or report.failures:
        return 1
    if args.check and not judged:
        return _say(args, f"no verdict: {args.command} has no targets for --check", 3)
    return 3 if "inconclusive" in judged or judged == {"n/a"} else 0


def _find_problems(args: argparse.Namespace, run: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield why a run cannot be held to the baseline, and the exit status."""
    if args.baseline is not None and (found := record.differences(args.baseline, run)):
        yield f"no verdict: the baseline cannot be compared: {'; '.join(found)}", 3
    for name, _ in args.fail_on:
        if name not in (known := args.baseline["metrics"]):
            has = f"is no metric of the baseline, which has {', '.join(known)}"
            yield f"error: argument --fail-on: {name!r} {has}", 2


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
                    write(path, text.encode())
                except OSError as error:
                    raise OSError(error.errno, error.strerror, f"--{option} {path}") from None


def _parse(words: list[str]) -> tuple[argparse.Namespace, Task]:
    """Return the options, and the job with its function; exit with 2 for a bad argument."""
    if not words or words[0] not in {*COMMANDS, "-h", "--help"}:
        words.insert(0, "train")
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure what mixed precision and fastamp gain on this machine.",
        epilog=f"Without a command: train; 'train --help' for its options. {STATUS}",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    for name, command in COMMANDS.items():
        added = subparsers.add_parser(
            name,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            help=command.__doc__,
            description=command.__doc__,
            epilog=f"{STATUS}\n{getattr(command, 'VERBATIM', '')}",
        )
        _add_options(added.add_argument)
        getattr(command, "add_options", lambda _: None)(added.add_argument)
    args = parser.parse_args(words)
    refused = subparsers.choices[args.command].error
    if args.fail_on and args.baseline is None:
        refused("argument --fail-on: needs a --baseline")
    try:
        return args, COMMANDS[args.command].prepare(args)
    except argparse.ArgumentError as error:
        refused(str(error))
    except BrokenTask as error:
        print(error.trace, end="", file=sys.stderr)
        refused(f"argument task: {args.task!r} breaks its contract: {error}")


def _add_options(add: Callable[..., object]) -> None:
    """Add the options of all commands."""
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    where = "cuda or cpu (default: cuda where torch finds a GPU)"
    add("--device", choices=devices, default=devices[0], help=where)
    add("--seed", type=number(int, 0, 2**32), default=0, help=f"of all random numbers {DEFAULT}")
    add("--json", type=_writable_file, metavar="FILE", help="write all that was measured to FILE")
    add("--report", type=_writable_file, metavar="FILE", help="write an HTML page to FILE")
    add("--baseline", type=read_baseline, metavar="FILE", help="a file of --json to be held to")
    bound: dict[str, Any] = {"type": read_bound, "action": "append", "default": []}
    add("--fail-on", **bound, metavar="BOUND", help=MOVES)
    add("--check", action="store_true", help="exit with 1 if a target is missed")


if __name__ == "__main__":
    sys.exit(main())
