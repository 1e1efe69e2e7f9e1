"""One self-contained page of a record, with a picture of its ratios: no script, light and dark."""

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

from fastamp.bench.record import list_verdicts

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de;
  --paper: #ffffff; --good: #1a7f37; --bad: #cf222e }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --line: #363d46;
  --paper: #0d1117; --good: #3fb950; --bad: #ff7b72 } }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
svg path { stroke: var(--line); fill: none } svg .bar { stroke: var(--ink); stroke-width: 2 }
svg circle { stroke: var(--soft); stroke-width: 2; fill: var(--paper) }
svg .good { fill: var(--good); stroke: var(--good) }
svg .bad { fill: var(--bad); stroke: var(--bad) }
svg .soft { fill: var(--soft); stroke: var(--soft) }
"""
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
COMPARED = """A point is a ratio, by its name in the record, the bar its interval, and the upright
line its target. Green: pass or faster; red: fail or slower; grey: equal; hollow: undecided."""
TICKS = [round(factor * 10.0**power, 6) for power in range(-6, 7) for factor in (1, 2, 5)]
LEFT, RIGHT, WIDTH, ROW = 320, 600, 1000, 24  # px: the axis, the picture, a row


class Point(NamedTuple):
    """A row: a ratio with its interval, NaN or infinite where it is not known; or a heading."""

    name: str
    words: str = ""
    ends: tuple[float, float, float] = (math.nan,) * 3  # low, value and high
    kind: str = ""  # "good", "bad" or "soft": its colour; else hollow
    target: float = math.nan


def make(record: dict[str, Any]) -> str:
    """Return the page of a record."""
    title = escape(f"fastamp bench: {record['command']}")
    leads = [record["noise"], *record["failures"], record["sentence"]]
    facts = {"measured": record["created"], **record["environment"], **record["job"]}
    rows = [[name, json.dumps(value)] for name, value in facts.items()]
    ratios = [each for each in record["measurements"] if each["interval"] and each["unit"] == "x"]
    picture = f'<div class="scroll">{draw("Comparisons", [*map(find_point, ratios)])}</div>'
    body = [
        f"<body>\n<h1>{title}</h1>",
        *(_paragraph(text, "lead") for text in leads if text),
        *(_paragraph(text, "verdict") for text in list_verdicts(record)),
        f"<h2>Comparisons</h2>\n{_paragraph(COMPARED)}\n{picture}" if ratios else "",
        f"<h2>Results</h2>\n{_table([[*record['table'][0]], *map(dict.values, record['table'])])}",
        *(_paragraph(note) for note in record["notes"]),
        f"<h2>Machine and job</h2>\n{_table([['fact', 'value'], *rows])}\n</body>\n</html>\n",
    ]
    return HEAD.format(title=title, style=STYLE + PAGE) + "\n".join(filter(None, body))


def _paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>'


def _table(rows: Any) -> str:
    """Return a table; the first row is its head."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    lines[0] = lines[0].replace("td>", "th>")
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>\n{body}\n</table></div>'


def find_point(measurement: dict[str, Any]) -> Point:
    """Return a ratio's row, without its name and the reason of its verdict in the words."""
    words = measurement["text"].removeprefix(measurement["name"]).strip()
    for why in ("reason", "excused", "noise"):
        words = words.removesuffix(f", {measurement[why]}")
    unknown = {"low": -math.inf, "value": math.nan, "high": math.inf}
    found = {end: x for end, x in measurement["interval"].items() if x is not None}
    low, value, high = (unknown | found).values()
    target = next((x for x in measurement["target"] or () if x is not None), math.nan)
    kind = KINDS.get(measurement["verdict"], "")
    return Point(measurement["name"], words, (low, value, high), kind, target)


def draw(title: str, points: Sequence[Point]) -> str:
    """Return the picture of rows, one below the other, on a logarithmic axis."""
    places = [1.0, *(point.target for point in points)]
    for low, value, high in (point.ends for point in points):
        places += [value, max(low, value / 2), min(high, value * 2)]  # a wide interval leaves it
    places = [place for place in places if 0 < place < math.inf]
    pad = max((max(places) / min(places)) ** 0.04, 1.005)
    least, most = min(places) / pad, max(places) * pad

    def x(ratio: float) -> float:
        place = math.log(min(max(ratio, least), most) / least) / math.log(most / least)
        return round(LEFT + place * (RIGHT - LEFT), 1)

    end = ROW * len(points)
    body = []
    for tick in (tick for tick in TICKS if least <= tick <= most):
        body.append(f'<path d="M{x(tick)} 8V{end + 10}"/>')
        body.append(f'<text x="{x(tick)}" y="{end + 26}" text-anchor="middle">{tick:g}x</text>')
    body.append(f'<path class="soft" d="M{x(1)} 8V{end + 10}"/>')
    for y, point in enumerate(points, start=1):
        body.append(f'<g transform="translate(0 {ROW * y})">{_row(point, x)}</g>')
    label = f"{title}: " + "; ".join(f"{each.name} {each.words}".strip() for each in points)
    head = f'<svg viewBox="0 0 {WIDTH} {end + 32}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, *body, "</svg>"])


def _row(point: Point, x: Callable[[float], float]) -> str:
    row = f"<text>{escape(point.name[:44])}</text>"
    row += f'<text x="{RIGHT + 20}">{escape(point.words)}</text>'
    if math.isfinite(point.target):
        row += f'<path class="bar" d="M{x(point.target)} -14V6"/>'
    low, value, high = point.ends
    if math.isfinite(value):
        row += f'<path class="bar" d="M{x(low)} -4H{x(high)}"/>'
        row += f'<circle class="{point.kind}" cx="{x(value)}" cy="-4" r="5"/>'
    return row
