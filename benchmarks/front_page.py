"""Draw what people see first: what each part gains, as a table and as a picture, from records.

`python benchmarks/front_page.py` writes both into README.md and docs/, and all figures into
docs/how/measured.md, from the records that are kept in benchmarks/results. `--measure` makes these
anew, on a quiet machine and in some 40 minutes; `--measure loader` one of them. `--check` writes
nothing and exits with 1 if the pages are not what the records give. The record of a machine that
was too noisy is not kept, and the status is 3: measure that command again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from fastamp.bench.page import STYLE, Point, draw
from fastamp.bench.race import Interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "gains.svg"
PAGES = {ROOT / "README.md": "docs/", ROOT / "docs" / "index.md": ""}  # and where docs/ is
MEASURED = ROOT / "docs" / "how" / "measured.md"
BEGIN, END = "<!-- by benchmarks/front_page.py -->\n", "<!-- end -->\n"
GAIN = 1.005  # the least low end that two digits tell from 1.00
COMMANDS = {  # by the record that has their rows
    "step": "-m fastamp.bench step",
    "rows": "benchmarks/step_rows.py --rows gpt2/norm gpt2/clip gpt2/adamw-zero-grad "
    "gpt2/adamw-bf16 gpt2/adamw-8bit 465gx1000/adamw network/adamw-no-scaler lora/adamw-no-scaler "
    "width128/muon width384/muon",
    "loader": "-m fastamp.bench loader",
    "jobs": "-m fastamp.bench all small-gpt mlp rl examples/task_images.py",
}


class Row(NamedTuple):
    """A line of the table, and where its figures stand."""

    text: str
    base: str  # what fastamp is compared with
    command: str
    race: str
    metrics: tuple[str, ...]  # the first that the record has


def _alone(command: str, race: str, text: str, base: str, metric: str = "speedup") -> Row:
    return Row(text, base, command, race, (f"{metric}/{race}",))


def _task(name: str, text: str, task: str = "") -> Row:
    task = task or name
    metrics = (f"{task}/fastamp/bf16", f"{task}/fastamp/fp32")
    return Row(f"`{name}`: {text}", "", "jobs", task, metrics)


BY_HAND = "`index_select`, by hand"
# Eight rows with that of a GPU, two of them without a gain; all others are in docs/how/measured.md.
GROUPS = {
    "A part alone": [
        _alone("step", "2000x1000/adamw", "step: 2,000 tensors of 1,000", "fused AdamW"),
        _alone("step", "gpt2/adamw", "step: GPT-2, 124 M", "fused AdamW"),
        _alone("loader", "tensors", "loader: rows of a TensorDataset", "DataLoader, item by item"),
        _alone("loader", "tensors", "loader: rows of a TensorDataset", BY_HAND, "of_plain"),
    ],
    "A whole training": [
        _task("small-gpt", "two layers, 8 x 64 bytes"),
        _task("mlp", "784-256-10, batches of 256"),
        _task("images", "256 JPEGs to 224x224, 8", "examples/task_images.py"),
    ],
}
# Rows of `bench step`, of which on_gpu.sh keeps the text.
ON_A_GPU = {"gpt2/adamw": ("on an H200: a step of GPT-2", "fused AdamW")}
GPU = "nvidia_h200"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="1000"'
ABOUT = """Ratios: means over builds in fresh processes, 95 % intervals. Grey: no gain.
`small-gpt` to `images`: whole trainings, over torch's loop with its DataLoader. """


class Found(NamedTuple):
    """The figures of a row."""

    text: str
    base: str
    ratio: Interval
    times: list[str]  # of torch and fastamp


def read_records() -> dict[str, Any]:
    """Return the kept records by command; the rows of one that is not there yet are left out."""
    paths = {command: RESULTS / f"{command}.json" for command in COMMANDS}
    return {n: json.loads(p.read_text(encoding="utf-8")) for n, p in paths.items() if p.exists()}


def read_figures(records: dict[str, Any]) -> dict[str, list[Found]]:
    """Return the figures of every row, by group."""
    found = {
        title: [_find(records[row.command], row) for row in rows if _has(records, row)]
        for title, rows in GROUPS.items()
    }
    return {**found, "On a GPU": read_gpu()[0]}


def read_gpu() -> tuple[list[Found], str]:
    """Return the rows of the kept record of a GPU, and what it is."""
    parts = json.loads((RESULTS / f"{GPU}.json").read_text(encoding="utf-8"))["parts"]
    rows = [row for part in ("step", "rows") for row in parts[part]["rows"]]
    facts = {name: value for row in parts["facts"]["rows"] for name, value in row.items()}
    found = []
    for race, (text, base) in ON_A_GPU.items():
        row = next(row for row in rows if row["row"] == f"step {race}")
        said = next(each for each in row["measurements"] if each.startswith(f"speedup/{race} "))
        value, low, high = map(float, re.findall(r"[\d.]+", said.removeprefix(f"speedup/{race} ")))
        times = {each["arm"]: f"{float(each['median ms']):.2f} ms" for each in row["table"]}
        figures = [times["torch"], times["fastamp"]]
        found.append(Found(text, base, Interval(value=value, low=low, high=high), figures))
    return found, f"{facts['device']}, {parts['step']['begun'][:10]}."


def _has(records: dict[str, Any], row: Row) -> bool:
    return row.command in records and row.race in records[row.command]["races"]


def _find(record: dict[str, Any], row: Row) -> Found:
    found = {each["name"]: each for each in record["measurements"]}
    each = next((found[metric] for metric in row.metrics if metric in found), None)
    if each is None:
        sys.exit(f"the record has no {row.metrics[0]}: --measure {row.command}")
    times = [_show(_time_s(record, row.race, each[arm])) for arm in ("base", "arm")]
    return Found(row.text, row.base or each["base"], _read(each), times)


def _read(measurement: dict[str, Any]) -> Interval:
    """Return a figure's interval; None is an end that was not finite."""
    ends: dict[str, float | None] = measurement["interval"]
    return Interval(**{end: math.nan if x is None else x for end, x in ends.items()})


def _show(time_s: float) -> str:
    """Return a time in ms, or in us where it is short."""
    value, unit = (time_s * 1e3, "ms") if time_s > 1e-4 else (time_s * 1e6, "us")
    return f"{value:.{1 if value >= 10 else 2}f} {unit}"


def _time_s(record: dict[str, Any], race: str, arm: str) -> float:
    """Return the median time of a step, a batch or a region."""
    details = record["details"].get(race, {})
    batches_per_s: float | None = details.get(arm, {}).get("batches/s")
    if batches_per_s is not None:
        return 1 / batches_per_s
    time_s: float = record["races"][race]["arms"][arm]["time_s"]["median"]
    return time_s / details.get("steps", record["job"].get("regions", 1))


def _say(ratio: Interval) -> str:
    return ratio.text(".2f" if ratio.value < 10 else ".1f", "x")


def make_table(figures: dict[str, list[Found]], records: dict[str, Any], docs: str) -> str:
    """Return the block of a page; `docs` is where it finds the documentation."""
    lines = [f"![What each part of fastamp gains]({docs}images/gains.svg)", ""]
    heads = ("", "over", "torch", "fastamp", "times as fast")
    lines += [f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|---|---|--:|--:|--:|"]
    for row in (row for rows in figures.values() for row in rows):
        cells = [row.text, row.base, *row.times, _say(row.ratio)]
        lines.append(f"| {' | '.join(cells)} |")
    about = [*ABOUT.split(), "`python -m fastamp.bench`", *_sources(records)]
    about.append(f"[On a GPU]({docs}how/gpu.md): {read_gpu()[1]}")
    lines += ["", *wrap(" ".join(about), 120, break_on_hyphens=False), ""]
    return "\n".join(lines)


def _sources(records: dict[str, Any]) -> Iterator[str]:
    machines: dict[str, list[str]] = {}
    used = {row.command for rows in GROUPS.values() for row in rows}
    for record in (record for command, record in records.items() if command in used):
        machines.setdefault(_machine(record), []).append(f"`{record['command']}`")
    for machine, commands in machines.items():
        yield f"{', '.join(commands)}: {machine}."


def _machine(record: dict[str, Any]) -> str:
    env, day = record["environment"], record["created"][:10]
    torch = env["torch"].partition("+")[0]
    return f"{env['threads']} cores of {env['device_name']}, torch {torch}, {day}"


def list_all(records: dict[str, Any]) -> str:
    """Return every ratio of fastamp's in the records, and the losses of lean training."""
    lines = []
    for command, record in records.items():
        lines += ["", f"`python {COMMANDS[command]}`: {_machine(record)}.", ""]
        lines += ["| race | arm | over | its time | arm's | ratio |", "|---|---|---|--:|--:|--:|"]
        for each in (each for each in record["measurements"] if "fastamp" in each["arm"]):
            race = max((race for race in record["races"] if race in each["name"]), key=len)
            times = [_show(_time_s(record, race, each[arm])) for arm in ("base", "arm")]
            cells = [f"`{race}`", each["arm"], each["base"], *times, _say(_read(each))]
            lines.append(f"| {' | '.join(cells)} |")
    lean = json.loads((RESULTS / "lean_quality.json").read_text(encoding="utf-8"))
    lines += ["", f"`python benchmarks/lean_quality.py`: losses after {lean['steps']:,} steps.", ""]
    lines += ["| job | weights, moments | by seed |", "|---|---|---|"]
    for job, arms in lean["jobs"].items():
        for arm, curves in arms.items():
            losses = ", ".join(f"{curve[-1]:.3f}" for curve in curves)
            lines.append(f"| `{job}` | {arm} | {losses} |")
    return "\n".join([*lines, "", ""])


def make_picture(figures: dict[str, list[Found]]) -> str:
    """Return the picture, a file of its own: a point for each ratio, grey where nothing gains."""
    points = []
    for title, found in figures.items():
        points += [Point(title)] * bool(found)
        for (name, said), row in zip(_words(found), found, strict=True):
            ends = (row.ratio.low, row.ratio.value, row.ratio.high)
            points.append(Point(name, said, ends, "good" if row.ratio.low >= GAIN else "soft"))
    style = f"<style>{STYLE}svg {{ background: var(--paper) }}</style>"
    first, rest = draw("times as fast", points).split("\n", 1)
    return f"{first.replace('<svg', SVG)}\n{style}\n{rest}\n"


def _words(found: list[Found]) -> list[tuple[str, str]]:
    """Return the name of each row of the picture, and what stands beside it."""
    words = [(row.text, f"{_say(row.ratio)} over {row.base}") for row in found]
    return [(name.replace("`", ""), said.replace("`", "")) for name, said in words]


def measure(command: str) -> str:
    """Run a command of the bench, and keep its record without the rounds; return why not, or ""."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        words = [*COMMANDS[command].split(), "--device", "cpu", "--json", file.name]
        subprocess.run([sys.executable, "-I", *words], check=True, cwd=ROOT)
        record = json.loads(Path(file.name).read_text(encoding="utf-8"))
    if record["noise"]:
        return f"{command}: {record['noise']}; nothing is kept"
    del record["losses"]
    for race in record["races"].values():
        race["builds"] = len(race["builds"])
    path = RESULTS / f"{command}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the table and the picture, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    names = parser.add_argument("--measure", nargs="*", metavar="COMMAND", default=None)
    names.choices, names.help = COMMANDS, f"some of {', '.join(COMMANDS)} (default: all)"
    args = parser.parse_args(argv)
    commands = [] if args.measure is None else args.measure or COMMANDS
    refused = [*filter(None, map(measure, commands))]
    records = read_records()
    figures = read_figures(records)
    wrong = []
    blocks = {path: make_table(figures, records, docs) for path, docs in PAGES.items()}
    for path, block in {**blocks, MEASURED: list_all(records)}.items():
        old = path.read_text(encoding="utf-8")
        before, _, rest = old.partition(BEGIN)
        new = f"{before}{BEGIN}{block}{END}{rest.partition(END)[2]}"
        wrong += [path] if new != old else []
        if not args.check:
            path.write_text(new, encoding="utf-8")
    if args.check:
        wrong += [PICTURE] if PICTURE.read_text(encoding="utf-8") != make_picture(figures) else []
        print("".join(f"{path.name} is not what the records give\n" for path in wrong), end="")
        return 1 if wrong else 0
    PICTURE.write_text(make_picture(figures), encoding="utf-8")
    print("".join(f"{why}\n" for why in refused), end="")
    return 3 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
