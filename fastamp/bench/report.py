"""The figures of each arm, the verdicts on the targets, and how both are shown and saved."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fastamp.bench.train import Score

__all__ = [
    "Figures",
    "Quartiles",
    "Report",
    "Verdict",
    "judge",
    "progress",
    "quartiles",
    "render",
    "show",
    "write_json",
]

COLUMNS = ("arm", "step ms", "[quartiles]", "tokens/s", "speed-up", "peak MiB", "loss", "accuracy")
# The targets: the bound's sign, and the factor and unit with which a figure is shown.
TARGETS = {
    "speed-up": (">=", 1, "x"),
    "memory saving": (">=", 100, " %"),
    "accuracy gap": ("<=", 1, ""),
}


@dataclass(frozen=True, kw_only=True)
class Quartiles:
    """A median, and the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one arm came to; `step_times_s` has every step, `step_time_s` leaves out the warm-up."""

    name: str
    step_times_s: list[float]
    step_time_s: Quartiles
    tokens_per_s: float
    speedup: Quartiles
    peak_memory_bytes: int | None
    validation: Score


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target: its figure (None: not measured), and pass, fail or n/a with the reason."""

    name: str
    figure: float | None
    target: float
    verdict: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that one run of the main job found out; `order` names the arms as each round ran them."""

    schema_version: int
    created: str
    environment: dict[str, Any]
    job: dict[str, Any]
    data: dict[str, Any]
    parameters: int
    warmup_steps: int
    memory_method: str
    order: list[list[str]]
    arms: list[Figures]
    targets: list[Verdict]


def quartiles(values: list[float]) -> Quartiles:
    """Return the median and the quartiles of at least one value."""
    low, median, high = (float(value) for value in np.percentile(values, [25, 50, 75]))
    return Quartiles(median=median, low=low, high=high)


def judge(
    base: Figures, arm: Figures, targets: dict[str, float], *, excused: dict[str, str]
) -> list[Verdict]:
    """Hold `arm` to the targets, against `base`; a figure equal to its target passes.

    Args:
        base: the figures that stand for FP32.
        arm: the figures to judge.
        targets: a bound for each name in TARGETS.
        excused: why a target cannot be judged here, by its name.
    """
    low, high = arm.speedup.low, arm.speedup.high
    spread = f"quartiles of the ratio in each round {low:.2f} to {high:.2f}"
    found = {
        "speed-up": (arm.speedup.median, spread),
        "memory saving": _memory_saving(base, arm),
        "accuracy gap": _accuracy_gap(base.validation, arm.validation),
    }
    verdicts = []
    for name, (figure, reason) in found.items():
        target = targets[name]
        if figure is None or name in excused:
            verdict = "n/a"
        else:
            met = figure >= target if TARGETS[name][0] == ">=" else figure <= target
            verdict = "pass" if met else "fail"
        verdicts.append(
            Verdict(
                name=name,
                figure=figure,
                target=target,
                verdict=verdict,
                reason=excused.get(name, reason),
            )
        )
    return verdicts


# Both divide integers once, so that a saving of 40 in 100 is the number 0.40 itself.
def _memory_saving(base: Figures, arm: Figures) -> tuple[float | None, str]:
    theirs, ours = base.peak_memory_bytes, arm.peak_memory_bytes
    if not theirs or ours is None:
        return None, "no peak was measured"
    reason = f"peak of {ours / 2**20:.0f} MiB against {theirs / 2**20:.0f} MiB"
    return (theirs - ours) / theirs, reason


def _accuracy_gap(base: Score, arm: Score) -> tuple[float, str]:
    if not math.isfinite(base.loss - arm.loss):
        return math.inf, f"validation loss {arm.loss} against {base.loss}"
    reason = f"validation accuracy {arm.accuracy:.4f} against {base.accuracy:.4f}"
    return abs(base.correct - arm.correct) / base.total, reason


def render(report: Report) -> str:
    """Return the table, the environment, and one line per target."""
    rows = [COLUMNS, *(_row(arm) for arm in report.arms)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    lines += ["", _environment(report), f"memory: {report.memory_method}"]
    return "\n".join(lines + [_target(verdict) for verdict in report.targets])


def _row(arm: Figures) -> tuple[str, ...]:
    times, peak = arm.step_time_s, arm.peak_memory_bytes
    return (
        arm.name,
        f"{times.median * 1e3:.1f}",
        f"[{times.low * 1e3:.1f}, {times.high * 1e3:.1f}]",
        f"{arm.tokens_per_s:.0f}",
        f"{arm.speedup.median:.2f}x",
        "n/a" if peak is None else f"{peak / 2**20:.0f}",
        f"{arm.validation.loss:.4f}",
        f"{arm.validation.accuracy:.4f}",
    )


def _environment(report: Report) -> str:
    env, job = report.environment, report.job
    return (
        f"torch {env['torch']}, {env['device']} ({env['device_name']}), {env['threads']} threads, "
        f"fastamp {env['fastamp']} (backends {' '.join(env['backends'])}), {job['precision']}, "
        f"{report.parameters / 1e6:.1f} M parameters, {job['steps']} steps of "
        f"{job['batch_size']} x {job['shape']['block_size']} bytes, "
        f"the first {report.warmup_steps} not timed"
    )


def _target(verdict: Verdict) -> str:
    bound, factor, unit = TARGETS[verdict.name]
    figure = "-" if verdict.figure is None else f"{verdict.figure * factor:.4g}{unit}"
    target = f"target {bound} {verdict.target * factor:g}{unit}"
    judged = "amp+fastamp against fp32"
    return f"{verdict.name} {figure} ({target}): {verdict.verdict}, {judged}: {verdict.reason}"


def show(text: str) -> None:
    """Print at once, so that a pipe has the text before the work that follows."""
    print(text, flush=True)


@contextmanager
def progress(total: int) -> Iterator[Callable[[], object]]:
    """Show a bar, moved on by each call of what this yields, if a terminal and tqdm are there."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda: None
        return
    with importlib.import_module("tqdm").tqdm(total=total, leave=False) as bar:
        yield bar.update


def write_json(report: Report, path: Path) -> None:
    """Write the report whole or not at all; a number that is not finite is written as null."""
    text = json.dumps(_finite(asdict(report)), indent=2, allow_nan=False)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
