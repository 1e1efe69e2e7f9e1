"""The command line of the benchmark; without a subcommand it trains a task, the main job."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fastamp._files import write
from fastamp.bench import (
    all_jobs,
    baseline,
    doctor,
    latency,
    loader,
    main_job,
    page,
    step,
    timer,
)
from fastamp.bench.environment import describe
from fastamp.bench.options import DEFAULT, OutputError, escape_output, number, refuse, say
from fastamp.bench.race import SAID
from fastamp.bench.record import SCHEMA_VERSION, Task, doubt, make_record, render
from fastamp.bench.tasks import BrokenTask

PROGRAM = "python -m fastamp.bench"
# Each module has METRICS, which its help lists, prepare(args), and add_options(add) or none.
COMMANDS = {
    "train": main_job,
    "all": all_jobs,
    "step": step,
    "loader": loader,
    "timer": timer,
    "latency": latency,
    "doctor": doctor,
}
STATUS = """Exit status: 0; 1 a target is missed, with --check, or a bound of --fail-on, or a loss
has become NaN; 2 a bad argument, a task that breaks its contract, or a result that cannot be
written; 3 the environment does not allow a verdict: with --check where one is inconclusive, all are
n/a or there is none, with --fail-on where the change is inconclusive or this run lacks the metric,
and with a --baseline of another schema, command, job or machine."""
MOVES = """a metric and how far it may move from the baseline, as in 'speedup:-5%%' or
'step_time:+10%%'; may be given several times"""


class _Parser(argparse.ArgumentParser):
    """Ends its help with a text whose lines stay as they are."""

    verbatim = ""

    def format_help(self) -> str:
        return super().format_help() + self.verbatim


def _writable_file(text: str) -> Path:
    path = Path(text).absolute()
    with suppress(OSError):  # the name may be too long
        needed = path if path.exists() else Path(os.path.realpath(path)).parent
        if os.access(needed, os.W_OK) and needed.is_dir() != path.exists():
            return path
    message = f"{text!r} is no file that can be written"
    raise argparse.ArgumentTypeError(message)


def _device(text: str) -> str:
    if text == "cuda" and not torch.cuda.is_available():
        message = f"{text!r} needs a GPU, and torch finds none"
        raise argparse.ArgumentTypeError(message)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    escape_output()
    args, (job, measure) = _parse(list(sys.argv[1:] if argv is None else argv))
    run = {"command": args.command, "environment": describe(args.device), "job": job}
    found = baseline.differences(args.baseline, run) if args.baseline is not None else []
    if found:
        text = f"no verdict: the baseline cannot be compared: {'; '.join(found)}"
        print(f"{PROGRAM} {args.command}: {text}", file=sys.stderr)
        return 3
    try:
        report = measure()
    except (BrokenTask, OutputError) as error:
        return _refuse(args, error)
    known = {each.name: each.interval for each in report.measurements}
    counted = {each.name for each in report.measurements if each.is_counted}
    changes = [
        replace(
            baseline.hold(name, known.get(name), args.baseline["metrics"][name], most),
            is_counted=name in counted,
        )
        for name, most in args.fail_on
    ]
    kept = [each for each in report.measurements if args.check and each.verdict not in {"", *SAID}]
    judged = {each.verdict for each in doubt([*kept, *changes], report.races)}
    unjudged = args.check and not judged
    closing = [f"no verdict: {args.command} has no targets for --check"] * unjudged
    measurements = doubt([*report.measurements, *changes], report.races)
    report = replace(report, measurements=measurements, closing=report.closing + closing)
    problems = _write(make_record(report, run), args)
    if problems:
        return _refuse(args, OutputError(0, "; ".join(problems)))
    if "fail" in judged or report.failures:
        return 1
    return 3 if unjudged or "inconclusive" in judged or judged == {"n/a"} else 0


def _refuse(args: argparse.Namespace, error: BrokenTask | OutputError) -> int:
    """Print why the task is broken or what cannot be written; return the exit status."""
    if isinstance(error, BrokenTask):
        task = f"argument task: {args.task!r}" if "task" in args else "a task"
        problem = f"{task} breaks its contract: {error}"
        print(error.trace, end="", file=sys.stderr)
    else:
        problem = f"cannot write {error.strerror}"
    print(f"{PROGRAM} {args.command}: error: {problem}", file=sys.stderr)
    return 2


def _write(record: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Print a record and write the requested files; return what could not be written."""
    problems = []
    pages: dict[str, Callable[[], str]] = {
        "json": lambda: json.dumps(record, indent=1, allow_nan=False) + "\n",
        "report": lambda: page.make(record),
    }
    try:
        say(render(record))
    except OutputError as error:
        problems.append(str(error.strerror))
    for option, make in pages.items():
        path = vars(args)[option]
        if path is not None:
            try:
                write(path, make().encode())
            except OSError as error:
                problems.append(f"--{option} {path}: {error.strerror}")
    return problems


def _parse(words: list[str]) -> tuple[argparse.Namespace, Task]:
    """Return the options, and the job with its function; exit with 2 for a bad argument."""
    if not words or words[0] not in {*COMMANDS, "-h", "--help"}:
        words.insert(0, "train")
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure what mixed precision and fastamp gain on this machine.",
        epilog=f"Without a command: train; 'train --help' for its options. {STATUS}",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command", parser_class=_Parser)
    for name, command in COMMANDS.items():
        added = subparsers.add_parser(
            name,
            allow_abbrev=False,
            conflict_handler="resolve",  # a command may redefine a shared option
            help=command.__doc__,
            description=command.__doc__,
            epilog=f"Metrics for --fail-on: {command.METRICS}. {STATUS}",
        )
        added.verbatim = getattr(command, "VERBATIM", "")
        _add_options(added.add_argument, command)
    args = parser.parse_args(words)
    try:
        for name, _ in args.fail_on:
            if args.baseline is None:
                refuse("--fail-on", name, "needs a --baseline")
            comparable = args.baseline["schema_version"] == SCHEMA_VERSION  # else: status 3
            if comparable and name not in args.baseline["metrics"]:
                known = ", ".join(args.baseline["metrics"])
                refuse("--fail-on", name, f"is no metric of the baseline, which has {known}")
        files = [os.path.realpath(path) for path in (args.json, args.report) if path]
        if len({*files}) < len(files):
            refuse("--report", str(args.report), "is the file of --json too")
        task: Task = COMMANDS[args.command].prepare(args)
        names = {name.partition("/")[0] for name, _ in args.fail_on}
        if "accuracy" in names and task[0].get("steps", 0) is None:
            refuse("--fail-on", "accuracy", "needs --steps: without it runs differ in their length")
    except argparse.ArgumentError as error:
        subparsers.choices[args.command].error(str(error))
    except (BrokenTask, OutputError) as error:
        raise SystemExit(_refuse(args, error)) from None
    return args, task


def _add_options(add: Callable[..., object], command: ModuleType) -> None:
    """Add the shared options, and a command's own."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    where = "(default: cuda where torch finds a GPU)"
    add("--device", type=_device, choices=("cpu", "cuda"), default=here, help=where)
    add("--seed", type=number(int, 0, 2**32), default=0, help=f"of all random numbers {DEFAULT}")
    add("--json", type=_writable_file, metavar="FILE", help="write all that was measured to FILE")
    add("--report", type=_writable_file, metavar="FILE", help="write an HTML page to FILE")
    add("--baseline", type=baseline.read, metavar="FILE", help="a file written by --json before")
    bound = baseline.bound
    add("--fail-on", type=bound, action="append", default=[], metavar="BOUND", help=MOVES)
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    if hasattr(command, "add_options"):
        command.add_options(add)


if __name__ == "__main__":
    sys.exit(main())
