"""The update of lean optimizers in torch's operators, where the core does not serve a device.

It has the interface of the core's `Backend`, and gets the same bits. It is many times slower, and
on a device it waits for `found_inf`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastamp._ops import fallback, formats
from fastamp._ops.types import NO_GRADIENT, NO_STATE, Why

DTYPES = (torch.float32, torch.bfloat16)
"""Of parameters. A float16 weight would need a scale, as its gradients do."""

_PART = 1 << 18  # elements: 1 MiB of float32 stays in the caches, and torch uses all its threads
CONVERTS = "optimizer.load_state_dict(optimizer.state_dict()) converts the state"


class State(NamedTuple):
    """A state of a rule, and how it is kept in 16 or 8 bits; see csrc/step/rules.h."""

    name: str
    option: str = ""
    """The option that it depends on."""
    has_sign: bool = True
    is_random: bool = True
    """Whether it is rounded randomly, rather than to the nearest."""

    @property
    def codes(self) -> str:
        """The name of its codes in 8 bits, which torch's optimizers do not know."""
        return f"{self.name}_codes"

    @property
    def scale(self) -> str:
        """The name of the scales of its codes."""
        return f"{self.name}_scale"

    def read(self, state: dict[str, Any]) -> Tensor:
        """Return its float32 values."""
        if self.codes in state:
            return formats.decode(state[self.codes], state[self.scale], signed=self.has_sign)
        values: Tensor = state[self.name].float()
        return values

    def write(self, state: dict[str, Any], values: Tensor, noise: Tensor | None = None) -> None:
        """Write float32 values as the state keeps them; without noise to the nearest."""
        noise = noise if self.is_random else None
        if self.codes in state:
            codes, scales = formats.encode(values, signed=self.has_sign, noise=noise)
            state[self.codes].copy_(codes)
            state[self.scale].copy_(scales)
        elif state[self.name].dtype == torch.bfloat16 and noise is not None:
            state[self.name].copy_(formats.round_randomly(values, noise >> 16))
        else:
            state[self.name].copy_(values)


class ReadStep(NamedTuple):
    """Parameters with a gradient, each with its group and state."""

    entries: list[tuple[dict[str, Any], Tensor, Tensor, dict[str, Any]]]
    owns_grads: bool


class TorchBackend(NamedTuple):
    """Steps of a lean optimizer on one device; see `Backend` in _native.pyi."""

    device: torch.device
    rule: str

    def read(
        self,
        _update: object,
        groups: list[dict[str, Any]],
        states: dict[Tensor, Any],
        grads: list[Tensor] | None,
    ) -> ReadStep | Why:
        """Find what a step reads and writes, or say why it cannot be made here."""
        entries = []
        places = [(g, p) for g, group in enumerate(groups) for p in range(len(group["params"]))]
        params = [groups[g]["params"][p] for g, p in places]
        own = [param.grad for param in params] if grads is None else grads
        for (g, p), param, grad in zip(places, params, own, strict=True):
            if grad is None:
                continue
            if grad.device != self.device or grad.layout is not torch.strided:
                return Why("torch", "a gradient's dtype, layout or device")
            group, state = groups[g], states.get(param) or {}
            if why := _refusal(states_of(self.rule, group), group, param, state):
                name = f"param_groups[{g}]['params'][{p}]"
                return why if isinstance(why, Why) else Why("torch", f"{name}: {why}")
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
                _update_one(self.rule, *entry, number)
            if factor is not None and not drops:
                fallback.rescale_([grad for _, _, grad, _ in read.entries], factor)
        if drops and read.owns_grads:
            for _, param, _, _ in read.entries:
                param.grad = None


def _refusal(
    states: list[State], group: dict[str, Any], param: Tensor, state: dict[str, Any]
) -> str | Why:
    """Say why a parameter cannot be updated, as the core does; "" if it can."""
    if param.dtype not in DTYPES:
        return f"a parameter is {param.dtype}, expected float32 or bfloat16"
    if not _is_alike(param, torch.empty_like(param, device="meta")):
        return "there are gaps in its memory: parameter.data = parameter.data.contiguous()"
    if any(name not in state for name in ["step", *names_of(states, state)]):
        return NO_STATE
    if param.dtype == torch.bfloat16 and has_low(param, group) != ("low" in state):
        return f"exact or a parameter's dtype changed after the first step: {CONVERTS}"
    if beside := [s for s in states if s.codes in state and s.name in state]:
        remedy = "del optimizer.state[parameter] lets it begin anew"
        return f"{beside[0].name} was set beside {beside[0].codes}, which hold it: {remedy}"
    kept = {name: state[name] for name in names_of(states, state)}
    if has_low(param, group):
        kept["low"] = low_of(state)
    wrong = [name for name, value in kept.items() if not _is_alike(value, param)]
    changed = "its shape or memory format is not the parameter's"
    return f"{wrong[0]}: {changed}, which changed after the first step: {CONVERTS}" if wrong else ""


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors have the same shape, and their elements the same order in memory."""
    sizes = zip(one.shape, one.stride(), other.stride(), strict=False)
    return one.shape == other.shape and (
        one.numel() == 0 or all(size == 1 or its == theirs for size, its, theirs in sizes)
    )


def states_of(rule: str, group: dict[str, Any]) -> list[State]:
    """Return the states that a group's options ask for."""
    return [each for each in RULES[rule][0] if not each.option or group[each.option]]


def names_of(states: list[State], state: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that hold states."""
    return [each.codes if each.codes in state else each.name for each in states]


def has_low(param: Tensor, group: dict[str, Any]) -> bool:
    """Say whether a parameter's lower half is kept."""
    return bool(group["exact"]) and param.dtype == torch.bfloat16


def low_of(state: dict[str, Any]) -> Tensor:
    """View a lower half as int16. It is kept as pairs of bytes, which gloo and NCCL can gather."""
    found: Tensor = state["low"].view(torch.int16)[..., 0]
    return found


def read_weights(param: Tensor, state: dict[str, Any]) -> Tensor:
    """Return a parameter's float32 weights."""
    if "low" in state and param.dtype == torch.bfloat16:
        return formats.join(param, low_of(state))
    return param.float()


def write_weights(
    param: Tensor, state: dict[str, Any], weights: Tensor, noise: Tensor | None = None
) -> None:
    """Write float32 weights as the parameter keeps them; without noise to the nearest."""
    if "low" in state and param.dtype == torch.bfloat16:
        high, low = formats.split(weights)
        param.copy_(high)
        low_of(state).copy_(low)
    elif param.dtype == torch.bfloat16 and noise is not None:
        param.copy_(formats.round_randomly(weights, noise))
    else:
        param.copy_(weights)


def _update_one(
    rule: str,
    group: dict[str, Any],
    param: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    factor: float,
) -> None:
    """Update one parameter by csrc/step/rules.h, each operation rounded by itself."""
    state["step"] += 1
    step = int(state["step"].item())
    rows = len(param) if param.dim() and param.is_contiguous() else 0
    size = max(_PART // max(param.shape[1:].numel(), 1), 1) if rows else 1
    parts: list[Any] = [slice(at, at + size) for at in range(0, rows, size)]
    for part in parts or [...]:
        own = {name: value[part] if value.dim() else value for name, value in state.items()}
        _update_part(rule, group, param[part], grad[part], own, factor, step)


def _update_part(
    rule: str,
    group: dict[str, Any],
    param: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    factor: float,
    step: int,
) -> None:
    """Update some rows of a parameter: all tensors on the way stay in the cache."""
    values = grad.float() * factor
    if group["maximize"]:
        values = -values
    states = states_of(rule, group)
    before = [each.read(state) for each in states]
    weights, *after = RULES[rule][1](group, step, values, read_weights(param, state), *before)
    has_noise = any(state[name].dtype != torch.float32 for name in names_of(states, state))
    has_noise |= param.dtype == torch.bfloat16 and "low" not in state
    key = formats.key_of(group["seed"], step) if has_noise else 0
    noise = formats.noise_of(after, weights, key) if has_noise else None
    write_weights(param, state, weights, noise)
    for each, new in zip(states, after, strict=True):
        each.write(state, new, noise)


def _adam(
    group: dict[str, Any],
    step: int,
    grad: Tensor,
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> tuple[Tensor, ...]:
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


def _sgd(
    group: dict[str, Any], _step: int, grad: Tensor, weights: Tensor, *buffers: Tensor
) -> tuple[Tensor, ...]:
    momentum, decay = group["momentum"], group["weight_decay"]
    grad = grad + weights * decay if decay else grad
    after = [buffer * momentum + grad for buffer in buffers]
    for buffer in after:
        grad = grad + buffer * momentum if group["nesterov"] else buffer
    return weights - grad * float(group["lr"]), *after


def _lion(
    group: dict[str, Any], _step: int, grad: Tensor, weights: Tensor, exp_avg: Tensor
) -> tuple[Tensor, ...]:
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    change = (exp_avg * beta1 + grad * (1 - beta1)).sign() * lr
    weights = weights * (1 - lr * group["weight_decay"]) - change
    return weights, exp_avg * beta2 + grad * (1 - beta2)


RULES: dict[str, tuple[tuple[State, ...], Callable[..., tuple[Tensor, ...]]]] = {
    "Adam": (
        (State("exp_avg", is_random=False), State("exp_avg_sq", has_sign=False)),
        _adam,
    ),
    "SGD": ((State("momentum_buffer", "momentum"),), _sgd),
    "Lion": ((State("exp_avg"),), _lion),
}
"""The states of rules and their arithmetic."""


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
