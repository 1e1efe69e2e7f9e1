"""The oracle: every promise of the core written out in NumPy and float64, slow and obvious."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Array = "NDArray[np.generic]"

STRIP = 8192
STRIPS_PER_CHUNK = 8
CHUNK = STRIP * STRIPS_PER_CHUNK
ROW_BYTES = 512
FINAL_LANES = 1024


def exact_norm(arrays: Sequence[NDArray[np.generic]]) -> np.float32:
    """Return the norm over all arrays, correctly rounded sums (math.fsum), as float32."""
    terms = (np.square(a.astype(np.float64).ravel()) for a in arrays)
    return np.float32(math.sqrt(math.fsum(math.fsum(t.tolist()) for t in terms)))


def _halve(lanes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Join the last axis, a power of two long, by halves until one is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _add_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Join the second last axis, one row after the other."""
    total = np.zeros_like(rows[..., 0, :])
    for i in range(rows.shape[-2]):
        total = total + rows[..., i, :]
    return total


def _pad(values: NDArray[np.float64], multiple: int) -> NDArray[np.float64]:
    return np.pad(values, (0, -values.size % multiple))


def ordered_sum(arrays: Sequence[NDArray[np.generic]], itemsizes: Sequence[int]) -> float:
    """Return the float64 reduction in the order that csrc/step/math.h promises, to the bit."""
    chunks = []
    for array, itemsize in zip(arrays, itemsizes, strict=True):
        values = array.astype(np.float64).ravel()
        lanes = ROW_BYTES // itemsize
        rows = _pad(np.square(values), CHUNK).reshape(-1, STRIPS_PER_CHUNK, STRIP // lanes, lanes)
        chunks.append(_halve(_halve(_add_rows(rows))))
    flat = np.concatenate(chunks) if chunks else np.zeros(0)
    return float(_halve(_add_rows(_pad(flat, FINAL_LANES).reshape(-1, FINAL_LANES))))


def finish(reduced: float, scale: float, max_norm: float | None) -> dict[str, np.float32]:
    """Return the statistics of a step, every operation rounded as the core promises."""
    one = np.float32(1)
    with np.errstate(all="ignore"):
        inv_scale = np.float32(1.0 / np.float64(scale))
        norm = np.float32(np.sqrt(np.float64(reduced)) * np.float64(inv_scale))
        clip_coef = one
        if max_norm is not None:
            clip_coef = np.float32(max_norm) / (norm + np.float32(1e-6))
            clip_coef = min(clip_coef, one)
        return {
            "norm": norm,
            "found_inf": np.float32(not math.isfinite(reduced)),
            "clip_coef": clip_coef,
            "factor": np.float32(clip_coef * inv_scale),
            "scale": np.float32(scale),
        }


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the nearest bit patterns, ties to even; of NaNs 0x7FC0."""
    bits = np.where(np.isnan(values), 0x7FC00000, values.view(np.uint32)).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def rescale(bits: NDArray[np.generic], dtype: str, factor: float) -> NDArray[np.generic]:
    """Return bit patterns multiplied by a float32 factor in float32, rounded once to the dtype."""
    scale = np.float32(factor)
    with np.errstate(all="ignore"):
        if dtype == "float32":
            return (bits.view(np.float32) * scale).view(np.uint32)
        if dtype == "float16":
            return (
                (bits.view(np.float16).astype(np.float32) * scale)
                .astype(np.float16)
                .view(np.uint16)
            )
        return float32_to_bfloat16(bfloat16_to_float32(bits.view(np.uint16)) * scale)


def bucket(duration_ns: int) -> int:
    """Return the histogram's bucket: one a ns below 64, then 32 for each doubling, up to 2**48."""
    ns = min(duration_ns, 2**48 - 1)
    if ns < 64:
        return ns
    octave = math.floor(math.log2(ns))
    octave -= 2**octave > ns
    return 32 * (octave - 5) + ns * 32 // 2**octave


def durations(values_ns: NDArray[np.int64]) -> dict[str, float]:
    """Return the exact figures of a region, in seconds."""
    total = sum(values_ns.tolist())
    quantiles = np.quantile(values_ns, [0.5, 0.9, 0.99], method="inverted_cdf")
    return {
        "count": len(values_ns),
        "total": total / 1e9,
        "mean": total / 1e9 / len(values_ns),
        "min": int(values_ns.min()) / 1e9,
        "max": int(values_ns.max()) / 1e9,
        **{f"p{q}": float(v) / 1e9 for q, v in zip((50, 90, 99), quantiles, strict=True)},
    }


def _ratio(size: NDArray[np.float64], value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ratio of the largest summand of a value to the value; 1 where that is 0."""
    return np.divide(size, value, out=np.ones_like(size), where=value > 0)


def update(
    optimizer: str, options: dict[str, object], step: int, param: Array, grad: Array, *states: Array
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Return a parameter and its states after one update in float64, and their largest summands.

    These are, for each, the largest number that is added on the way, scaled as in the result; for
    the parameter, in the change that is subtracted from it. The formulas are those of torch's
    documentation. `states` are those before the step, whose number is `step`.
    """
    o: Any = options
    p, g, *s = (np.asarray(a, np.float64) for a in (param, grad, *states))
    lr, decay = float(o["lr"]), o["weight_decay"]
    g = -g if o["maximize"] else g
    size = np.abs(g)  # the largest summand of the gradient
    if o.get("decoupled_weight_decay", optimizer == "AdamW"):
        p = p - lr * decay * p
    else:
        size = np.maximum(size, np.abs(decay * p))
        g = g + decay * p
    if optimizer in ("Adam", "AdamW"):
        beta1, beta2 = o["betas"]
        found = [beta1 * s[0] + (1 - beta1) * g, beta2 * s[1] + (1 - beta2) * g * g]
        sizes = [np.maximum(np.abs(s[0]), (1 - beta1) * size)]
        sizes += [np.maximum(beta2 * s[1], (1 - beta2) * np.abs(g) * size)]
        rate = lr / (1 - beta1**step) / (np.sqrt(found[-1] / (1 - beta2**step)) + o["eps"])
        change, in_change = rate * found[0], rate * sizes[0]
        in_change = np.maximum(in_change, np.abs(change) * _ratio(sizes[-1], found[-1]))
    elif optimizer == "SGD" and o["momentum"]:
        momentum = o["momentum"]
        found = [momentum * s[0] + g]
        sizes = [np.maximum(momentum * np.abs(s[0]), size)]
        change, in_change = lr * found[0], lr * sizes[0]
        if o["nesterov"]:
            change, in_change = lr * (g + momentum * found[0]), lr * np.maximum(size, sizes[0])
    else:
        found, sizes, change, in_change = [], [], lr * g, lr * size
    sizes = [np.maximum(size, np.abs(new)) for size, new in zip(sizes, found, strict=True)]
    return [p - change, *found], [np.maximum(in_change, np.abs(change)), *sizes]
