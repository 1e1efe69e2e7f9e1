"""The update of fastamp.AdamW in torch's operators, where the core does not serve a device.

It has the interface of the core's `Backend`, and gets the same bits. It is many times slower, and
on a device it waits for `found_inf`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastamp._ops import fallback, formats
from fastamp._ops.types import NO_GRADIENT, NO_STATE, Why

DTYPES = (torch.float32, torch.bfloat16)
"""Of parameters. A float16 weight would need a scale, as its gradients do."""

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = ("exp_avg_codes", "exp_avg_sq_codes")
"""The names of moments in 8 bits, which torch's AdamW does not know."""
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")

CHANGED = (
    "exact or a parameter's dtype changed after the first step: "
    "optimizer.load_state_dict(optimizer.state_dict()) converts the state"
)


class ReadStep(NamedTuple):
    """Parameters with a gradient, each with its group and state."""

    entries: list[tuple[dict[str, Any], Tensor, Tensor, dict[str, Any]]]
    owns_grads: bool


class TorchBackend:
    """Steps of fastamp.AdamW on one device; see `Backend` in _native.pyi."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(
        self,
        _update: object,
        groups: list[dict[str, Any]],
        states: dict[Tensor, Any],
        grads: list[Tensor] | None,
    ) -> ReadStep | Why:
        """Find what a step reads and writes, or say why it cannot be made here."""
        entries = []
        params = [(group, param) for group in groups for param in group["params"]]
        own = [param.grad for _, param in params] if grads is None else grads
        for (group, param), grad in zip(params, own, strict=True):
            if grad is None:
                continue
            if grad.device != self.device or grad.layout is not torch.strided:
                return Why("torch", "a gradient's dtype, layout or device")
            if why := _refusal(group, param, states.get(param) or {}):
                return why if isinstance(why, Why) else Why("torch", why)
            entries.append((group, param, grad, states[param]))
        return ReadStep(entries, grads is None) if entries else NO_GRADIENT

    @torch.no_grad()
    def apply(
        self,
        _update: object,
        read: ReadStep,
        factor: Tensor | None,
        found_inf: Tensor | None,
        drops: bool,  # noqa: FBT001 - the core's signature
    ) -> None:
        """Multiply the gradients and update, unless `found_inf` is 1.0."""
        if found_inf is None or not found_inf.item():
            number = 1.0 if factor is None else factor.item()
            for entry in read.entries:
                _update_one(*entry, number)
            if factor is not None and not drops:
                fallback.rescale_([grad for _, _, grad, _ in read.entries], factor)
        if drops and read.owns_grads:
            for _, param, _, _ in read.entries:
                param.grad = None


def _refusal(group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> str | Why:
    """Say why a parameter cannot be updated, as the core does; "" if it can."""
    if param.dtype not in DTYPES:
        return f"a parameter is {param.dtype}"
    if not _is_alike(param, torch.empty_like(param, device="meta")):
        return "a parameter's dtype, layout or device"
    if "step" not in state:
        return NO_STATE
    if param.dtype == torch.bfloat16 and has_low(param, group) != ("low" in state):
        return CHANGED
    if CODES[0] in state and (beside := next((name for name in MOMENTS if name in state), "")):
        remedy = "del optimizer.state[parameter] lets it begin anew"
        return f"{beside} was set beside {beside}_codes, which hold the moment: {remedy}"
    kept = {name: state[name] for name in names_of(state)}
    if has_low(param, group):
        kept["low"] = low_of(state)
    wrong = [name for name, value in kept.items() if not _is_alike(value, param)]
    return f"{wrong[0]}: its shape or layout" if wrong else ""


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors have the same shape, and their elements the same order in memory."""
    sizes = zip(one.shape, one.stride(), other.stride(), strict=False)
    return one.shape == other.shape and (
        one.numel() == 0 or all(size == 1 or its == theirs for size, its, theirs in sizes)
    )


def has_low(param: Tensor, group: dict[str, Any]) -> bool:
    """Say whether a parameter's lower half is kept."""
    return bool(group["exact"]) and param.dtype == torch.bfloat16


def names_of(state: dict[str, Any]) -> tuple[str, str]:
    """Return the names of both moments in a state."""
    return CODES if CODES[0] in state else MOMENTS


def low_of(state: dict[str, Any]) -> Tensor:
    """View a lower half as int16. It is kept as pairs of bytes, which gloo and NCCL can gather."""
    found: Tensor = state["low"].view(torch.int16)[..., 0]
    return found


def read_weights(param: Tensor, state: dict[str, Any]) -> Tensor:
    """Return a parameter's float32 weights."""
    if "low" in state and param.dtype == torch.bfloat16:
        return formats.join(param, low_of(state))
    return param.float()


def read_moments(state: dict[str, Any]) -> list[Tensor]:
    """Return both moments in float32."""
    found = []
    for name, scale in zip(names_of(state), SCALES, strict=True):
        if scale in state:
            is_first = scale == SCALES[0]
            found.append(formats.decode(state[name], state[scale], signed=is_first))
        else:
            found.append(state[name].float())
    return found


def write_moments(
    state: dict[str, Any], exp_avg: Tensor, exp_avg_sq: Tensor, noise: Tensor | None = None
) -> None:
    """Write both moments as the state keeps them; without noise to the nearest."""
    for name, scale, values in zip(names_of(state), SCALES, (exp_avg, exp_avg_sq), strict=True):
        is_first = scale == SCALES[0]
        random = None if is_first else noise
        if scale in state:
            codes, scales = formats.encode(values, signed=is_first, noise=random)
            state[name].copy_(codes)
            state[scale].copy_(scales)
        elif state[name].dtype == torch.bfloat16 and random is not None:
            state[name].copy_(formats.round_randomly(values, random >> 16))
        else:
            state[name].copy_(values)


def _update_one(
    group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any], factor: float
) -> None:
    """Update one parameter: csrc/step/rules.h, `Adam`, each operation rounded by itself."""
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    values = grad.float() * factor
    if group["maximize"]:
        values = -values
    state["step"] += 1
    step = int(state["step"].item())
    weights = read_weights(param, state) * (1 - lr * group["weight_decay"])
    exp_avg, exp_avg_sq = read_moments(state)
    if 1 - beta1 >= 0.5:  # interpolated from the nearer end, as torch.lerp does
        exp_avg = values + (values - exp_avg) * -beta1
    else:
        exp_avg = exp_avg + (values - exp_avg) * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + (values * (1 - beta2)) * values
    root = math.sqrt(1 - _power(beta2, step))
    denominator = _root(exp_avg_sq) + group["eps"] * root
    weights = weights - (exp_avg * (lr / (1 - _power(beta1, step)) * root)) / denominator
    noise = formats.noise_of(exp_avg, formats.key_of(group["seed"], step))
    write_weights(param, state, weights, noise)
    write_moments(state, exp_avg, exp_avg_sq, noise)


def write_weights(param: Tensor, state: dict[str, Any], weights: Tensor, noise: Tensor) -> None:
    """Write float32 weights as the parameter keeps them."""
    if "low" in state and param.dtype == torch.bfloat16:
        high, low = formats.split(weights)
        param.copy_(high)
        low_of(state).copy_(low)
    elif param.dtype == torch.bfloat16:
        param.copy_(formats.round_randomly(weights, noise))
    else:
        param.copy_(weights)


def _power(base: float, exponent: int) -> float:
    """Square repeatedly: `**` differs between C libraries."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _root(values: Tensor) -> Tensor:
    """Return correctly rounded roots: the last bit of MKL's float32 ones is sometimes wrong."""
    return values.double().sqrt().float() if values.device.type == "cpu" else values.sqrt()
