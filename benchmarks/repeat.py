"""Repeat commands of the bench: do the intervals of five runs overlap, and are verdicts given?

`python benchmarks/repeat.py`, 40 minutes on two quiet cores: the main job, three rows of `step`
and three jobs, five times each, in turn, in processes of their own. Each run is printed and written
when it ends; one that fails is counted, and the next goes on. The end says how many of the ten
pairs of intervals overlap, and how many runs give a verdict. Exit status: 0; 1 unless 95 % of all
pairs overlap and 8 in 10 runs have a verdict. `--only rl --runs 2` measures a part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from time import perf_counter
from typing import Any

from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import SAID, UNTOLD, Interval

# The command of the bench, and the ratio that is read.
SUBJECTS = {
    "main": ("train", "fastamp/bf16"),
    "2000x1000": ("step --rows 2000x1000/adamw", "speedup/2000x1000/adamw"),
    "open": ("step --rows 2000x1000/adamw-open", "speedup/2000x1000/adamw-open"),
    "in-a-loop": ("step --rows in-a-loop/adamw", "speedup/in-a-loop/adamw"),
    "mlp": ("train mlp", "fastamp/fp32"),
    "rl": ("train rl", "fastamp/fp32"),
    "small-gpt": ("train small-gpt", "fastamp/fp32"),
}
FAILED = "failed"
LEAST_OVERLAP, LEAST_VERDICTS = 0.95, 0.8


def run(name: str) -> dict[str, Any]:
    """Run a subject once; return its interval, its verdict and the noise, or that it failed."""
    command, metric = SUBJECTS[name]
    row: dict[str, Any] = {"name": name, "verdict": FAILED, "low": None, "high": None}
    start_s, said = perf_counter(), ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        words = [*command.split(), "--device", "cpu", "--json", str(path)]
        whole = [sys.executable, "-I", "-m", "fastamp.bench", *words]
        done = subprocess.run(whole, stdout=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            record = json.loads(path.read_text(encoding="utf-8"))
            [found] = [each for each in record["measurements"] if each["name"] == metric]
            ends, said = found["interval"], record["noise"]
            ratio = Interval(**ends) if None not in ends.values() else None
            is_told = ratio is not None and not said and found["verdict"] != UNTOLD
            row |= {"verdict": ratio.verdict if ratio is not None and is_told else UNTOLD, **ends}
    row |= {"noise": said, "elapsed_s": perf_counter() - start_s}
    text = "{value} [{low}, {high}]".format(**{"value": None} | row)
    if row["low"] is not None and row["high"] is not None:
        text = "{value:.3f}x [{low:.3f}, {high:.3f}]".format(**row)
    words = [f"{name:10} {text:24} {row['verdict']}", f"{row['elapsed_s']:.0f} s", said]
    print("; ".join(filter(None, words)), flush=True)
    return row


def run_all(names: list[str], path: Path) -> list[dict[str, Any]]:
    """Run subjects in turn; the file has all rows so far after each of them."""
    rows: list[dict[str, Any]] = []
    for name in names:
        rows.append(run(name))
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows


def summarize(rows: list[dict[str, Any]]) -> int:
    """Print how many pairs overlap and how many runs have a verdict; return the exit status."""
    pairs_of_all, told_of_all = [], []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        known = [row for row in own if row["verdict"] != FAILED]
        ends = [(row["low"] or 0.0, row["high"] or float("inf")) for row in known]
        pairs = [a[0] <= b[1] and b[0] <= a[1] for a, b in combinations(ends, 2)]
        told = [row["verdict"] in SAID[:3] for row in own]
        print(f"{name:10} {sum(pairs)} of {len(pairs)} pairs overlap, ", end="")
        print(f"{sum(told)} of {len(told)} runs have a verdict")
        pairs_of_all += pairs
        told_of_all += told
    shares = sum(pairs_of_all) / max(len(pairs_of_all), 1), sum(told_of_all) / len(told_of_all)
    print(f"all: {shares[0]:.0%} of the pairs overlap, {shares[1]:.0%} of the runs have a verdict")
    return int(shares[0] < LEAST_OVERLAP or shares[1] < LEAST_VERDICTS)


def main() -> int:
    """Repeat; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=SUBJECTS, default=[*SUBJECTS], metavar="NAME")
    add("--runs", type=number(int, 1), default=5, help=f"of each {DEFAULT}")
    add("--json", type=Path, default=Path("repeat.json"), help=f"has all rows {DEFAULT}")
    args = parser.parse_args()
    return summarize(run_all(args.only * args.runs, args.json))


if __name__ == "__main__":
    sys.exit(main())
