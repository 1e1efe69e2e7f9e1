"""The step against the oracle, on drawn lists of gradients for every backend.

60 for each test and backend, or as many as `FASTAMP_EXAMPLES` says: by hand 3,000.

Element-wise results are compared bit for bit; so are the norms of 16-bit and 32-bit gradients. A
tolerance applies to the other norms, which are not promised to the last bit: those of 64-bit
gradients, whose squares round in float64.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support import reference
from support.bits import bits
from support.drawn import EXAMPLES, hypothesis
from support.gradients import parameters_with, values_of

import fastamp
from fastamp import _ops

st = hypothesis.strategies
given = hypothesis.given

# NumPy's overflows
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

EXACT = [torch.float32, torch.bfloat16, torch.float16]
WIDE = [torch.float64, torch.complex128]
DTYPES = [*EXACT, *WIDE, torch.complex64]
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = ["any bits", "denormal", "largest"]


class Drawn(NamedTuple):
    """One gradient, before it lies on a device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    values: str
    seed: int
    bad: float | None
    times: int


class Placed(NamedTuple):
    """A gradient on a device, what lies between its elements, and its bits at the start."""

    tensor: torch.Tensor
    gaps: torch.Tensor
    before: np.ndarray
    times: int


def gradients(dtypes, times=(1, 1, 1, 2)):
    """Draw a list of gradients; `times` says how often the list holds the same one."""
    small = st.lists(st.integers(0, 7), max_size=4).map(tuple)
    long = st.sampled_from([(1,), (127,), (129,), (1003,), (8191,), (8193,)])
    layouts = ["plain", "permuted", "channels last", "gaps", "offset"]
    one = st.builds(
        Drawn,
        dtype=st.sampled_from(dtypes),
        shape=small | small | long,
        layout=st.sampled_from(layouts),
        values=st.sampled_from(["normal", "mostly zero", *SPECIAL]),
        seed=st.integers(0, 2**32 - 1),
        bad=st.sampled_from([None] * 9 + [math.nan, math.inf, -math.inf]),
        times=st.sampled_from(times),
    )
    return st.lists(one, max_size=4)


def make_values(drawn: Drawn, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random numbers of the drawn kind, finite but for `bad`, which goes in the middle."""
    real = REAL.get(drawn.dtype, drawn.dtype)
    size = shape if real is drawn.dtype else (*shape, 2)
    rng = np.random.default_rng(drawn.seed)
    if drawn.values in SPECIAL:
        # The patterns of finite magnitudes are 0 to that of the largest; the first are denormal.
        signed = SIGNED[real.itemsize]
        largest = torch.tensor(torch.finfo(real).max, dtype=real).view(signed).item()
        normal = torch.tensor(torch.finfo(real).tiny, dtype=real).view(signed).item()
        low, high = {"any bits": (0, largest), "denormal": (0, normal)}.get(
            drawn.values, (largest - 2, largest)
        )
        patterns = torch.from_numpy(np.asarray(rng.integers(low, high, size, endpoint=True)))
        signs = torch.from_numpy(np.asarray(rng.integers(0, 2, size))).bool()
        magnitudes = patterns.to(signed).view(real)
        values = torch.where(signs, -magnitudes, magnitudes)
    else:
        kept = rng.random(size) < (0.1 if drawn.values == "mostly zero" else 1.0)
        values = torch.from_numpy(np.asarray(rng.standard_normal(size) * kept)).to(real)
    if drawn.bad is not None and values.numel():
        values.view(-1)[values.numel() // 2] = drawn.bad
    return values if real is drawn.dtype else torch.complex(values[..., 0], values[..., 1])


def lay_out(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in a memory layout, and the memory beside them, which is NaN."""
    shape = values.shape
    if layout == "permuted":
        order = tuple(reversed(range(values.ndim)))
        values = values.permute(order).contiguous().permute(order)
    elif layout == "channels last" and values.ndim == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    elif layout == "gaps" and values.ndim:
        memory = values.new_full((*shape[:-1], 2 * shape[-1]), math.nan)
        memory[..., ::2] = values
        return memory[..., ::2], memory[..., 1::2]
    elif layout == "offset":
        memory = values.new_full((values.numel() + 2,), math.nan)
        memory[1:-1] = values.reshape(-1)
        return memory[1:-1].view(shape), memory[:: values.numel() + 1]
    return values, values.new_zeros(0)


def place(drawn: Drawn, device: str) -> Placed:
    """Make one gradient."""
    tensor, gaps = lay_out(make_values(drawn, drawn.shape).to(device), drawn.layout)
    return Placed(tensor, gaps, bits(tensor).copy(), drawn.times)


def in_list(placed: list[Placed]) -> list[torch.Tensor]:
    """List the tensors for a call, each as often as it was drawn."""
    return [p.tensor for p in placed for _ in range(p.times)]


def parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return real and imaginary parts in the last dimension, or the tensor."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def multiplied(raw: np.ndarray, dtype: torch.dtype, factor: np.floating) -> np.ndarray:
    """Return the bits of factor times the elements; a factor of 1 writes nothing."""
    real = REAL.get(dtype, dtype)
    if real is torch.float64:
        return (raw.view(np.float64) * np.float64(factor)).view(np.uint64)
    return reference.rescale(raw, str(real).removeprefix("torch."), float(np.float32(factor)))


def assert_multiplied(got: torch.Tensor, placed: Placed, *factors: np.floating) -> None:
    """Compare a gradient's bits with those of a product; any NaN equals any other."""
    assert placed.gaps.isnan().all()
    raw = placed.before
    for factor in factors:
        raw = raw if factor == 1 else multiplied(raw, got.dtype, factor)
    real = REAL.get(got.dtype, got.dtype)
    ours = torch.from_numpy(bits(got).view(f"i{real.itemsize}")).view(real)
    theirs = torch.from_numpy(raw.view(f"i{real.itemsize}")).view(real)
    if got.is_complex():
        # torch multiplies by factor + 0j: the sign of a zero may change, and a part that is not
        # finite spoils the other.
        spoilt = ~theirs.view(-1, 2).isfinite().all(1)
        assert torch.equal(~ours.view(-1, 2).isfinite().all(1), spoilt)
        assert torch.equal(ours.view(-1, 2)[~spoilt], theirs.view(-1, 2)[~spoilt])
        return
    assert torch.equal(ours.isnan(), theirs.isnan())
    kept = ~theirs.isnan()
    np.testing.assert_array_equal(bits(ours[kept]), bits(theirs[kept]))


def is_finite(placed: list[Placed]) -> bool:
    return all(bool(p.tensor.isfinite().all()) for p in placed)


def clip_coef(norm: np.floating, max_norm: float) -> np.floating:
    """Return torch.nn.utils' coefficient, in the norm's precision."""
    precise = type(norm)
    coef = precise(max_norm) / (norm + precise(1e-6))
    return coef if np.isnan(coef) else min(coef, precise(1))


def oracle_norm(tensors: list[torch.Tensor]) -> np.floating:
    """Return the norm of tensors of any dtypes by NumPy."""
    values = np.concatenate([np.zeros(1), *(values_of(parts(t)).ravel() for t in tensors)])
    norm = np.sqrt(np.square(values).sum())
    return norm if any(t.dtype in WIDE for t in tensors) else np.float32(norm)


@EXAMPLES
@given(
    drawn=gradients(EXACT),
    scale=st.none() | st.floats(2.0**-20, 2.0**24, width=32),
    max_norm=st.none() | st.sampled_from([0.0, 1e-30, 1.0, math.inf]) | st.floats(0, 1e9),
    only_finite=st.booleans(),
)
def test_the_norm_is_exact_and_the_rest_follows(
    backend, device, drawn, scale, max_norm, only_finite
):
    placed = [place(d, device) for d in drawn]
    tensors = in_list(placed) or [torch.zeros(0, device=device)]
    there = None if scale is None else torch.tensor(scale, device=device)
    clip = _ops.Clip(there, max_norm, only_finite)
    stats = _ops.hold(tensors).measure(clip)
    expected_norm = reference.exact_norm([*map(values_of, tensors)])
    if scale is None:
        np.testing.assert_equal(np.float32(stats.norm.item()), expected_norm)
    reduced = _ops.fallback.add_up(
        [part.reduce() for part in _ops.hold(tensors)._parts]
    ).total.item()
    np.testing.assert_equal(np.float32(np.sqrt(reduced)), expected_norm)
    finite = is_finite(placed)
    applied = max_norm if finite or not only_finite else None
    expected = reference.finish(reduced, scale or 1.0, applied)
    assert expected["found_inf"] == (not finite)
    got = {name: np.float32(getattr(stats, name).item()) for name in expected}
    np.testing.assert_equal(got, expected)


@EXAMPLES
@given(
    drawn=gradients(DTYPES),
    max_norm=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e30, math.inf]) | st.floats(0, 1e4),
    where_none=st.integers(0, 4),
)
def test_the_norm_is_right_and_clipping_multiplies_every_element_once(
    backend, device, drawn, max_norm, where_none
):
    if device == "cuda":  # torch's kernel multiplies one that is twice in a list once or twice
        drawn = [d if d.dtype in EXACT else d._replace(times=1) for d in drawn]
    placed = [place(d, device) for d in drawn]
    parameters = parameters_with(*in_list(placed))
    dtypes, expected = {p.dtype for p in parameters}, oracle_norm([p.grad for p in parameters])
    parameters[where_none:where_none] = parameters_with(None)
    norm = fastamp.clip_grad_norm_(parameters, max_norm).cpu().numpy()[()]
    assert norm.dtype == expected.dtype
    # float32 rounds once after sums in float64.
    rtol = 0 if dtypes <= {*EXACT} else 1e-12 if norm.dtype == np.float64 else 1.2e-7
    # The squares of float64 numbers below 1e-154 are denormal, and lose digits.
    np.testing.assert_allclose(norm, expected, rtol=rtol, atol=1e-150)
    coef = clip_coef(norm, max_norm)
    for p in placed:
        assert_multiplied(p.tensor, p, *[coef] * p.times)


@EXAMPLES
@given(
    drawn=gradients([d for d in DTYPES if d != torch.float16], times=[1]),
    scale=st.sampled_from([1.0, 2.0, 2.0**16]) | st.floats(1.0, 2.0**20, width=32),
    max_norm=st.none() | st.floats(1e-6, 1e6),
    how=st.sampled_from(["step", "unscale, step", "clip, step"]),
)
def test_a_step_unscales_clips_and_skips(backend, device, drawn, scale, max_norm, how):
    placed = [place(d, device) for d in drawn]
    finite = is_finite(placed)
    parameters = parameters_with(*in_list(placed), torch.ones(1, device=device))
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = fastamp.GradScaler(device, init_scale=scale)
    scaler.scale(torch.ones((), device=device))
    if how == "unscale, step":
        scaler.unscale_(optimizer)
    elif how == "clip, step" and max_norm is not None:
        scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer, max_norm=None if how == "clip, step" else max_norm)
    report = scaler.last_step
    assert report.skipped is not finite
    coef = report.clip_coef.cpu().numpy()[()]
    if finite and max_norm is not None:
        assert coef == clip_coef(report.norm.cpu().numpy()[()], max_norm)
    inverse = np.float32(1 / np.float64(scale))
    factors = [inverse * coef]
    if not finite:
        factors = [] if report.way == "native" and how == "step" else [inverse]
    elif how == "unscale, step":
        factors = [inverse, coef]
    for parameter, p in zip(parameters, placed, strict=False):
        assert_multiplied(parameter.grad, p, *factors)
        moved = torch.zeros_like(p.tensor) if report.skipped else -parameter.grad
        torch.testing.assert_close(parameter, moved, rtol=0, atol=0, equal_nan=True)
