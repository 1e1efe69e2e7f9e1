"""A picture as SVG, drawn by matplotlib twice: for a desktop and for a phone.

Text stays text, colours become variables of the page's CSS, and equal records give equal pictures.
"""

import io
import re
import warnings
from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any, NamedTuple

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
    **{f"{axis}tick.labelcolor": SOFT for axis in "xy"},
}
EM = 0.6  # how wide a character is at most, on average, in heights of the font
TALL = 12  # more rows than this have the axis' numbers above them, too
WORDS = 36  # characters of a row's name that have room beside the axis


class Size(NamedTuple):
    """In pixels: how wide a picture is, how high a row in it, how large its text."""

    kind: str
    width: int
    row: int
    font: int


SIZES = (Size("wide", 1100, 30, 15), Size("narrow", 358, 46, 12))


class Row(NamedTuple):
    """A row of a picture: its name, its figures in words, and its `draw`, None for a heading.

    `draw` gets the axes, the row's y, and how far it may reach up and down.
    """

    label: str
    text: str = ""
    draw: Callable[[Any, float, float], object] | None = None
    more: str = ""  # the words for a screen reader


def draw_figure(title: str, words: str, draw: Callable[[Any, Size], None]) -> str:
    """Return a picture in each size, of which the page shows one."""
    styles, figures = (require(f"matplotlib.{name}", "bench") for name in ("style", "figure"))
    found = []
    for size in SIZES:
        style = {**STYLE, "font.size": size.font, "svg.hashsalt": f"{title}, {size.kind}"}
        with styles.context(["default", style]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that DejaVu lacks a character
            figure, file = figures.Figure(dpi=72), io.StringIO()
            draw(figure, size)
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        body = re.sub(r"(?s)^.*?<svg.*?>|<style.*?</style>", "", file.getvalue())
        body = re.sub(r' id="[a-z\d.]+_\d+"', "", body)  # of groups: the same in every picture
        for name, (light, _) in INKS.items():
            body = body.replace(light, f"var(--{name})")
        width, height = figure.get_size_inches() * 72
        box = f'viewBox="0 0 {width:.0f} {height:.0f}"'
        head = f'<svg class="{size.kind}" {box} role="img" aria-label="{escape(words)}">'
        found.append(head + body.strip())
    return "\n".join(found)


def draw_rows(title: str, rows: list[Row], frame: Callable[[Any], object]) -> str:
    """Draw rows over one axis; on a phone the words of a row stand above it."""
    if not rows:
        return ""

    def draw(figure: Any, size: Size) -> None:
        wide, letter, n = size.kind == "wide", EM * size.font, len(rows)
        drawn = [row for row in rows if row.draw]
        left = right = 2.0 * size.font  # half of the last number of the axis
        if wide:
            left = letter * min(max(len(row.label) for row in drawn), WORDS) + 16
            right = letter * max(len(row.text) for row in drawn) + 16
        below, across = 2.0 * size.font, size.width - left - right
        above, high = (below if n > TALL else 0.0), size.row * n
        height = above + high + below
        figure.set_size_inches(size.width / 72, height / 72)
        place = (left / size.width, below / height, across / size.width, high / height)
        axes = figure.add_axes(place)
        axes.set(ylim=(n, 0), yticks=[])
        axes.tick_params(labeltop=n > TALL)
        axes.grid(axis="x")
        frame(axes)
        write = partial(axes.text, transform=axes.get_yaxis_transform(), va="center")
        under = {"facecolor": PAPER, "edgecolor": "none", "pad": 2}  # no line goes through words
        for i, row in enumerate(rows):
            middle, half = (i + 0.5, 0.3) if wide else (i + 0.7, 0.2)
            y = i + 0.28 if row.draw and not wide else middle
            room = WORDS if row.draw and wide else int(size.width / letter) - len(row.text) - 1
            weight = "normal" if row.draw else "bold"
            write(-left / across, y, shorten(row.label, room), ha="left", weight=weight, bbox=under)
            write(1 + right / across, y, row.text, ha="right", bbox=under)
            if row.draw:
                row.draw(axes, middle, half)

    words = "; ".join(f"{row.label} {row.more or row.text}".strip() for row in rows)
    return draw_figure(title, f"{title}: {words}", draw)


def shorten(text: str, room: int) -> str:
    """Leave out the middle of what is too long."""
    last = room - 1 - room // 3
    return text if len(text) <= room else f"{text[: room // 3]}\u2026{text[-last:]}"
