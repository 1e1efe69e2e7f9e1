"""What the results of a task say: figures with their verdicts, a table, and one plain sentence."""

import math
from functools import partial
from typing import Any

import numpy as np

from fastamp.bench.measure import Results, last_loss, limit
from fastamp.bench.race import UNTOLD, Interval, estimate, show
from fastamp.bench.record import Measurement, compare_arms

LEAST_NBYTES = 2**25  # of FP32's peak: beside less, memory that kernels keep would count
REPLACED = ("data", "step", "waits")  # by fastamp; a device that waits does so for both
# Of the main job, by metric: the least figure, or of the gap the most.
TARGETS = {"speedup": 1.5, "memory": 0.4, "accuracy": 0.01}
Peaks = dict[str, int | None]  # by arm, in bytes; None where the platform counts none
NAMES = {  # of the parts of a step but for the model, in a sentence
    "data": "the wait for data",
    "step": "clip and step",
    "waits": "the device's wait",
    "other": "the rest of the loop",
}


def find_fastest(found: Results) -> str:
    """Return the precision in which torch is fastest."""
    ours = [arm for arm in found.arms if arm.is_ours]
    return max(ours, key=lambda arm: found.race.ratio(arm.base).value).precision


def find_judged(found: Results) -> str:
    """Return the arm that is held to targets: the last of fastamp's."""
    return [arm.name for arm in found.arms if arm.is_ours][-1]


def measure_gains(found: Results, prefix: str = "") -> list[Measurement]:
    """Return what each precision brings, what fastamp adds, and how fast arms of one's own are.

    More than what fastamp has replaced can give is noise.
    """
    gains = []
    for arm in found.arms[1:]:
        shares = found.shares.get(arm.base, {}) if arm.is_ours and not found.workers else {}
        most = limit(math.fsum(shares.get(part, 0.0) for part in REPLACED))
        is_noise = shares and found.race.ratio(arm.name, arm.base).value > most
        noise = f"noise: at most {most:.2f}x can be gained" if is_noise else ""
        gains.append(compare_arms(found.race, prefix + arm.metric, arm.name, arm.base, noise=noise))
    return gains


def measure_accuracies(found: Results) -> list[Measurement]:
    """Return the accuracies, where they are known, of the judged arm and of those of one's own."""
    names = {find_judged(found): "accuracy"}
    names |= {arm.name: f"accuracy/{arm.name}" for arm in found.arms if arm.is_own}
    return [
        Measurement(name=name, interval=estimate(parts), arm=arm, is_counted=True)
        for arm, name in names.items()
        if (parts := found.scores[arm].accuracies)
    ]


def judge_targets(
    found: Results, peaks: Peaks, targets: dict[str, float], *, at: str = "", excused: str = ""
) -> list[Measurement]:
    """Hold the last of fastamp's arms to the targets, against torch's in FP32.

    `at` is the batch of the peaks in words; `excused` says why speed and memory are not judged.
    """
    base, judged = found.race.arms[0], find_judged(found)
    ends = {name: (least, math.inf) for name, least in targets.items()}
    about: dict[str, Any] = {"target": ends.get("speedup"), "reason": f"{judged} against {base}"}
    measured = [compare_arms(found.race, "speedup", judged, base, excused=excused, **about)]
    counted: Any = partial(Measurement, arm=judged, base=base, is_counted=True)
    if "memory" in ends:
        saving, why = _memory_saving(peaks, base, judged)
        about = {"target": ends["memory"], "reason": f"{why}{at}", "excused": excused}
        measured.append(counted(name="memory saving", interval=saving, unit=" %", **about))
    if "accuracy" in ends:
        gap, why = _accuracy_gap(found, base, judged)
        about = {"target": (-targets["accuracy"], math.inf), "reason": why}
        measured.append(counted(name="accuracy gap", interval=gap, **about))
    return measured


def _memory_saving(peaks: Peaks, base: str, judged: str) -> tuple[Interval | None, str]:
    theirs, ours = peaks.get(base), peaks.get(judged)
    if not theirs or ours is None:
        return None, "this platform counts no peak"
    if theirs < LEAST_NBYTES:
        return None, f"a peak of {theirs / 2**20:.0f} MiB is too small to compare"
    # Integers are divided once, so that a saving of 40 in 100 is the number 0.40 itself.
    saving = Interval.exact((theirs - ours) / theirs)
    return saving, f"{ours / 2**20:.0f} MiB against {theirs / 2**20:.0f}"


def _accuracy_gap(found: Results, base: str, judged: str) -> tuple[Interval | None, str]:
    ours, theirs = found.scores[judged], found.scores[base]
    if not ours.accuracies:
        return None, "the task evaluates no accuracy"
    gap = estimate(np.subtract(ours.accuracies, theirs.accuracies).tolist())
    return gap, f"{ours.accuracy:.4f} against {theirs.accuracy:.4f}"


def make_rows(found: Results) -> list[dict[str, str]]:
    """Return a row for each precision, and one for each arm of one's own."""
    return [
        _row(found, arm.precision, [arm.base, arm.name], arm.base)
        if arm.is_ours
        else _row(found, arm.name, [arm.name], arm.base)
        for arm in found.arms
        if arm.is_ours or arm.is_own
    ]


def _row(found: Results, name: str, arms: list[str], base: str) -> dict[str, str]:
    race, last = found.race, arms[-1]
    times = [show(1e3 * race.quartiles_s(arm)[1], ".4g") for arm in arms]
    scores = [found.scores[arm].accuracy for arm in arms]
    row = {
        "": name,
        "torch ms": times[0],
        "fastamp ms": "".join(times[1:]),
        "over torch [95 %]": race.ratio(last, base).text(".2f", "x"),
        "over torch fp32": f"{show(race.ratio(last).value, '.2f')}x",
        "loss": ", ".join(show(last_loss(found, arm), ".4g") for arm in arms),
    }
    if any(map(math.isfinite, scores)):
        row["accuracy"] = ", ".join(show(score, ".3f") for score in scores)
    return row


def say_in_words(found: Results, gains: list[Measurement]) -> str:
    """Return what precision brings, what fastamp adds, and what most of a step is."""
    fastest, known = find_fastest(found), {each.name: each for each in gains}
    lower = [arm for arm in found.arms[1:] if arm.metric.startswith("precision/")]
    said = [_say_precision(arm.precision, known[arm.metric]) for arm in lower]
    said = said or ["FP32 alone is raced"]
    in_it = f" in {fastest}" * bool(lower)
    text = f"{', '.join(said)}; {_say_added(known[f'fastamp/{fastest}'])}{in_it}"
    shares = found.shares[f"torch {fastest}"]
    parts = {name: shares[part] for part, name in NAMES.items() if part in shares}
    parts["the model's forward and backward pass"] = shares["forward"] + shares["backward"]
    largest = max(parts, key=lambda name: parts[name])
    return f"{text[0].upper()}{text[1:]}; most of a step is {largest} ({parts[largest]:.0%})."


def _say_precision(name: str, gain: Measurement) -> str:
    ratio: Any = gain.interval
    if gain.verdict == UNTOLD:
        return f"cannot tell whether {name} is faster than FP32 here ({ratio.text('.2f', 'x')})"
    if gain.verdict == "equal":
        return f"{name} changes the speed of this training by less than 2 %"
    return f"{name} makes this training {ratio.value:.2f}x as fast as FP32"


def _say_added(gain: Measurement) -> str:
    ratio: Any = gain.interval
    if gain.verdict == UNTOLD:
        why = f"{ratio.value:.2f}x is {gain.noise}" if gain.noise else ratio.text(".2f", "x")
        return f"what fastamp adds cannot be told ({why})"
    if gain.verdict == "equal":
        return "fastamp adds less than 2 %"
    change = abs(ratio.value - 1) * 100
    verb = "adds" if gain.verdict == "faster" else "costs"
    return f"fastamp {verb} {change:{'.0f' if change > 9.95 else '.2g'}} %"
