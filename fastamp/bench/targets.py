"""What the results of the main job say: targets that are met or missed, and one plain sentence."""

import argparse
import math
from typing import Any

import numpy as np

from fastamp.bench.advice import RACED, Advice
from fastamp.bench.measure import Results
from fastamp.bench.race import LEAST_VALUES, UNTOLD, Interval, estimate, show
from fastamp.bench.record import Measurement, judge
from fastamp.bench.tasks import expect

LEAST_NBYTES = 2**25  # of FP32's peak: beside less, memory that kernels keep would count
SAMPLES = 1.1  # times as many are too many to compare losses
# What to mend next, by `Advice.part`; without "step", which the judged arm has from fastamp.
NEXT = {
    "loader": "your loader is",
    "resident": "data that stay on the GPU are",
    "precision": "the precision is",
    "waits": "the waits of the host are",
}


def find_stock(found: Results) -> str:
    """Return the arm beside the judged one: the same precision without fastamp."""
    return "amp" if "amp" in found.race.arms else found.race.arms[0]


def judge_targets(
    args: argparse.Namespace, found: Results, *, excused: dict[str, str]
) -> list[Measurement]:
    """Hold the last arm, AMP with fastamp, to the targets, against the first, FP32."""
    base, judged = found.race.arms[0], found.race.arms[-1]
    builds, most = f"{len(found.race.builds)} builds", args.max_accuracy_gap
    saving, peaks = _memory_saving(found, base, judged)
    gap, scores = _accuracy_gap(found, base, judged)
    rows = (
        ("speedup", found.race.ratio(judged), (args.min_speedup, math.inf), "x", builds),
        ("memory saving", saving, (args.min_memory_saving, math.inf), " %", peaks),
        ("accuracy gap", gap, (-most, math.inf), "", scores),
    )
    arms = f"{judged} against {base}: "
    return [
        judge(
            name,
            figure,
            ends,
            unit,
            arms + excused.get(name, reason),
            arm=judged,
            base=base,
            excused=name in excused,
            is_counted=name != "speedup",
        )
        for name, figure, ends, unit, reason in rows
    ]


def judge_arms(found: Results, own: list[str], against: str) -> list[Measurement]:
    """Say of each arm of one's own whether it is faster than the arm that it changes."""
    measured = []
    for arm in own:
        ratio = found.race.ratio(arm, against)
        parts = [_compare_peaks(found, arm, against)]
        parts += _compare_quality(found, arm, against)
        about: dict[str, Any] = {"arm": arm, "base": against}
        reason = f"{arm} against {against}, in samples a second; {', '.join(filter(None, parts))}"
        about |= {"name": f"speedup/{arm}", "unit": "x", "verdict": ratio.verdict}
        measured.append(Measurement(interval=ratio, reason=reason, **about))
        measured += measure_arm(found, arm, f"/{arm}")
    return measured


def measure_arm(found: Results, arm: str, ending: str = "") -> list[Measurement]:
    """Return an arm's peak of memory and its accuracy, where they are known."""
    measured: list[Measurement] = []
    about: dict[str, Any] = {"arm": arm, "is_counted": True}
    if (peak := found.peaks[arm]) is not None:
        figure = Interval.exact(peak)
        name = f"peak_memory{ending}"
        measured.append(Measurement(name=name, interval=figure, unit=" bytes", **about))
    if found.scores[arm]:
        figure = mean_accuracy(found, arm)
        measured.append(Measurement(name=f"accuracy{ending}", interval=figure, **about))
    return measured


def _compare_quality(found: Results, arm: str, base: str) -> list[str]:
    """Return losses and accuracies, unless one of the two has seen other amounts of samples."""
    seen = [found.samples.get(name, 1) for name in (arm, base)]
    if max(seen) > SAMPLES * min(seen):
        return ["{} samples against {}: losses are not compared".format(*seen)]
    losses = (show(last_losses(found, name)[0], ".4f") for name in (arm, base))
    parts = ["loss {} against {}".format(*losses)]
    if found.scores[arm] and found.scores[base]:
        scores = (mean_accuracy(found, name).value for name in (arm, base))
        parts.append("accuracy {:.4f} against {:.4f}".format(*scores))
    return parts


def _compare_peaks(found: Results, arm: str, base: str) -> str:
    saving, _ = _memory_saving(found, base, arm)
    if saving is None:
        return ""
    return f"{abs(saving.value) * 100:.0f} % {'less' if saving.value > 0 else 'more'} memory"


def _memory_saving(found: Results, base: str, judged: str) -> tuple[Interval | None, str]:
    theirs, ours = found.peaks[base], found.peaks[judged]
    if not theirs or ours is None:
        return None, "this platform counts no peak"
    if theirs < LEAST_NBYTES:
        return None, f"a peak of {theirs / 2**20:.0f} MiB is too small to compare"
    # Integers are divided once, so that a saving of 40 in 100 is the number 0.40 itself.
    saving = Interval.exact((theirs - ours) / theirs)
    peaks = f"a peak of {ours / 2**20:.0f} MiB against {theirs / 2**20:.0f} MiB"
    batch = f" at batches of {found.memory_batch}" * (found.memory_batch is not None)
    return saving, f"{peaks}{batch}, one process each, no interval"


def _accuracy_gap(found: Results, base: str, judged: str) -> tuple[Interval | None, str]:
    pairs = list(zip(found.scores[judged], found.scores[base], strict=True))
    losses = zip(last_losses(found, judged), last_losses(found, base), strict=True)
    accuracies = ((ours.accuracy, theirs.accuracy) for ours, theirs in pairs)
    for name, figures in (("a loss", losses), ("an accuracy", accuracies)):
        for mine, other in figures:
            if not math.isfinite(other):
                return None, f"the task itself has {name} of {other} in {base}"
            if not math.isfinite(mine):
                return Interval.exact(-math.inf), f"{name} of {mine} against {other}"
    if not pairs:
        return None, "the task has no function that evaluates"
    counts = [len(_windows(found, arm)) for arm in (judged, base)]
    wanted = f"as many numbers for each arm, {counts[1]} as for {base}"
    expect(counts[0] == counts[1], "options['evaluate']", wanted, f"{counts[0]} for {judged}")
    shares = np.subtract(_windows(found, judged), _windows(found, base))
    gaps = ", ".join(f"{ours.accuracy:.4f} against {theirs.accuracy:.4f}" for ours, theirs in pairs)
    over = "the interval is over the held-out data, not over trainings"
    over = "too few numbers for an interval" if len(shares) < LEAST_VALUES else over
    return estimate(shares.tolist()), f"one training each, {gaps}; {over}"


def last_losses(found: Results, arm: str) -> list[float]:
    """Return the validation loss, or the mean of the last quarter of the training."""
    losses = [score.loss for score in found.scores[arm] if score.loss is not None]
    curve = found.losses.get(arm, [])
    return losses or [float(np.mean(curve[-(len(curve) // 4 or 1) :] or [math.nan]))]


def mean_accuracy(found: Results, arm: str) -> Interval:
    """Return the mean accuracy over the parts of the held-out data."""
    return estimate(_windows(found, arm))


def _windows(found: Results, arm: str) -> list[float]:
    return found.scores[arm][0].window_accuracies


def say_in_words(found: Results, advice: list[Advice], added: Interval, limit: float) -> str:
    """Return what mixed precision and fastamp bring, and what is next, in one sentence.

    Args:
        found: what was measured.
        advice: what would help, best first.
        added: what fastamp's step makes of a whole step, its data included.
        limit: how many times as fast the whole step were if torch's step took no time.
    """
    precision = "This CPU has no units for a lower precision, so all arms train in FP32"
    if find_stock(found) != found.race.arms[0]:
        precision = _say_precision(found.race.ratio(find_stock(found))) + _memory(found)
    following = "nothing else would make a step faster by 2 %"
    for best in advice:
        if best.part in NEXT:
            about = "about" if best.why == RACED else "up to"
            gain = best.gain.value if best.why == RACED else best.gain.high
            following = f"{NEXT[best.part]} next to mend: {about} {gain:.2f}x"
            break
    return f"{precision}; {_share(added, limit)}; {following}."


def _say_precision(ratio: Interval) -> str:
    if ratio.verdict == UNTOLD:
        return f"Cannot tell whether mixed precision is faster here ({ratio.text('.2f', 'x')})"
    if ratio.verdict == "equal":
        return "Mixed precision changes the speed of this model by less than 2 % on this machine"
    return f"Mixed precision makes this model {ratio.value:.2f}x as fast on this machine"


def _memory(found: Results) -> str:
    base = found.race.arms[0]
    saving, _ = _memory_saving(found, base, find_stock(found))
    batch = "" if found.memory_batch is None else f" at batches of {found.memory_batch}"
    shown = {*found.batch_sizes}
    batch += f", not {max(shown)}" * (bool(batch) and len(shown) == 1)
    if saving is not None and 0.45 < saving.value < 0.55:
        return f" and halves its memory{batch}"
    change = _compare_peaks(found, find_stock(found), base)
    return f" and takes {change}{batch}" if change and not change.startswith("0 ") else ""


def _share(ratio: Interval, limit: float) -> str:
    if is_noise(ratio, limit):
        return f"what fastamp adds cannot be told: {say_noise(ratio, limit)}"
    if ratio.verdict == UNTOLD:
        return f"what fastamp adds cannot be told ({ratio.text('.2f', 'x')})"
    if ratio.verdict == "equal":
        return "fastamp adds less than 2 %"
    if ratio.low > 1:
        return f"fastamp adds {_percent(ratio.value - 1)}"
    return f"fastamp costs {_percent(1 - ratio.value)}"


def is_noise(ratio: Interval, limit: float) -> bool:
    """Say whether a ratio is more than the part that was replaced can give (Amdahl)."""
    return ratio.value > limit


def say_noise(ratio: Interval, limit: float) -> str:
    """Return why such a ratio is noise, in words."""
    share = f"{100 * (1 - 1 / limit):.2g} % of the time"
    return (
        f"{ratio.value:.2f}x is noise, since what it replaces takes {share}: {limit:.2f}x at most"
    )


def _percent(change: float) -> str:
    return f"{change * 100:{'.0f' if change > 0.0995 else '.2g'}} %"
