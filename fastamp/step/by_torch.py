"""Steps of torch's optimizers: gradients are unscaled and clipped in their kernels, or in place."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import Held
from fastamp.step.fused import (
    call_folded,
    call_step,
    has_pre_hook,
    is_fused,
    parameters_of,
    share_parameters,
    takes_scaler,
    why_in_place,
)
from fastamp.step.reading import Reading, join_flags, join_flags_of, refuse_float16
from fastamp.step.report import is_set

_SHARED = "a parameter is there twice"


def step_by_torch(
    scaler: Reading,
    optimizers: list[Optimizer],
    states: list[dict[str, Any]],
    max_norm: float | None,
    why: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> list[float | None]:
    """Unscale, check and clip, and let torch's optimizers step, for the reason `why`."""
    grads = scaler._hold(optimizers)
    if grads is not None and not any(takes_scaler(type(each)) for each in optimizers):  # type: ignore[arg-type]
        return _step_together(scaler, optimizers, states, grads, max_norm, why, *args, **kwargs)
    if len(optimizers) > 1 and any(p.grad is not None for p in parameters_of(optimizers)):
        msg = (
            "optimizer: several can step together only if all gradients are plain tensors or "
            "DTensors, and no optimizer's step() has the argument grad_scaler"
        )
        raise TypeError(msg)
    pairs = zip(optimizers, states, strict=True)
    return [_step_as_torch(scaler, each, state, max_norm, *args, **kwargs) for each, state in pairs]


def _step_together(
    scaler: Reading,
    optimizers: list[Optimizer],
    states: list[dict[str, Any]],
    grads: Held,
    max_norm: float | None,
    why: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> list[float | None]:
    """Read all gradients once; unscale and clip in torch's kernels, or in place."""
    reasons = {each: why_in_place(each) for each in optimizers}
    waits = any(reasons.values())  # without such a kernel, the host decides whether to skip
    hooked = [] if max_norm is None else [each for each in optimizers if has_pre_hook(each)]
    shared = share_parameters(optimizers)
    in_place = [each for each in optimizers if shared or reasons[each] or each in hooked]
    # The gradients are also divided by a grad_scale that the user has set on the optimizer.
    given: Tensor | None = None if waits else getattr(optimizers[0], "grad_scale", None)
    is_ready = states[0]["stage"] is OptState.READY
    whole, packed, grad_scale = None, None, given
    if is_ready or max_norm is not None:
        whole = cast("_ops.Packed", scaler._pack(optimizers, grads))
        if in_place:
            packed = whole if in_place == optimizers else scaler._pack(in_place)
        if is_ready and packed is not None and not all(map(is_fused, in_place)):
            refuse_float16(packed)
        skipped = scaler._counter(whole.device) if is_ready and not waits else None
        clip = scaler._clip(whole.device, states[0], max_norm, given_scale=given, skipped=skipped)
        stats = scaler._record(states, whole.device, scaler._measure(whole, clip), clip)
        grad_scale, found_inf = stats.grad_scale, stats.found_inf
    else:
        found_inf = join_flags_of(states)
    told = [*reasons.values()] + ["there is a step_pre_hook"] * bool(hooked) + [_SHARED] * shared
    report = scaler._report(states, _way(told, whole, why), found_inf)
    if waits and report.skipped:
        scaler._skipped_before += 1
        return [None] * len(optimizers)
    if not waits and not is_ready:
        scaler._counter(found_inf.device).add_(found_inf)
    if packed is not None:
        scaler._rescale_(packed, stats.factor, found_inf)
    results = []
    for each, state in zip(optimizers, states, strict=True):
        if packed is not None and each in in_place:
            state["stage"] = OptState.UNSCALED  # in case the optimizer raises
        if reasons[each]:
            results.append(call_step(each, each.step, *args, **kwargs))
        else:
            step, scale = grads.on_parts(each.step), None if each in in_place else grad_scale
            results.append(call_folded(each, step, scale, found_inf, *args, **kwargs))
    return results


def _step_as_torch(
    scaler: Reading,
    optimizer: Optimizer,
    state: dict[str, Any],
    max_norm: float | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> float | None:
    """Step as torch's scaler: no gradients, tensor subclasses, or a `step` with `grad_scaler`."""
    norm = None
    if max_norm is not None:
        norm = scaler.clip_grad_norm_(optimizer, max_norm)
    if scaler._enabled:
        retval = super(Reading, scaler).step(optimizer, *args, **kwargs)
        found = list(state["found_inf_per_device"].values())
    else:
        found = [] if norm is None else [norm.isfinite().logical_not().to(torch.float32)]
        retval = None if found and is_set(found[0]) else optimizer.step(*args, **kwargs)
    found_inf = join_flags(found) if found else torch.zeros(())
    way = "as torch: no gradient that fastamp can read"
    if norm is not None and max_norm is not None and "stats" not in state:
        coef = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's
        nan = torch.full_like(norm, torch.nan)
        values = [norm, found_inf, coef, nan, nan, scaler._loss_scale()]
        state["stats"] = _ops.GradStats(values)
    scaler._report([state], way, found_inf)
    scaler._counter(found_inf.device).add_(found_inf)
    return retval


def _way(reasons: Iterable[str | None], packed: _ops.Packed | None, why: str) -> str:
    """Say how a step is made, and why not faster."""
    found = [reason for reason in dict.fromkeys(reasons) if reason]
    way = f"in place: {'; '.join(found)}" if found else "folded"
    way += f" ({why})"
    by_python = packed is not None and packed.has_fallback
    return f"{way}; some gradients are read by the fallback" if by_python else way
