"""The picture of ratios, as SVG: a point each, with its interval, on a logarithmic axis."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

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
LEFT, RIGHT, WIDTH, ROW = 320, 600, 1000, 24  # px: the axis, the picture, a row


class Point(NamedTuple):
    """A row: a ratio with its interval, NaN or infinite where it is not known; or a heading."""

    name: str
    words: str = ""
    ends: tuple[float, float, float] = (math.nan,) * 3  # low, value and high
    kind: str = ""  # "good", "bad" or "soft": its colour; else hollow
    target: float = math.nan


def draw(title: str, points: Sequence[Point]) -> str:
    """Return the picture of rows, one below the other."""
    low, high = find_limits(points)

    def x(ratio: float) -> float:
        place = math.log(min(max(ratio, low), high) / low) / math.log(high / low)
        return round(LEFT + place * (RIGHT - LEFT), 1)

    end = ROW * len(points)
    body = [f'<path class="soft" d="M{x(1)} 8V{end + 10}"/>']
    for tick in find_ticks(low, high):
        body.append(f'<path d="M{x(tick)} 8V{end + 10}"/>')
        body.append(f'<text x="{x(tick)}" y="{end + 26}" text-anchor="middle">{tick:g}x</text>')
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


def find_limits(points: Sequence[Point]) -> tuple[float, float]:
    """Return the ends of the axis, which an interval may leave if it is very wide."""
    places = [1.0]
    for low, value, high in (point.ends for point in points):
        places += [value, max(low, value / 2), min(high, value * 2)]
    places += [point.target for point in points]
    places = [x for x in places if 0 < x < math.inf]
    pad = max((max(places) / min(places)) ** 0.04, 1.005)
    return min(places) / pad, max(places) * pad


def find_ticks(low: float, high: float) -> list[float]:
    """Return five numbers between the ends of the axis, with two or three figures."""
    steps = (low * (high / low) ** (n / 6) for n in range(1, 6))
    return sorted({float(f"{tick:.{2 if high > 1.2 * low else 3}g}") for tick in steps})
