"""The command line of the benchmark; without a subcommand it runs the main job, ``amp``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from fastamp.bench import baseline, latency, loader, main_job, page, selftest, step, timer
from fastamp.bench.command import STATUS
from fastamp.bench.environment import describe
from fastamp.bench.record import Task, make_record, render
from fastamp.train.options import refuse

PROGRAM = "python -m fastamp.bench"
# Modules with add_parser(subparsers), whose parser's default `prepare` makes a Task of the options.
COMMANDS = (main_job, step, loader, timer, latency, selftest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    args, task = _parse(list(sys.argv[1:] if argv is None else argv))
    run = {"command": args.command, "environment": describe(args.device), "job": task.job}
    found = baseline.differences(args.baseline, run) if args.baseline is not None else []
    if found:
        text = f"no verdict: the baseline cannot be compared: {'; '.join(found)}"
        print(f"{PROGRAM} {args.command}: {text}", file=sys.stderr)
        return 3
    report = task.run()
    judged = [target.verdict for target in report.verdicts] if args.check else []
    for name, most in args.fail_on:
        saved = args.baseline["metrics"][name]
        report.verdicts.append(baseline.hold(name, report.metrics[name], saved, most))
        judged.append(report.verdicts[-1].verdict)
    record = make_record(report, run)
    print(render(record), flush=True)
    if args.json is not None:
        args.json.write_bytes((json.dumps(record, indent=1, allow_nan=False) + "\n").encode())
    if args.report is not None:
        args.report.write_bytes(page.make(record).encode())
    if "fail" in judged:
        return 1
    return 3 if "inconclusive" in judged or set(judged) == {"n/a"} else 0


def _parse(words: list[str]) -> tuple[argparse.Namespace, Task]:
    """Return the options and the task that they ask for; exits with 2 for a bad argument."""
    if not words or (words[0].startswith("-") and words[0] not in {"-h", "--help"}):
        words.insert(0, "amp")
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure what mixed precision and fastamp gain on this machine.",
        epilog=f"Without a command: amp; 'amp --help' for its options. {STATUS}",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(words)
    try:
        for name, _ in args.fail_on:
            if args.baseline is None:
                refuse("--fail-on", name, "needs a --baseline")
            if name not in args.baseline["metrics"]:
                known = ", ".join(args.baseline["metrics"])
                refuse("--fail-on", name, f"is no metric of the baseline, which has {known}")
        return args, args.prepare(args)
    except argparse.ArgumentError as error:
        subparsers.choices[args.command].error(str(error))


if __name__ == "__main__":
    sys.exit(main())
