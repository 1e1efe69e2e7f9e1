"""The pictures of a page, one a section, drawn by matplotlib as SVG.

Text stays text, colours become variables of the page's CSS, and equal records give equal pictures.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
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
CURVES = 9  # rows that the picture of the losses is high
DASHES = ("-", "--", "-.", ":")  # curves that coincide stay visible
MARKS = {  # of verdicts, which differ by more than colour
    "pass": ("o", GOOD, GOOD),
    "fail": ("X", BAD, BAD),
    "inconclusive": ("D", PAPER, INK),
    "n/a": ("s", PAPER, SOFT),
    "": ("o", COLOURS[0], COLOURS[0]),
}
MARKS |= {"faster": MARKS["pass"], "slower": MARKS["fail"]}
MARKS |= {"equal": MARKS[""], UNTOLD: MARKS["inconclusive"]}
TIME = {"data": "c3", "forward": "c0", "backward": "c2", "step": "c1", "waits or other": "soft"}
MEMORY = {"weights": "c0", "gradients": "c2", "optimizer": "c1", "the rest": "soft"}
COMPARED = """A point is a ratio, by its name for --fail-on, the bar its interval, and the upright
line its target. Green \u25cf pass or faster, red \u2716 fail or slower, hollow \u25c7 inconclusive
or cannot tell, hollow \u25a1 not judged, blue \u25cf equal."""


class Panel(NamedTuple):
    """Axes of a picture: the names and words of its rows, and what draws them; 0 is the first."""

    rows: list[tuple[str, str]]
    draw: Callable[[Any], object]
    heading: str = ""


def draw_all(record: dict[str, Any]) -> Iterator[str]:
    """Yield every picture that a record has figures for, with its title, in the page's order."""
    profiles = record["details"].get("profiles") or {}
    shares = {
        arm: {part: 1e3 * each["value"] for part, each in profile["parts"].items()}
        for arm, profile in profiles.items()
    }
    memory = record["details"].get("memory") or {}
    time, parts = _shares(shares, TIME, "ms"), _shares(memory, MEMORY, "MiB")
    for title, legend, panel in (
        ("Comparisons", COMPARED, _comparisons(record["measurements"])),
        ("Where the time of a step goes", f"In milliseconds: {_key(TIME)}", time),
        ("Peak memory by parts", f"In MiB: {_key(MEMORY)}", parts),
        ("Training loss", "Of every step.", _losses(record["losses"])),
        ("Held-out loss", "Of every seed; the line is the target.", _held_out(record["details"])),
    ):
        if panel.rows:
            picture = f'<div class="scroll">{draw(title, [panel])}</div>'
            yield f"<h2>{title}</h2>\n<p>{legend}</p>\n{picture}"


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


def _key(inks: Mapping[str, str]) -> str:
    """Return the colours of the parts of a bar in HTML."""
    key = '<span class="key"><span style="color: var(--{})">\u25a0</span> {}</span>'
    return " ".join(key.format(ink, part) for part, ink in inks.items())


def _shares(stacks: Mapping[str, Mapping[str, float]], inks: Mapping[str, str], unit: str) -> Panel:
    """Show a bar for each arm, made of its parts, with their sum."""

    def draw(axes: Any) -> None:
        for y, parts in enumerate(stacks.values()):
            start = 0.0
            for part, value in parts.items():
                colour = INKS[inks.get(part, "soft")][0]
                axes.barh(y, value, 0.6, start, color=colour, edgecolor=PAPER)
                start += value
        name_rows(axes, rows)

    rows = []
    for arm, parts in stacks.items():
        each = ", ".join(f"{part} {_show(value)}" for part, value in parts.items())
        total = _show(math.fsum(parts.values()))
        rows.append((arm, f"{total} {unit} ({each})"))
    return Panel(rows, draw)


def _show(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _losses(losses: dict[str, list[float | None]]) -> Panel:
    """Show the curve of each arm, over its steps."""
    curves = {arm: [(np.arange(1, len(c) + 1), np.array(c, float))] for arm, c in losses.items()}
    return _curves(curves, "step")


def _held_out(details: dict[str, Any]) -> Panel:
    """Show the held-out loss of each arm over its seconds, a curve for each seed."""
    curves = {
        arm: [(np.array(seed["seconds"]), np.array(seed["losses"], float)) for seed in seeds]
        for arm, seeds in details.get("curves", {}).items()
    }
    return _curves(curves, "seconds", details.get("target"))


def _curves(
    curves: Mapping[str, list[tuple[Any, Any]]], unit: str, level: float | None = None
) -> Panel:
    """Show curves in a colour for each arm, and a level."""
    curves = {arm: c for arm, c in curves.items() if any(np.isfinite(y).any() for _, y in c)}

    def draw(axes: Any) -> None:
        for i, (arm, each) in enumerate(curves.items()):
            colour, dash = COLOURS[i % len(COLOURS)], DASHES[(i + i // len(COLOURS)) % len(DASHES)]
            for place, (x, y) in enumerate(each):
                label = None if place else _shorten(arm)
                axes.plot(x, y, dash, color=colour, linewidth=1 if each[1:] else 2, label=label)
        if level is not None:
            axes.axhline(level, color=SOFT, linewidth=1.5)
        axes.grid(axis="y")
        axes.set_xlabel(unit)
        axes.locator_params(axis="x", integer=unit == "step")
        axes.legend(loc="best", frameon=False)

    rows = [(arm, f"from {c[0][1][0]:.4g} to {c[0][1][-1]:.4g}") for arm, c in curves.items()]
    return Panel(rows + [("", "")] * (CURVES - len(rows)) * bool(rows), draw)
