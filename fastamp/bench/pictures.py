"""What the pictures of a page show: comparisons, the parts of a step, memory, times and losses."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from html import escape
from typing import Any, NamedTuple

import numpy as np

from fastamp.bench.race import AGAIN, Interval
from fastamp.bench.svg import (
    BAD,
    COLOURS,
    EM,
    GOOD,
    INK,
    INKS,
    PAPER,
    SOFT,
    WORDS,
    Row,
    Size,
    draw_figure,
    draw_rows,
    shorten,
)
from fastamp.metrics.sinks import require

END = 99  # the percentile of the slowest arm at which the axis of times ends
TICKS = 80  # drawn for an arm at most: beyond so many visits, as many quantiles
DASHES = ("-", "--", "-.", ":")  # curves that coincide stay visible
FLAGS = (9, 8)  # matplotlib's markers: a triangle to the right of a target, and one to the left
MARKS = {  # of verdicts, which differ by more than colour
    "pass": ("o", GOOD, GOOD),
    "fail": ("X", BAD, BAD),
    "inconclusive": ("D", PAPER, INK),
    "n/a": ("s", PAPER, SOFT),
    "": ("o", COLOURS[0], COLOURS[0]),
}
PARTS = {"data": "c3", "forward": "c0", "backward": "c2", "step": "c1"}  # the others are soft
RATIOS = ("speedup", "of_plain", "over_naive")  # what the names of ratios begin with

PARTED = "Where the time of a step goes"
COMPARED = """A point is a ratio, the bar its 95 % interval, and the flag its target, which points
to the side where the point should lie. Green \u25cf pass, red \u2716 fail, hollow \u25c7
inconclusive, hollow \u25a1 not judged, blue \u25cf without a target."""
TIMES = f"""Milliseconds of each visit. A box holds the middle half of them, and its mark is the
median. The axis ends at the {END}th percentile of the slowest arm; on the right stands how many
visits lie beyond."""


class Ratio(NamedTuple):
    """A comparison, and the ends that it should lie between."""

    name: str
    found: Interval
    ends: tuple[float, float] = (-math.inf, math.inf)
    verdict: str = ""

    def text(self) -> str:
        """Return the figure, its interval and the verdict."""
        spec = ".3f" if self.found.value < 0.1 else ".2f" if self.found.value < 10 else ".1f"
        return f"{self.found.text(spec, 'x')} {self.verdict}".strip()


def draw_all(record: dict[str, Any]) -> Iterator[str]:
    """Yield every picture that a record has figures for, with its title, in the page's order."""
    races = (_draw_times(name, race) for name, race in record["races"].items())
    colours = {**PARTS, "waits or other": "soft"}.items()
    key = '<span class="key"><span style="color: var(--{})">\u25a0</span> {}</span>'
    parts = (key.format(ink, part) for part, ink in colours)
    for title, legend, picture in (
        ("Comparisons", COMPARED, _draw_ratios(list_ratios(record))),
        (
            PARTED,
            f"In milliseconds: {' '.join(parts)}",
            _draw_parts(record["details"].get("profiles") or {}),
        ),
        ("Memory", "The peak of each arm, in MiB; a flag is the target.", _draw_memory(record)),
        ("Times", TIMES, "\n".join(filter(None, races))),
        ("Training loss", "Of every step.", _draw_losses(record["losses"])),
    ):
        if picture:
            yield f"<h2>{title}</h2>\n<p>{legend}</p>\n{picture}"


def list_ratios(record: dict[str, Any]) -> dict[str, list[Ratio]]:
    """Return the comparisons of a record, by what they are compared with."""
    held = {}
    for verdict in record["verdicts"]:
        is_change = verdict["name"].endswith("since the baseline")
        if verdict["figure"] and (is_change or verdict["unit"] == "x"):
            found = _read(**verdict["figure"], shift=is_change)
            goal = _read(1.0, *verdict["ends"], shift=is_change)
            ends = (goal.low, goal.high)
            held[found] = Ratio(verdict["name"], found, ends, verdict["verdict"])

    def name_it(name: str, figure: dict[str, Any]) -> Ratio:
        found = _read(**figure)
        return held.pop(found, Ratio(name, found))._replace(name=name)

    groups = {}
    for name, race in record["races"].items():
        base = race["base"]
        arms = ((f"{base} again" if a == AGAIN else a, each) for a, each in race["arms"].items())
        judged = [name_it(arm, each["speedup"]) for arm, each in arms if arm != base]
        groups[f"{name}: times as fast as {base}"] = judged
    seen = {ratio.found for group in groups.values() for ratio in group}
    more = {name: each for name, each in record["metrics"].items() if name.startswith(RATIOS)}
    rest = [name_it(name, each) for name, each in more.items() if _read(**each) not in seen]
    groups["other ratios, by the names of --fail-on"] = [*rest, *held.values()]
    return {heading: group for heading, group in groups.items() if group}


def _read(
    value: float | None, low: float | None, high: float | None, *, shift: float = 0.0
) -> Interval:
    """Return a figure of the record, which has None for what is not finite."""
    pairs = ((value, math.nan), (low, -math.inf), (high, math.inf))
    value, low, high = (unknown if x is None else x + shift for x, unknown in pairs)
    return Interval(value=value, low=low, high=high)


def _keep(values: list[float]) -> list[float]:
    return [value for value in values if 0 < value < math.inf]


def _draw_ratios(groups: dict[str, list[Ratio]]) -> str:
    """Draw each comparison as a point with its interval beside its target."""
    rows, places, ends = [], [1.0], [1.0]
    for heading, group in groups.items():
        rows.append(Row(heading))
        for ratio in group:
            signs = zip((">=", "<="), ratio.ends, strict=True)
            goals = " and ".join(f"{sign} {end:g}x" for sign, end in signs if _keep([end]))
            more = f"{ratio.text()} (target {goals})" if goals else ""
            rows.append(Row(ratio.name, ratio.text(), partial(_draw_ratio, ratio), more))
            places += _keep([ratio.found.value, *ratio.ends])
            ends += _keep([ratio.found.low, ratio.found.high])
    # An interval may be so wide that beside it all points would lie in one place.
    low = max(min(places + ends), min(places) / 2)
    high = min(max(places + ends), max(places) * 2)
    pad = max((high / low) ** 0.04, 1.005)
    return draw_rows("Comparisons", rows, partial(_frame_ratios, low / pad, high * pad))


def _frame_ratios(low: float, high: float, axes: Any) -> None:
    """Set up a logarithmic axis with round numbers, and mark 1.0x."""
    if high / low < 4:
        locator = require("matplotlib.ticker", "bench").MaxNLocator(6, steps=[1, 2, 5, 10])
        ticks = locator.tick_values(low, high)
    else:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        leads = (1, 2, 5) if high / low < 100 else (1,)
        ticks = [lead * 10.0**power for power in powers for lead in leads]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set(xscale="log", xlim=(low, high))
    axes.set_xticks(ticks, [f"{tick:.1f}x" if tick == 1 else f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color=SOFT, linewidth=1.5)


def _draw_ratio(ratio: Ratio, axes: Any, y: float, half: float) -> None:
    ends = np.clip([ratio.found.low, ratio.found.high], *axes.get_xlim())
    axes.plot(ends, [y, y], color=INK, linewidth=2)
    for end, flag in zip(ratio.ends, FLAGS, strict=True):
        if _keep([end]):
            _raise_flag(axes, end, y, half, flag)
    mark, face, edge = MARKS[ratio.verdict]
    axes.plot(ratio.found.value, y, mark, mfc=face, mec=edge, mew=1.5, markersize=9)


def _raise_flag(axes: Any, x: float, y: float, half: float, flag: int) -> None:
    axes.plot([x, x], [y - half, y + half], color=INK, linewidth=2)
    axes.plot(x, y - 0.6 * half, marker=flag, color=INK, markersize=8)


def _draw_parts(profiles: Mapping[str, Any]) -> str:
    """Draw the parts of each arm's step as one bar."""
    stacks = {
        arm: {part: 1e3 * each["value"] for part, each in profile["parts"].items()}
        for arm, profile in profiles.items()
    }
    waits = {arm: f", {p['syncs']:g} waits" for arm, p in profiles.items() if p["syncs"]}
    return _draw_bars(PARTED, "ms", stacks, waits, {})


def _draw_memory(record: dict[str, Any]) -> str:
    """Draw each arm's peak as a bar; the flag is the most that the last arm's target allows."""
    peaks = record["details"].get("peak_memory_nbytes") or {}
    stacks = {arm: {"peak": n / 2**20} for arm, n in peaks.items() if n is not None}
    flags = {
        [*peaks][-1]: (1 - verdict["ends"][0]) * stacks[next(iter(peaks))]["peak"]
        for verdict in record["verdicts"]
        if verdict["name"] == "memory saving" and verdict["figure"]
    }
    return _draw_bars("Memory", "MiB", stacks, {}, flags)


def _draw_bars(
    title: str,
    unit: str,
    stacks: Mapping[str, Mapping[str, float]],
    more: Mapping[str, str],
    flags: Mapping[str, float],
) -> str:
    """Draw a bar for each arm, made of its parts."""

    def draw(arm: str, axes: Any, y: float, half: float) -> None:
        start, pixels = 0.0, axes.bbox.width / axes.get_xlim()[1]
        for part, value in stacks[arm].items():
            colour = INKS["c0" if part == "peak" else PARTS.get(part, "soft")][0]
            axes.barh(y, value, 2 * half, start, color=colour, edgecolor=PAPER)
            for text in (f"{part} {_show(value)}", part) if len(stacks[arm]) > 1 else ():
                if len(text) * EM * axes.xaxis.label.get_size() < value * pixels - 6:
                    axes.text(start + value / 2, y, text, color=PAPER, ha="center", va="center")
                    break
            start += value
        if arm in flags:
            _raise_flag(axes, flags[arm], y, half, FLAGS[1])

    totals = {arm: math.fsum(parts.values()) for arm, parts in stacks.items()}
    rows = []
    for arm, parts in stacks.items():
        text = f"{_show(totals[arm])} {unit}{more.get(arm, '')}"
        words = ", ".join(f"{part} {_show(value)} {unit}" for part, value in parts.items())
        rows.append(Row(arm, text, partial(draw, arm), f"{text}: {words}"))
    longest = max([*totals.values(), *flags.values()], default=0.0)
    return draw_rows(title, rows, partial(_frame, 0.0, 1.02 * longest))


def _show(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _frame(low: float, high: float, axes: Any) -> None:
    axes.set_xlim(low, high)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,g}")


def _draw_times(name: str, race: dict[str, Any]) -> str:
    """Draw a tick for every visit of an arm, with the quartiles and the median."""
    visits = [visit for round_ in race["rounds"][race["warmup_rounds"] :] for visit in round_]
    times_ms = {
        arm: np.array(
            [1e3 * v["elapsed_s"] for v in visits if v["arm"] == arm and not v["skipped"]]
        )
        for arm in race["arms"]
    }
    times_ms = {arm: values for arm, values in times_ms.items() if values.size}
    if not times_ms:
        return ""
    low = min(float(values.min()) for values in times_ms.values())
    high = max(float(np.percentile(values, END)) for values in times_ms.values())
    rows = []
    for i, (arm, values) in enumerate(times_ms.items()):
        text = (
            f"{_show(np.median(values))} ms, {values.size} visits, {(values > high).sum()} beyond"
        )
        colour = COLOURS[i % len(COLOURS)]
        rows.append(Row(arm, text, partial(_draw_visits, values, high, colour)))
    margin = 0.01 * (high - low) or 0.01 * high
    frame = partial(_frame, low - margin, max(high, low + margin))
    return f"<h3>{escape(name)}</h3>\n" + draw_rows(f"Times, {name}", rows, frame)


def _draw_visits(values: Any, end: float, colour: str, axes: Any, y: float, half: float) -> None:
    low, median, high = np.percentile(values, [25, 50, 75])
    axes.barh(y, high - low, 2 * half, low, color=colour, alpha=0.25)
    axes.plot([median, median], [y - half, y + half], color=colour, linewidth=3)
    shown = values[values <= end]
    if shown.size > TICKS:
        shown = np.quantile(shown, np.linspace(0, 1, TICKS))
    # One line with gaps: a thousand small elements would make a large page.
    places = np.ravel([[value, value, math.nan] for value in shown])
    heights = [y - half / 2, y + half / 2, math.nan] * shown.size
    axes.plot(places, heights, color=colour, linewidth=1.5, alpha=0.6)


def _draw_losses(losses: dict[str, list[float | None]]) -> str:
    curves = {arm: np.array(curve, float) for arm, curve in losses.items()}
    curves = {arm: curve for arm, curve in curves.items() if np.isfinite(curve).any()}
    if not curves:
        return ""

    def draw(figure: Any, size: Size) -> None:
        width, height = size.width, 320 if size.kind == "wide" else 260
        figure.set_size_inches(width / 72, height / 72)
        side, below = size.font / width, 3.2 * size.font / height
        axes = figure.add_axes((4 * side, below, 1 - 6 * side, 0.97 - below), xlabel="step")
        for i, (arm, curve) in enumerate(curves.items()):
            colour, dash = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]
            steps = np.arange(1, len(curve) + 1)
            axes.plot(steps, curve, dash, color=colour, linewidth=2, label=shorten(arm, WORDS))
        axes.grid(axis="y")
        axes.locator_params(nbins=6)
        axes.locator_params(axis="x", integer=True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.legend(loc="upper right", frameon=False)

    ends = (f"{arm} from {curve[0]:.4g} to {curve[-1]:.4g}" for arm, curve in curves.items())
    return draw_figure("Training loss", f"Training loss: {'; '.join(ends)}", draw)
