"""One self-contained page of a record: no script, nothing from elsewhere, light and dark."""

import json
import math
from html import escape
from typing import Any

from fastamp.bench.baseline import BASELINE
from fastamp.bench.pictures import STYLE, Point, draw
from fastamp.bench.record import is_judged

PAGE = """
body { margin: 0 auto; max-width: 1100px; padding: 16px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem } p { margin: .3rem 0 } p, th { color: var(--soft) }
.lead { color: var(--ink); font-size: 1.2rem; margin: 1rem 0 } .verdict { color: var(--ink) }
.scroll { overflow-x: auto; overflow-wrap: normal } svg { display: block; min-width: 1000px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 6px 10px; text-align: left; border-bottom: 1px solid var(--line) }
"""
HEAD = """<!doctype html>
<html lang="en"><head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style></head>
"""
KINDS = {"pass": "good", "faster": "good", "fail": "bad", "slower": "bad", "equal": "soft"}
COMPARED = """A point is a ratio, by its name for --fail-on, the bar its interval, and the upright
line its target. Green: pass or faster; red: fail or slower; grey: equal; hollow: undecided."""


def make(record: dict[str, Any]) -> str:
    """Return the page of a record; what is not text in the name of a file becomes "?"."""
    record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    title = escape(f"fastamp bench: {record['command']}")
    leads = [record["noise"], *record["failures"], record["sentence"]]
    facts = {"measured": record["created"], **record["environment"], **record["job"]}
    rows = [[name, json.dumps(value)] for name, value in facts.items()]
    found = [each for each in record["measurements"] if each["interval"]]
    points = [_point(each) for each in found if each["unit"] == "x" or each["base"] == BASELINE]
    judged = [each["text"] for each in record["measurements"] if is_judged(each)]
    body = [
        f"<body>\n<h1>{title}</h1>",
        *(_paragraph(text, "lead") for text in leads if text),
        *(_paragraph(text, "verdict") for text in judged),
        f"<h2>Comparisons</h2>\n{_paragraph(COMPARED)}" if points else "",
        f'<div class="scroll">{draw("Comparisons", points)}</div>' if points else "",
        f"<h2>Results</h2>\n{_table([[*record['table'][0]], *map(dict.values, record['table'])])}",
        *(_paragraph(note) for note in record["notes"] + record["closing"]),
        f"<h2>Machine and job</h2>\n{_table([['fact', ''], *rows])}\n</body>\n</html>\n",
    ]
    return HEAD.format(title=title, style=STYLE + PAGE) + "\n".join(filter(None, body))


def _point(measurement: dict[str, Any]) -> Point:
    """Return a ratio's row, without its name and the reason of its verdict in the words."""
    words = measurement["text"].removeprefix(measurement["name"]).strip()
    words = words.removesuffix(f", {measurement['reason']}")
    shift = float(measurement["base"] == BASELINE)  # a change of -5 % is a ratio of 0.95
    unknown = {"low": -math.inf, "value": math.nan, "high": math.inf}
    low, value, high = (
        shift + (instead if measurement["interval"][end] is None else measurement["interval"][end])
        for end, instead in unknown.items()
    )
    target = next((x + shift for x in measurement["target"] if x is not None), math.nan)
    kind = KINDS.get(measurement["verdict"], "")
    return Point(measurement["name"], words, (low, value, high), kind, target)


def _paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>'


def _table(rows: Any) -> str:
    """Return a table; the first row is its head."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    lines[0] = lines[0].replace("td>", "th>")
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>\n{body}\n</table></div>'
