"""One step of one or several optimizers, in one of two ways: by fastamp, or by torch.

By fastamp it is one call of the core or, where ranks or Muon take part, a read of all gradients and
then an update of each optimizer. By torch gradients are unscaled and clipped in place first.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import Clip, Grads, StepReport, Why
from fastamp.step import muon, native

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NOTHING_CHECKED = "No inf checks were recorded for this optimizer."


class SkipCounts(dict[torch.device, Tensor]):
    """How many steps were skipped: a count on each device, so that nothing waits."""

    def on(self, device: torch.device) -> Tensor:
        """Return the count of a device, for the current stream."""
        count = self.get(device)
        if count is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                msg = f"the first step on {device} is in the capture of a CUDA graph, whose replays"
                msg += " would reset the count of skipped steps: make one step before the capture"
                raise RuntimeError(msg)
            count = self[device] = torch.zeros((), dtype=torch.float32, device=device)
        elif device.type == "cuda":  # its memory must not be reused before this stream is done
            count.record_stream(torch.cuda.current_stream(device))
        return count


def make_step(  # noqa: C901, PLR0912 - the two ways, in order
    optimizers: list[Optimizer],
    clip: Clip,
    states: list[dict[str, Any]] | None = None,
    *,
    group: "ProcessGroup | None" = None,
    known: StepReport | None = None,
    counts: SkipCounts | None = None,
    zero_grad: bool = False,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[StepReport, list[Any]]:
    """Unscale, check, clip and step, unless a gradient is not finite, now or in an earlier read.

    Without a scale and a bound in `clip` the gradients are not read. `states` are those of torch's
    scaler, which note what was done; `group` has ranks with other gradients; `known` is an earlier
    read. It returns the report, and what each optimizer's `step` returned, None if not called.
    """
    measures = clip.scale is not None or clip.max_norm is not None
    read_before = None if known is None else known.values
    if known is not None:
        clip = clip._replace(before=known.found_inf)
    why = Why("torch", "the step has arguments") if args or kwargs else None
    if why is None and group is None:
        made = _step_at_once(optimizers, clip, counts, zero_grad=zero_grad)
        if not isinstance(made, Why):
            values = made if measures else read_before
            return StepReport(values, "native"), [None] * len(optimizers)
        why = made
    states = states or [{} for _ in optimizers]
    _check_shared(optimizers)
    in_halves = why is None or why.kind == "halves"
    if in_halves or measures:
        grads = grads_to_read(optimizers, group, measures=measures)
    steps = native.read_all(optimizers) if in_halves else cast(Why, why)
    for each in optimizers:
        muon.compare_ranks(each, steps if isinstance(steps, Why) else None)
    stats, factor, found_inf = known, None, clip.before
    if measures and grads is not None:
        if isinstance(steps, Why) and clip.scale is not None:
            for each in optimizers:  # as torch's scaler does, which tells fused ones to unscale
                is_fused = all(group.get("fused") for group in each.param_groups)
                if not is_fused or not getattr(each, "_step_supports_amp_scaling", False):
                    _refuse_float16(native.parameters_of(optimizers))
        stats = measure(grads, clip, counts)
        factor, found_inf = stats.factor, stats.found_inf
    elif measures:
        if clip.scale is not None:
            raise AssertionError(NOTHING_CHECKED)
        stats = StepReport(None).replace(norm=torch.tensor(0.0))
    elif found_inf is not None and counts is not None:
        counts.on(found_inf.device).add_(found_inf)
    values = None if stats is None else stats.values
    if not isinstance(steps, Why):
        for step in steps:
            step.apply(factor, found_inf, zero_grad=zero_grad)
        for each in optimizers:
            _ops.note_step(each)
        is_slow = any(isinstance(step.backend, _ops.TorchBackend) for step in steps)
        return StepReport(values, "fallback" if is_slow else "native"), [None] * len(optimizers)
    if measures and grads is not None:
        rescale(grads, cast(StepReport, stats), states)
    is_skipped = found_inf is not None and bool(found_inf.item())
    results = []
    for each, state in zip(optimizers, states, strict=True):
        results.append(None if is_skipped else each.step(*args, **kwargs or {}))
        state["stage"] = OptState.STEPPED
    for each in optimizers if zero_grad else ():
        each.zero_grad()
    return StepReport(values, f"torch's: {steps.text}"), results


def _step_at_once(  # noqa: C901, PLR0912 - the hot path: no calls of Python to be short
    optimizers: list[Optimizer], clip: Clip, counts: SkipCounts | None, *, zero_grad: bool
) -> Tensor | Why | None:
    """Make the step in one call of the core, which returns its statistics; or say why not."""
    steps: list[Any] = []
    backend: Any = None
    measures = clip.scale is not None or clip.max_norm is not None
    for each in optimizers:
        prepared = native.prepare(each)
        if isinstance(prepared, Why):
            return prepared
        its_backend, known = prepared
        is_apart = its_backend is not (backend or its_backend) or not hasattr(its_backend, "step")
        if is_apart or (measures and known.is_flat):
            return Why("halves", "several backends, one that has halves alone, or FSDP1's shards")
        backend = its_backend
        steps.append((known.update, each.param_groups, each.state))
    device, scale, before, skipped = backend.device, clip.scale, clip.before, None
    if counts is not None and (measures or before is not None):
        skipped = counts.get(device)
        if skipped is None or device.type == "cuda":
            skipped = counts.on(device)
    if scale is not None and scale.device != device:
        scale = _ops.moved(scale, device)
    if before is not None and before.device != device:
        before = _ops.moved(before, device)
    step = backend.step
    values = step(steps, measures, scale, clip.max_norm, before, skipped, zero_grad)
    if type(values) is tuple and values[0] == "no state":
        for each in optimizers:
            if reason := native.make_state(each):
                return Why("torch", reason)
        values = step(steps, measures, scale, clip.max_norm, before, skipped, zero_grad)
    if type(values) is tuple:
        return Why(*values)
    if skipped is not None and before is not None and not measures:
        skipped.add_(before)
    for each in optimizers:
        if "step" in vars(each):
            _ops.note_step(each)
    return values  # type: ignore[no-any-return]


def grads_to_read(
    optimizers: Sequence[Optimizer],
    group: "ProcessGroup | None",
    *,
    measures: bool = True,
    allow_float16: bool = True,
) -> Grads | None:
    """Return the optimizers' gradients on their backends; None where no rank has any."""
    parameters = native.parameters_of(optimizers)
    if measures and group is None and any(hasattr(p, "_fsdp_flattened") for p in parameters):
        msg = "FSDP1 has flattened parameters of this optimizer: each rank would clip and skip by "
        msg += "the norm of its own shard. Give process_group=, or use FSDP2 (fully_shard)"
        raise ValueError(msg)
    tensors = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    if not allow_float16:
        _refuse_float16(parameters)
    return _ops.hold(tensors, group, owners=parameters)


def measure(grads: Grads, clip: Clip, counts: SkipCounts | None = None) -> StepReport:
    """Read every gradient once; the tensors of `clip` may lie on any device."""
    device = grads.device
    scale, before = (x if x is None else _ops.moved(x, device) for x in (clip.scale, clip.before))
    skipped = None if counts is None else counts.on(device)
    return grads.measure(clip._replace(scale=scale, before=before, skipped=skipped))


def rescale(grads: Grads, stats: StepReport, states: list[dict[str, Any]]) -> None:
    """Unscale and clip gradients that were read, in at most one write, and note it."""
    grads.rescale_(stats.factor)
    for state in states:
        state["stage"], state["stats"] = OptState.UNSCALED, stats
        state["found_inf_per_device"] = {grads.device: stats.found_inf}


def _refuse_float16(parameters: list[Tensor]) -> None:
    """Raise torch's error for float16 gradients, which only fused optimizers support."""
    if any(p.grad is not None and p.grad.dtype == torch.float16 for p in parameters):
        msg = "Attempting to unscale FP16 gradients."
        raise ValueError(msg)


def _check_shared(optimizers: list[Optimizer]) -> None:
    """Refuse optimizers of a list that have a parameter in common."""
    owners: dict[int, int] = {}
    for place, optimizer in enumerate(optimizers if len(optimizers) > 1 else ()):
        for each in native.parameters_of([optimizer]):
            if (first := owners.setdefault(id(each), place)) != place:
                msg = f"optimizer[{place}] and optimizer[{first}] have a parameter in common, of "
                msg += f"shape {tuple(each.shape)}"
                raise ValueError(msg)
