"""One self-contained page of a record: no script, nothing from elsewhere, light and dark."""

import math
from collections.abc import Callable
from html import escape
from typing import Any

import numpy as np

DOTS = 80  # at most, for each arm: of more visits, evenly spaced quantiles are drawn
BEYOND = 0.98  # the axis ends at this quantile; what lies beyond is counted

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --paper: #fff;
  --c0: #57606a; --c1: #0969da; --c2: #bc4c00; --c3: #8250df; --c4: #1a7f37 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --line: #363d46;
  --paper: #0d1117; --c0: #9aa4af; --c1: #58a6ff; --c2: #f0883e; --c3: #bc8cff; --c4: #3fb950 } }
body { margin: 0 auto; max-width: 1100px; padding: 16px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem } h3 { font-size: .95rem }
p, th, dt { color: var(--soft) } p { margin: .3rem 0 } dd { margin: 0 0 8px }
.verdict { border-left: 4px solid var(--soft); padding-left: 12px; color: var(--ink) }
.pass { border-color: var(--c4) } .fail { border-color: #cf222e }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left; font-weight: 600 }
svg { display: block; width: 100%; overflow: visible }
line { stroke: var(--line) } g line { stroke: inherit }
text { fill: var(--soft); font-size: 12px } .curves { margin-left: 36px; width: calc(100% - 36px) }
@media (max-width: 700px) { thead { display: none } tbody, tr, td { display: block }
  td { display: flex; border: 0; justify-content: space-between; gap: 16px; padding: 1px 0 }
  tr { padding: 8px 0; border-bottom: 1px solid var(--line) }
  td:not(:first-child)::before { color: var(--soft); content: attr(data-label) } }
"""


def make(record: dict[str, Any]) -> str:
    """Return the page of a record."""
    title = escape(f"fastamp bench: {record['command']}")
    body = [
        f"<h1>{title}</h1>\n<p>{escape(record['created'])}</p>",
        *(_paragraph(text, "verdict") for text in [record["sentence"]] if text),
        *(_paragraph(each["text"], f"verdict {each['verdict']}") for each in record["verdicts"]),
        _table(record["table"]),
        *(_paragraph(note) for note in record["notes"] + record["closing"]),
        "<h2>Times</h2>",
        *(_times(name, race) for name, race in record["races"].items()),
        _losses(record["losses"]),
        "<h2>Environment</h2>",
        _list(record["environment"]),
        "<h2>Job</h2>",
        _list(record["job"]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>'


def _table(rows: list[dict[str, str]]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    lines = [f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>"]
    for row in rows:
        cells = (
            f'<td data-label="{escape(name)}"><span>{escape(cell)}</span></td>'
            for name, cell in row.items()
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody>\n</table>"])


def _times(name: str, race: dict[str, Any]) -> str:
    """Draw a dot for every visit, with the quartiles and the median, one line for each arm."""
    visits = [visit for round_ in race["rounds"][race["warmup_rounds"] :] for visit in round_]
    times = {
        arm: np.array(
            [v["elapsed_s"] * 1e3 for v in visits if v["arm"] == arm and not v["skipped"]]
        )
        for arm in race["arms"]
    }
    times = {arm: values for arm, values in times.items() if values.size}
    # The largest of few visits lies on the axis: a quantile that is one of them.
    highs = (np.quantile(v, BEYOND, method="higher") for v in times.values())
    ticks = _ticks(min(float(v.min()) for v in times.values()), float(max(highs)))
    x = _scale(ticks, 2, 96)
    bottom = 46 * len(times)
    lines = [
        f'<line x1="{x(tick)}%" x2="{x(tick)}%" y1="0" y2="{bottom + 4}"/>'
        f'<text x="{x(tick)}%" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>'
        for tick in ticks
    ]
    lines += [_arm(i, arm, values, ticks[-1], x) for i, (arm, values) in enumerate(times.items())]
    label = escape(f"{name}: milliseconds of each visit")
    svg = f'<svg role="img" aria-label="{label}" height="{bottom + 24}">{"".join(lines)}</svg>'
    return f"<h3>{label}</h3>\n{svg}"


def _arm(index: int, arm: str, values: Any, end: float, x: Callable[[float], str]) -> str:
    y = 46 * index + 29
    shown = values[values <= end]
    beyond = f", {values.size - shown.size} beyond the axis" if values.size > shown.size else ""
    if shown.size > DOTS:
        shown = np.quantile(shown, np.linspace(0, 1, DOTS))
    low, median, high = (x(min(q, end)) for q in np.percentile(values, [25, 50, 75]))
    dots = "".join(
        f'<circle cx="{x(value)}%" cy="{y + (j * 7) % 11 - 5}" r="2.5" fill-opacity=".65"/>'
        for j, value in enumerate(shown)
    )
    return (
        f'<text x="2%" dx="4" y="{y - 15}">{escape(arm)}: {values.size}{beyond}</text>'
        f'<g style="fill: {_colour(index)}; stroke: {_colour(index)}"><g stroke="none">{dots}</g>'
        f'<line x1="{low}%" x2="{high}%" y1="{y}" y2="{y}" stroke-width="16" opacity=".22"/>'
        f'<line x1="{median}%" x2="{median}%" y1="{y - 9}" y2="{y + 9}" stroke-width="3"/></g>'
    )


def _losses(losses: dict[str, list[float | None]]) -> str:
    known = [loss for curve in losses.values() for loss in curve if loss is not None]
    if not known:
        return ""
    ticks = _ticks(min(known), max(known))
    y = _scale(ticks, 220, -220)
    steps = max(len(curve) for curve in losses.values())
    lines = [
        f'<line x1="0" x2="100%" y1="{y(tick)}" y2="{y(tick)}"/>'
        f'<text x="-6" dy="4" y="{y(tick)}" text-anchor="end">{tick:g}</text>'
        for tick in ticks
    ]
    curves, legend = [], []
    for i, (arm, curve) in enumerate(losses.items()):
        places = ((j * 100 / max(steps - 1, 1), loss) for j, loss in enumerate(curve))
        points = " ".join(f"{x:.2f},{y(loss)}" for x, loss in places if loss is not None)
        dashes = f"{10 - 3 * (i % 3)} {4 * (i % 3)}"  # curves that coincide stay visible
        curves.append(
            f'<polyline points="{points}" fill="none" stroke-width="2" stroke-dasharray="{dashes}" '
            f'vector-effect="non-scaling-stroke" style="stroke: {_colour(i)}"/>'
        )
        legend.append(f'<span style="color: {_colour(i)}">\u25a0 {escape(arm)} </span>')
    return (
        f"<h2>Training loss</h2>\n<p>{''.join(legend)} steps 1 to {steps}</p>\n"
        '<svg class="curves" role="img" height="240" aria-label="training loss of every step">'
        f'{"".join(lines)}<svg height="220" viewBox="0 0 100 220" preserveAspectRatio="none">'
        f"{''.join(curves)}</svg></svg>"
    )


def _colour(index: int) -> str:
    return f"var(--c{index % 5})"


def _scale(ticks: list[float], start: float, length: float) -> Callable[[float], str]:
    return lambda value: f"{start + length * (value - ticks[0]) / (ticks[-1] - ticks[0]):.2f}"


def _ticks(low: float, high: float) -> list[float]:
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span))
    size = next(s * unit for s in (0.2, 0.25, 0.5, 1, 2, 2.5, 5) if span / (s * unit) <= 4.5)
    first = math.floor(low / size)
    last = max(math.ceil(high / size), first + 1)
    return [float(f"{i * size:.6g}") for i in range(first, last + 1)]


def _list(values: dict[str, Any]) -> str:
    items = (f"<dt>{escape(k)}</dt><dd>{escape(str(value))}</dd>" for k, value in values.items())
    return f"<dl>{''.join(items)}</dl>"
