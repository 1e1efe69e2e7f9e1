"""The picture of a page, drawn by matplotlib as SVG.

Text stays text, colours become variables of the page's CSS, and equal records give equal pictures.
"""

import io
import math
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

import numpy as np

from fastamp.bench.baseline import BASELINE
from fastamp.bench.race import UNTOLD
from fastamp.metrics.sinks import require

# Light and dark. A picture is drawn in the light ones, which the page's variables then replace.
INKS = {
    "ink": ("#1b1f24", "#e6edf3"),
    "soft": ("#57606a", "#9aa4af"),
    "line": ("#d0d7de", "#363d46"),
    "paper": ("#ffffff", "#0d1117"),
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#cf222e", "#ff7b72"),
    "c0": ("#0969da", "#58a6ff"),
    "c1": ("#bc4c00", "#f0883e"),
    "c2": ("#8250df", "#bc8cff"),
    "c3": ("#0a7d84", "#39c5cf"),
}
INK, SOFT, LINE, PAPER, GOOD, BAD, *COLOURS = (light for light, _ in INKS.values())
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may have dollars
    "font.sans-serif": ["DejaVu Sans"],  # measured, not shown: the page has a font of its own
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.axisbelow": True,
    "grid.color": LINE,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top")},
    **{f"{axis}tick.color": LINE for axis in "xy"},
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": INK,
}
WIDTH, ROW, FRAME = 11.0, 0.34, 0.8  # in inches: a picture, a row, and the rest of a panel
WORDS = 44  # characters of a row's name that have room beside the axis
MARKS = {  # of verdicts, which differ by more than colour
    "pass": ("o", GOOD, GOOD),
    "fail": ("X", BAD, BAD),
    "inconclusive": ("D", PAPER, INK),
    "n/a": ("s", PAPER, SOFT),
    "": ("o", COLOURS[0], COLOURS[0]),
}
MARKS |= {"faster": MARKS["pass"], "slower": MARKS["fail"]}
MARKS |= {"equal": MARKS[""], UNTOLD: MARKS["inconclusive"]}
COMPARED = """A point is a ratio, by its name for --fail-on, the bar its interval, and the upright
line its target. Green \u25cf pass or faster, red \u2716 fail or slower, hollow \u25c7 inconclusive
or cannot tell, hollow \u25a1 not judged, blue \u25cf equal."""


class Panel(NamedTuple):
    """Axes of a picture: the names and words of its rows, and what draws them; 0 is the first."""

    rows: list[tuple[str, str]]
    draw: Callable[[Any], object]
    heading: str = ""


def draw_record(record: dict[str, Any]) -> str:
    """Return the picture of a record's comparisons, with its title; "" without any."""
    panel = _comparisons(record["measurements"])
    if not panel.rows:
        return ""
    picture = f'<div class="scroll">{draw("Comparisons", [panel])}</div>'
    return f"<h2>Comparisons</h2>\n<p>{COMPARED}</p>\n{picture}"


def draw(title: str, panels: list[Panel]) -> str:
    """Return a picture, as SVG, of panels one below the other."""
    styles, figures = (require(f"matplotlib.{name}", "bench") for name in ("style", "figure"))
    style = {**STYLE, "font.size": 12, "svg.hashsalt": title}
    heights = [ROW * len(panel.rows) + FRAME for panel in panels]
    file = io.StringIO()
    with styles.context(["default", style]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that DejaVu lacks a character
        figure = figures.Figure((WIDTH, sum(heights)), dpi=72, layout="constrained")
        grid = figure.subplots(len(panels), squeeze=False, height_ratios=heights)
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            axes.set_title(panel.heading, loc="left", size="medium")
            panel.draw(axes)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    body = re.sub(
        r"(?s)^.*?<svg.*?>|<style.*?</style>|<metadata.*?</metadata>", "", file.getvalue()
    )
    body = re.sub(r' id="[a-z\d.]+_\d+"', "", body)  # of groups: the same in every picture
    for name, (light, _) in INKS.items():
        body = body.replace(light, f"var(--{name})")
    words = "; ".join(f"{label} {text}" for panel in panels for label, text in panel.rows)
    box = f'viewBox="0 0 {72 * WIDTH:.0f} {72 * sum(heights):.0f}"'
    head = f'<svg {box} role="img" aria-label="{escape(f"{title}: {words}")}">'
    return f"{head}{body.strip()}"


def name_rows(axes: Any, rows: list[tuple[str, str]]) -> None:
    """Write the name of each row on the left, and its words on the right."""
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [_shorten(label) for label, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    for y, (_, text) in enumerate(rows):
        axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), va="center")


def _shorten(text: str) -> str:
    """Leave out the middle of what is too long."""
    first = WORDS // 3
    return text if len(text) <= WORDS else f"{text[:first]}\u2026{text[first + 1 - WORDS :]}"


def _comparisons(measurements: list[dict[str, Any]]) -> Panel:
    """Show each ratio, and each change since a baseline, as a point beside its target."""
    found = []
    for each in measurements:
        is_change = each["base"] == BASELINE
        if each["interval"] and (is_change or each["unit"] == "x"):
            ends = [each["interval"][end] for end in ("low", "value", "high")] + each["target"]
            # As a number, NaN for what is not finite; a change of -5 % is a ratio of 0.95.
            ends = [math.nan if x is None else x + is_change for x in ends]
            found.append((each, [x if 0 < x < math.inf else math.nan for x in ends]))

    def draw(axes: Any) -> None:
        places = np.array([[1.0, *points[3:], points[1]] for _, points in found])
        low, high = np.nanmin(places), np.nanmax(places)
        for _, (start, _, end, *_) in found:  # an interval may be so wide that it hides the points
            low, high = np.nanmin([low, max(start, low / 2)]), np.nanmax([high, min(end, high * 2)])
        pad = max((high / low) ** 0.04, 1.005)
        axes.set(xscale="log", xlim=(low / pad, high * pad))
        round_ticks(axes)
        axes.axvline(1, color=SOFT, linewidth=1.5)
        for y, (each, (start, value, end, *target)) in enumerate(found):
            ends = np.nan_to_num([start, end], nan=math.inf)
            ends[0] = 0 if math.isnan(start) else start
            axes.plot(np.clip(ends, low / pad, high * pad), [y, y], color=INK, linewidth=2)
            axes.plot([target] * 2, [[y - 0.35] * 2, [y + 0.35] * 2], color=INK, linewidth=2)
            mark, face, edge = MARKS[each["verdict"]]
            axes.plot(value, y, mark, mfc=face, mec=edge, mew=1.5, markersize=9)
        name_rows(axes, rows)

    rows = [(each["name"], _say(each)) for each, _ in found]
    return Panel(rows, draw)


def _say(measurement: dict[str, Any]) -> str:
    """Return a measurement's text without its name and the reason of its verdict."""
    text: str = measurement["text"].removeprefix(measurement["name"]).strip()
    return text.removesuffix(f", {measurement['reason']}")


def round_ticks(axes: Any) -> None:
    """Set round numbers on a logarithmic axis of ratios."""
    low, high = axes.get_xlim()
    if high / low < 4:
        locator = require("matplotlib.ticker", "bench").MaxNLocator(6, steps=[1, 2, 5, 10])
        ticks = locator.tick_values(low, high)
    else:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        leads = (1, 2, 5) if high / low < 100 else (1,)
        ticks = [lead * 10.0**power for power in powers for lead in leads]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
