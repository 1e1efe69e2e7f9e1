"""What the results of a task say: figures with their verdicts, a table, and one plain sentence."""

import math
from typing import Any

import numpy as np

from fastamp.bench.arms import Arm, name_of
from fastamp.bench.measure import Results, last_loss
from fastamp.bench.race import LEAST_VALUES, UNTOLD, Interval, estimate, show
from fastamp.bench.record import Measurement, judge, measure
from fastamp.bench.tasks import expect
from fastamp.bench.where import limit

LEAST_NBYTES = 2**25  # of FP32's peak: beside less, memory that kernels keep would count
REPLACED = ("data", "step")  # by fastamp; a device that waits does so for both
TARGETS = {  # of the main job, by metric: the least figure, or of the gap the most
    "speedup": 1.5,
    "memory": 0.4,
    "accuracy": 0.01,
}
Peaks = dict[str, int | None]  # by arm, in bytes; None where the platform counts none


def find_precisions(found: Results) -> list[str]:
    """Return the precisions of which both arms were raced."""
    names = [arm.name for arm in found.arms]
    each = dict.fromkeys(arm.precision for arm in found.arms)
    return [p for p in each if name_of(p) in names and name_of(p, is_ours=True) in names]


def find_fastest(found: Results) -> str:
    """Return the precision in which torch is fastest."""
    return max(find_precisions(found), key=lambda each: found.race.ratio(name_of(each)).value)


def measure_gains(found: Results, prefix: str = "") -> list[Measurement]:
    """Return what each lower precision brings, and what fastamp adds in each precision."""
    race, base, gains = found.race, name_of("fp32"), []
    for each in find_precisions(found):
        torch_arm, ours = name_of(each), name_of(each, is_ours=True)
        if torch_arm != base:
            gains.append(
                measure(f"{prefix}precision/{each}", race.ratio(torch_arm), torch_arm, base)
            )
        gains.append(measure_added(found, f"{prefix}fastamp/{each}", ours, torch_arm))
    return gains


def measure_added(found: Results, name: str, ours: str, torch_arm: str) -> Measurement:
    """Return what fastamp makes of torch's arm; more than what it replaced can give is noise."""
    ratio = found.race.ratio(ours, torch_arm)
    parts = (*REPLACED, "waits")
    most = math.inf if found.workers else limit(found.shares.get(torch_arm, {}), *parts)
    if ratio.value <= most or not found.shares.get(torch_arm):
        return measure(name, ratio, ours, torch_arm)
    why = f"noise: at most {most:.2f}x can be gained"
    about: dict[str, Any] = {"arm": ours, "base": torch_arm, "unit": "x", "reason": why}
    return Measurement(name=name, interval=ratio, verdict=UNTOLD, **about)


def measure_own(found: Results) -> list[Measurement]:
    """Return how many times as fast each arm of one's own is as torch's, and its accuracy."""
    measured = []
    for arm in (arm for arm in found.arms if arm.is_own):
        base = _base_of(found, arm)
        ratio = found.race.ratio(arm.name, base)
        measured.append(measure(f"speedup/{arm.name}", ratio, arm.name, base))
        measured += measure_accuracy(found, arm.name, f"/{arm.name}")
    return measured


def _base_of(found: Results, arm: Arm) -> str:
    """Return torch's arm in the precision of an arm of one's own."""
    base = name_of(arm.precision)
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
    about: dict[str, Any] = {"arm": judged, "base": base}
    who, measured = f"{judged} against {base}", []
    ratio = found.race.ratio(judged)
    if "speedup" in targets:
        ends, why = (targets["speedup"], math.inf), f"{who}: {excused}" if excused else who
        row = judge("speedup", ratio, ends, "x", why, excused=bool(excused), **about)
        measured.append(row)
    else:
        measured.append(measure("speedup", ratio, judged, base))
    if "memory" in targets:
        saving, why = _memory_saving(peaks, base, judged, batch)
        is_excused = bool(excused) and saving is not None
        why = excused if is_excused else why
        ends, unit = (targets["memory"], math.inf), " %"
        row = judge("memory saving", saving, ends, unit, why, excused=is_excused, **about)
        measured.append(_counted(row))
    if "accuracy" in targets:
        gap, why = _accuracy_gap(found, base, judged)
        row = judge("accuracy gap", gap, (-targets["accuracy"], math.inf), "", why, **about)
        measured.append(_counted(row))
    return measured


def _counted(row: Measurement) -> Measurement:
    return Measurement(**{**vars(row), "is_counted": True})


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
    return saving, f"{ours / 2**20:.0f} MiB against {theirs / 2**20:.0f}{at}, no interval"


def _accuracy_gap(found: Results, base: str, judged: str) -> tuple[Interval | None, str]:
    ours, theirs = (found.scores[arm] for arm in (judged, base))
    losses = last_loss(found, judged), last_loss(found, base)
    accuracies = [each[0].accuracy for each in (ours, theirs) if each]
    for name, pair in (("a loss", losses), ("an accuracy", accuracies)):
        if len(pair) == 2 and not math.isfinite(pair[1]):
            return None, f"the task itself has {name} of {pair[1]} in {base}"
        if len(pair) == 2 and not math.isfinite(pair[0]):
            return Interval.exact(-math.inf), f"{name} of {pair[0]} against {pair[1]}"
    if len(accuracies) < 2:
        return None, "the task has no function that evaluates"
    parts = ours[0].window_accuracies, theirs[0].window_accuracies
    wanted = f"as many numbers for each arm, {len(parts[1])} as for {base}"
    is_same = len(parts[0]) == len(parts[1])
    expect(is_same, "options['evaluate']", wanted, f"{len(parts[0])} for {judged}")
    over = "over the held-out data"
    over = "too few numbers for an interval" if len(parts[0]) < LEAST_VALUES else over
    why = f"{accuracies[0]:.4f} against {accuracies[1]:.4f}, {over}"
    return estimate(np.subtract(*parts).tolist()), why


def make_rows(found: Results) -> list[dict[str, str]]:
    """Return a row for each precision, and one for each arm of one's own."""
    race, rows = found.race, []
    for each in find_precisions(found):
        pair = [name_of(each), name_of(each, is_ours=True)]
        over = race.ratio(pair[1], pair[0]).text(".2f", "x")
        rows.append(_row(found, each, pair, over))
    for arm in (arm for arm in found.arms if arm.is_own):
        over = race.ratio(arm.name, _base_of(found, arm)).text(".2f", "x")
        rows.append(_row(found, arm.name, [arm.name], over))
    return rows


def _row(found: Results, name: str, arms: list[str], over: str) -> dict[str, str]:
    times = [show(1e3 * found.race.quartiles_s(arm)[1], ".4g") for arm in arms]
    losses = ", ".join(show(last_loss(found, arm), ".4g") for arm in arms)
    scores = [found.scores[arm][0].accuracy for arm in arms if found.scores[arm]]
    row = {"": name, "torch ms": times[0], "fastamp ms": times[1] if times[1:] else ""}
    whole = show(found.race.ratio(arms[-1]).value, ".2f")
    row |= {"over torch [95 %]": over, "over torch fp32": f"{whole}x", "loss": losses}
    if any(map(math.isfinite, scores)):
        row["accuracy"] = ", ".join(show(score, ".3f") for score in scores)
    return row


def say_in_words(found: Results, gains: list[Measurement], peaks: Peaks) -> str:
    """Return what precision brings, what fastamp adds, and what most of a step is."""
    precisions = find_precisions(found)
    fastest = find_fastest(found)
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
    model = shares["forward"] + shares["backward"]
    known_parts = {"the model's forward and backward pass": model, **_others(shares)}
    name, share = max(known_parts.items(), key=lambda pair: pair[1])
    return f"{text[0].upper()}{text[1:]}; most of a step is {name} ({share:.0%})."


def _others(shares: dict[str, float]) -> dict[str, float]:
    names = {"data": "the wait for data", "step": "clip and step", "waits": "the device's wait"}
    names["other"] = "the rest of the loop"
    return {name: shares[part] for part, name in names.items() if part in shares}


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
        why = f"{ratio.value:.2f}x is {gain.reason}" if ratio and gain.reason else shown
        return f"what fastamp adds cannot be told ({why})"
    if gain.verdict == "equal":
        return "fastamp adds less than 2 %"
    if ratio.low > 1:
        return f"fastamp adds {_percent(ratio.value - 1)}"
    return f"fastamp costs {_percent(1 - ratio.value)}"


def _percent(change: float) -> str:
    return f"{change * 100:{'.0f' if change > 0.0995 else '.2g'}} %"
