"""What the results of a task say: figures with their verdicts, a table, and one plain sentence."""

import math
from typing import Any

import numpy as np

from fastamp.bench.measure import Results, last_loss, limit
from fastamp.bench.race import LEAST_VALUES, UNTOLD, Interval, estimate, show
from fastamp.bench.record import Measurement, compare_arms
from fastamp.bench.trainer import name_of

LEAST_NBYTES = 2**25  # of FP32's peak: beside less, memory that kernels keep would count
REPLACED = ("data", "step", "waits")  # by fastamp; a device that waits does so for both
TARGETS = {  # of the main job, by metric: the least figure, or of the gap the most
    "speedup": 1.5,
    "memory": 0.4,
    "accuracy": 0.01,
}
Peaks = dict[str, int | None]  # by arm, in bytes; None where the platform counts none
NAMES = {  # of the parts of a step but for the model, in a sentence
    "data": "the wait for data",
    "step": "clip and step",
    "waits": "the device's wait",
    "other": "the rest of the loop",
}


def find_precisions(found: Results) -> list[str]:
    """Return the precisions that were raced."""
    return [arm.precision for arm in found.arms if arm.is_ours]


def find_fastest(found: Results) -> str:
    """Return the precision in which torch is fastest."""
    return max(find_precisions(found), key=lambda each: found.race.ratio(name_of(each)).value)


def measure_gains(found: Results, prefix: str = "") -> list[Measurement]:
    """Return what each lower precision brings, and what fastamp adds in each precision.

    More than what fastamp has replaced can give is noise.
    """
    base, gains = name_of("fp32"), []
    for each in find_precisions(found):
        torch_arm, ours = name_of(each), name_of(each, is_ours=True)
        if torch_arm != base:
            gains.append(compare_arms(found.race, f"{prefix}precision/{each}", torch_arm, base))
        shares = found.shares.get(torch_arm, {})
        most = limit(math.fsum(shares.get(part, 0.0) for part in REPLACED))
        is_noise = shares and not found.workers and found.race.ratio(ours, torch_arm).value > most
        noise = f"noise: at most {most:.2f}x can be gained" if is_noise else ""
        name = f"{prefix}fastamp/{each}"
        gains.append(compare_arms(found.race, name, ours, torch_arm, noise=noise))
    return gains


def measure_own(found: Results) -> list[Measurement]:
    """Return how many times as fast each arm of one's own is as torch's, and its accuracy."""
    measured = []
    for arm in (arm for arm in found.arms if arm.is_own):
        base = _base_of(found, arm.precision)
        measured.append(compare_arms(found.race, f"speedup/{arm.name}", arm.name, base))
        measured += measure_accuracy(found, arm.name, f"/{arm.name}")
    return measured


def _base_of(found: Results, precision: str) -> str:
    """Return torch's arm in the precision of an arm of one's own."""
    base = name_of(precision)
    return base if base in found.race.arms else found.race.arms[0]


def measure_accuracy(found: Results, arm: str, ending: str = "") -> list[Measurement]:
    """Return the mean accuracy over the parts of the held-out data, where it is known."""
    if not found.scores[arm] or math.isnan(found.scores[arm][0].accuracy):
        return []
    figure = estimate(found.scores[arm][0].window_accuracies)
    return [Measurement(name=f"accuracy{ending}", interval=figure, arm=arm, is_counted=True)]


def judge_targets(
    found: Results,
    peaks: Peaks,
    targets: dict[str, float],
    *,
    batch: int | None,
    excused: str,
) -> list[Measurement]:
    """Hold the last of fastamp's arms to the targets, against torch's in FP32.

    `batch` is the batch of the peaks, where it is not that of the steps; `excused` says why a speed
    is not judged.
    """
    base, judged = found.race.arms[0], [arm.name for arm in found.arms if arm.is_ours][-1]
    about: dict[str, Any] = {"arm": judged, "base": base, "is_counted": True}
    held: dict[str, Any] = {}
    if "speedup" in targets:
        held = {"target": (targets["speedup"], math.inf), "excused": excused}
        held["reason"] = f"{judged} against {base}"
    measured = [compare_arms(found.race, "speedup", judged, base, **held)]
    if "memory" in targets:
        saving, why = _memory_saving(peaks, base, judged, batch)
        held = {"target": (targets["memory"], math.inf), "unit": " %", "reason": why}
        held["excused"] = excused if saving is not None else ""
        measured.append(Measurement(name="memory saving", interval=saving, **held, **about))
    if "accuracy" in targets:
        gap, why = _accuracy_gap(found, base, judged)
        held = {"target": (-targets["accuracy"], math.inf), "reason": why}
        measured.append(Measurement(name="accuracy gap", interval=gap, **held, **about))
    return measured


def _memory_saving(
    peaks: Peaks, base: str, judged: str, batch: int | None
) -> tuple[Interval | None, str]:
    theirs, ours = peaks.get(base), peaks.get(judged)
    if not theirs or ours is None:
        return None, "this platform counts no peak"
    if theirs < LEAST_NBYTES:
        return None, f"a peak of {theirs / 2**20:.0f} MiB is too small to compare"
    # Integers are divided once, so that a saving of 40 in 100 is the number 0.40 itself.
    saving = Interval.exact((theirs - ours) / theirs)
    at = f" at batches of {batch}" * (batch is not None)
    return saving, f"{ours / 2**20:.0f} MiB against {theirs / 2**20:.0f}{at}"


def _accuracy_gap(found: Results, base: str, judged: str) -> tuple[Interval | None, str]:
    ours, theirs = (found.scores[arm] for arm in (judged, base))
    losses = last_loss(found, judged), last_loss(found, base)
    accuracies = [each[0].accuracy for each in (ours, theirs) if each]
    if len(accuracies) < 2:
        return None, "the task has no function that evaluates"
    if math.isfinite(losses[1]) and not math.isfinite(losses[0]):
        return Interval.exact(-math.inf), f"a loss of {losses[0]} against {losses[1]}"
    parts = ours[0].window_accuracies, theirs[0].window_accuracies
    why = f"{accuracies[0]:.4f} against {accuracies[1]:.4f}"
    why += ", too few for an interval" * (len(parts[0]) < LEAST_VALUES)
    return estimate(np.subtract(*parts).tolist()), why


def make_rows(found: Results) -> list[dict[str, str]]:
    """Return a row for each precision, and one for each arm of one's own."""
    pairs = [(p, [name_of(p), name_of(p, is_ours=True)]) for p in find_precisions(found)]
    rows = [_row(found, name, arms, arms[0]) for name, arms in pairs]
    own = [arm for arm in found.arms if arm.is_own]
    return rows + [_row(found, a.name, [a.name], _base_of(found, a.precision)) for a in own]


def _row(found: Results, name: str, arms: list[str], base: str) -> dict[str, str]:
    race, last = found.race, arms[-1]
    times = [show(1e3 * race.quartiles_s(arm)[1], ".4g") for arm in arms]
    scores = [found.scores[arm][0].accuracy for arm in arms if found.scores[arm]]
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


def say_in_words(found: Results, gains: list[Measurement], peaks: Peaks) -> str:
    """Return what precision brings, what fastamp adds, and what most of a step is."""
    precisions, fastest = find_precisions(found), find_fastest(found)
    known = {each.name: each for each in gains}
    said = [_say_precision(each, known[f"precision/{each}"].interval) for each in precisions[1:]]
    said = said or ["FP32 alone is raced"]
    saving, _ = _memory_saving(peaks, found.race.arms[0], name_of(precisions[-1]), None)
    if saving is not None and abs(saving.value) >= 0.01:
        kind = "less" if saving.value > 0 else "more"
        said[-1] += f" and takes {abs(saving.value) * 100:.0f} % {kind} memory"
    in_it = f" in {fastest}" * (len(precisions) > 1)
    text = f"{', '.join(said)}; {_say_added(known[f'fastamp/{fastest}'])}{in_it}"
    shares = found.shares[name_of(fastest)]
    parts = {name: shares[part] for part, name in NAMES.items() if part in shares}
    parts["the model's forward and backward pass"] = shares["forward"] + shares["backward"]
    largest = max(parts, key=lambda name: parts[name])
    return f"{text[0].upper()}{text[1:]}; most of a step is {largest} ({parts[largest]:.0%})."


def _say_precision(name: str, ratio: Interval | None) -> str:
    if ratio is None or ratio.verdict == UNTOLD:
        shown = "" if ratio is None else f" ({ratio.text('.2f', 'x')})"
        return f"cannot tell whether {name} is faster than FP32 here{shown}"
    if ratio.verdict == "equal":
        return f"{name} changes the speed of this training by less than 2 %"
    return f"{name} makes this training {ratio.value:.2f}x as fast as FP32"


def _say_added(gain: Measurement) -> str:
    ratio = gain.interval
    if ratio is None or gain.verdict == UNTOLD:
        shown = "" if ratio is None else ratio.text(".2f", "x")
        why = f"{ratio.value:.2f}x is {gain.noise}" if ratio and gain.noise else shown
        return f"what fastamp adds cannot be told ({why})"
    if gain.verdict == "equal":
        return "fastamp adds less than 2 %"
    change = abs(ratio.value - 1) * 100
    verb = "adds" if gain.verdict == "faster" else "costs"
    return f"fastamp {verb} {change:{'.0f' if change > 9.95 else '.2g'}} %"
