"""The update of lean optimizers in torch's operators: the core's bits in many times its time."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fastamp._ops import fallback, formats
from fastamp._ops.types import NO_GRADIENT, NO_STATE, Entry, Why, entries_of

Group: TypeAlias = dict[str, Any]
Tensors: TypeAlias = tuple[Tensor, ...]
_PART = 1 << 18  # elements: 1 MiB of float32 stays in the caches, and torch uses all its threads


class TorchBackend(NamedTuple):
    """Steps of a lean optimizer on one device; see `Backend` in _native.pyi."""

    device: torch.device
    rule: str

    def read(self, _update: object, *given: Any) -> list[Entry] | Why:
        """Find what a step reads and writes, or say why it cannot be made here."""
        entries = entries_of(*given)
        refusals = (_refusal(self.rule, entry) for entry in entries)
        return next((why for why in refusals if why), None) or entries or NO_GRADIENT

    @torch.no_grad()
    def apply(
        self, entries: list[Entry], factor: Tensor | None, found_inf: Tensor | None, drops: object
    ) -> None:
        """Multiply the gradients and update, unless `found_inf` is 1.0."""
        if found_inf is None or not found_inf.item():
            for entry in entries:
                _update_one(self.rule, entry, 1.0 if factor is None else factor.item())
            if factor is not None and not drops:
                fallback.rescale_([entry.grad for entry in entries], factor)
        for entry in entries if drops else ():
            entry.param.grad = None


def _refusal(rule: str, entry: Entry) -> Why | None:
    """Say why a parameter cannot be updated, as the core does."""
    group, param, _, grad, state = entry
    names = formats.names_of(rule, group, state)
    order, text = _order(param), ""
    if param.dtype not in formats.DTYPES or order != _order(torch.empty_like(param, device="meta")):
        text = "a parameter's dtype, layout or device"
    elif grad.device != param.device or grad.layout is not torch.strided or grad.is_complex():
        text = "a gradient's dtype, layout or device"
    elif any(name not in state for name in ["step", *names]):
        return NO_STATE
    elif formats.has_low(group, param) != ("low" in state):
        text = "low: exact or a dtype was changed"
    elif beside := [n for n in state if f"{n}_codes" in names]:
        text = f"{beside[0]} was set beside its codes"
    elif wrong := [name for name in names if _order(state[name]) != order]:
        text = f"{wrong[0]}: its shape or layout"
    return Why("torch", text) if text else None


def _order(tensor: Tensor) -> tuple[torch.Size, list[int]]:
    """Return a tensor's shape and the order of its elements in memory."""
    strides = zip(tensor.shape, tensor.stride(), strict=True) if tensor.numel() else ()
    return tensor.shape, [stride for size, stride in strides if size > 1]


def _update_one(rule: str, entry: Entry, factor: float) -> None:
    """Update one parameter by csrc/step/rules.h, some rows at a time, which stay in the cache."""
    group, param, _, grad, state = entry
    state["step"] += 1
    step, states = int(state["step"].item()), formats.states_of(rule, group)
    names = formats.names_of(rule, group, state)
    has_noise = any(state[name].dtype != torch.float32 for name in names)
    has_noise |= param.dtype == torch.bfloat16 and "low" not in state
    key = formats.key_of(group["seed"], step) if has_noise else 0
    rows = len(param) if param.dim() and param.is_contiguous() else 0
    size = max(_PART // max(param.shape[1:].numel(), 1), 1)
    parts: list[Any] = [slice(at, at + size) for at in range(0, rows, size)]
    for part in parts or [...]:
        held = {name: value[part] if value.dim() else value for name, value in state.items()}
        values = grad[part].float() * factor
        values = -values if group["maximize"] else values
        weights, before = formats.read_weights(param[part], held), [s.read(held) for s in states]
        weights, *after = RULES[rule](group, step, values, weights, *before)
        noise = formats.noise_of(after, weights, key) if has_noise else None
        formats.write_weights(param[part], held, weights, noise)
        for each, new in zip(states, after, strict=True):
            each.write(held, new, noise)


def _adam(group: Group, step: int, grad: Tensor, weights: Tensor, *moments: Tensor) -> Tensors:
    exp_avg, exp_avg_sq = moments
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    weights = weights * (1 - lr * group["weight_decay"])
    if 1 - beta1 >= 0.5:  # interpolated from the nearer end, as torch.lerp does
        exp_avg = grad + (grad - exp_avg) * -beta1
    else:
        exp_avg = exp_avg + (grad - exp_avg) * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + (grad * (1 - beta2)) * grad
    root = math.sqrt(1 - _power(beta2, step))
    denominator = _root(exp_avg_sq) + group["eps"] * root
    change = (exp_avg * (lr / (1 - _power(beta1, step)) * root)) / denominator
    return weights - change, exp_avg, exp_avg_sq


def _sgd(group: Group, _step: int, grad: Tensor, weights: Tensor, *buffers: Tensor) -> Tensors:
    momentum, decay = group["momentum"], group["weight_decay"]
    grad = grad + weights * decay if decay else grad
    after = [buffer * momentum + grad for buffer in buffers]
    for buffer in after:
        grad = grad + buffer * momentum if group["nesterov"] else buffer
    return weights - grad * float(group["lr"]), *after


def _lion(group: Group, _step: int, grad: Tensor, weights: Tensor, exp_avg: Tensor) -> Tensors:
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    change = (exp_avg * beta1 + grad * (1 - beta1)).sign() * lr
    weights = weights * (1 - lr * group["weight_decay"]) - change
    return weights, exp_avg * beta2 + grad * (1 - beta2)


RULES: dict[str, Callable[..., Tensors]] = {"Adam": _adam, "SGD": _sgd, "Lion": _lion}


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
    if values.device.type != "cpu":
        return values.sqrt()
    return torch.from_numpy(np.asarray(np.sqrt(values.numpy())))
