"""Repeat commands of the bench: do the intervals of five runs overlap, and are verdicts given?

`python benchmarks/repeat.py`, 45 minutes on two quiet cores: the main job, three shapes of `step`
and three jobs, five times each, in turn, in processes of their own. For each it prints the
intervals, how many of the ten pairs overlap, and how many runs give a verdict. Exit status: 0; 1
unless 95 % of all pairs overlap and 8 in 10 runs have a verdict. `--only rl --runs 2` measures a
part.

`--busy 20`: so many runs, of the subjects in turn, while every core is busy with another program.
Each verdict there is printed; one that a quiet run does not give is false. Exit status: 0; 1 if a
run gives a verdict other than that of the quiet runs in `--quiet FILE`, which a run before wrote.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

from fastamp.bench.environment import count_cores
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import SAID, UNTOLD, Interval

# The command of the bench, and the ratio that is read.
SUBJECTS = {
    "main": ("amp", "speedup"),
    "2000x1000": ("step --shapes 2000x1000 --work adamw", "speedup/2000x1000/adamw"),
    "gpt2": ("step --shapes gpt2 --work adamw", "speedup/gpt2/adamw"),
    "in-a-loop": (
        "step --shapes in-a-loop --work adamw-no-scaler",
        "speedup/in-a-loop/adamw-no-scaler",
    ),
    "mlp": ("jobs mlp", "speedup/mlp/fastamp"),
    "gpt": ("jobs gpt", "speedup/gpt/fastamp"),
    "rl": ("jobs rl", "speedup/rl/fastamp"),
}
BUSY = "while True: pass"
LEAST_OVERLAP, LEAST_VERDICTS = 0.95, 0.8


def run(name: str) -> dict[str, Any]:
    """Run a subject once; return its interval, its verdict and the noise."""
    command, metric = SUBJECTS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        words = [*command.split(), "--device", "cpu", "--json", str(path)]
        whole = [sys.executable, "-m", "fastamp.bench", *words]
        subprocess.run(whole, stdout=subprocess.DEVNULL, check=True)
        record = json.loads(path.read_text(encoding="utf-8"))
    [found] = [each for each in record["measurements"] if each["name"] == metric]
    ratio = Interval(**found["interval"]) if None not in found["interval"].values() else None
    told = not record["noise"] and found["verdict"] != UNTOLD and ratio is not None
    verdict = ratio.verdict if told and ratio is not None else UNTOLD
    row = {"name": name, "verdict": verdict, "noise": record["noise"], **found["interval"]}
    text = "no interval" if ratio is None else ratio.text(".3f", "x")
    print(f"{name:10} {text:24} {verdict}{'; ' * bool(row['noise'])}{row['noise']}", flush=True)
    return row


def summarize(rows: list[dict[str, Any]]) -> int:
    """Print how many pairs overlap and how many runs have a verdict; return the exit status."""
    pairs_of_all, told_of_all = [], []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        ends = [(row["low"] or 0.0, row["high"] or float("inf")) for row in own]
        pairs = [a[0] <= b[1] and b[0] <= a[1] for a, b in combinations(ends, 2)]
        told = [row["verdict"] != UNTOLD for row in own]
        print(f"{name:10} {sum(pairs)} of {len(pairs)} pairs overlap, ", end="")
        print(f"{sum(told)} of {len(told)} runs have a verdict")
        pairs_of_all += pairs
        told_of_all += told
    shares = sum(pairs_of_all) / max(len(pairs_of_all), 1), sum(told_of_all) / len(told_of_all)
    print(f"all: {shares[0]:.0%} of the pairs overlap, {shares[1]:.0%} of the runs have a verdict")
    return int(shares[0] < LEAST_OVERLAP or shares[1] < LEAST_VERDICTS)


def find_false(rows: list[dict[str, Any]], quiet: list[dict[str, Any]]) -> int:
    """Print and count the verdicts that no quiet run of the subject gives."""
    known = {(row["name"], row["verdict"]) for row in quiet}
    names = {row["name"] for row in quiet}
    told = [row for row in rows if row["verdict"] in SAID[:3]]
    false = [r for r in told if r["name"] in names and (r["name"], r["verdict"]) not in known]
    print(f"{len(told)} of {len(rows)} busy runs have a verdict, {len(false)} of them are false")
    return len(false)


def main() -> int:
    """Repeat, quiet or busy; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=SUBJECTS, default=[*SUBJECTS], metavar="NAME")
    add("--runs", type=number(int, 1), default=5, help=f"of each {DEFAULT}")
    add("--busy", type=number(int, 1), metavar="RUNS", help="all together, on busy cores")
    add("--quiet", type=Path, default=Path("repeat.json"), help=f"the quiet runs {DEFAULT}")
    args = parser.parse_args()
    if not args.busy:
        rows = [run(name) for _ in range(args.runs) for name in args.only]
        args.quiet.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        return summarize(rows)
    words = [sys.executable, "-c", BUSY]
    neighbours = [subprocess.Popen(words) for _ in range(count_cores())]
    try:
        rows = [run(args.only[place % len(args.only)]) for place in range(args.busy)]
    finally:
        for each in neighbours:
            each.kill()
            each.wait()
    quiet = json.loads(args.quiet.read_text(encoding="utf-8")) if args.quiet.exists() else []
    return int(find_false(rows, quiet) > 0)


if __name__ == "__main__":
    sys.exit(main())
