"""Make the record of a GPU out of the lines that the parts of `on_gpu.sh` have left.

    python benchmarks/gpu_record.py RESULTS LINES...

A line that opens a part has its name, date, commit and device; one that closes it has a status, and
a part that was stopped has no such line. What stands between is the part's: cases that were
compared, tests that ran, rows that were measured. A part of an older record stays until it runs
again. Needs no torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RAN = {"passed", "failed", "skipped"}  # outcomes of a test


def read(text: str) -> dict[str, dict[str, Any]]:
    """Return each part that was opened; its `lines` as objects. What is no JSON is left out."""
    parts: dict[str, dict[str, Any]] = {}
    part: dict[str, Any] = {"lines": []}
    for each in text.splitlines():
        try:
            line = json.loads(each)
        except ValueError:  # the half of a line
            continue
        if not isinstance(line, dict):
            continue
        if "part" in line:
            name = line.pop("part")
            part = parts.setdefault(name, {"status": "cut short", "lines": []})
            part |= line
        else:
            part["lines"].append(line)
    return parts


def shorten(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part as the record has it: right cases, and tests that passed, as counts."""
    lines = part.pop("lines")
    cases = [line for line in lines if "case" in line]
    tests = [line for line in lines if "test" in line]
    files = [line for line in lines if "file" in line and "test" not in line]
    rows = [line for line in lines if line not in [*cases, *tests, *files]]
    if cases:
        part["cases"] = {"count": len(cases), "wrong": [c for c in cases if not c.get("ok")]}
    if files or tests:
        names = dict.fromkeys([line["file"] for line in [*files, *tests]])
        ends = {line.pop("file"): line for line in files}
        part["files"] = {name: count(name, tests, ends.get(name, {})) for name in names}
    return part | ({"rows": rows} if rows else {})


def count(file: str, tests: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
    """Return how many tests of a file passed, which failed, and if it was stopped, which ran."""
    own = [line for line in tests if line["file"] == file]
    found = {"end": "cut short", **end}
    for outcome in sorted({line["outcome"] for line in own}):
        found[outcome] = sum(line["outcome"] == outcome for line in own)
    failed = [{k: line[k] for k in ("test", "why") if k in line} for line in own]
    failed = [line for line, its in zip(failed, own, strict=True) if its["outcome"] == "failed"]
    if failed:
        found["failures"] = failed
    if found["end"] not in RAN | {"no tests"}:
        found["ran"] = [line["test"] for line in own]
    return found


def make(results: Path, lines: Path) -> str:
    """Write the record, and return its path; an empty one if there are no lines."""
    parts = {name: shorten(part) for name, part in read(lines.read_text()).items()}
    device = next((part["device"] for part in parts.values()), "")
    if not device:
        return ""
    out = results / (device.lower().replace(" ", "_") + ".json")
    old: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    record = {"device": device, "parts": {**old.get("parts", {}), **parts}}
    out.write_text(json.dumps(record, indent=1) + "\n")
    return str(out)


if __name__ == "__main__":
    for file in sys.argv[2:]:
        print(make(Path(sys.argv[1]), Path(file)))
