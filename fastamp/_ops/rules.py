"""The optimizers' updates in torch's operators: csrc/step/rules.h, one tensor at a time.

Products, sums, quotients and roots are rounded one by one, so that all backends get the same bits.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from fastamp._ops.types import (
    NO_STATE,
    OTHER_TYPE,
    Apply,
    GradStats,
    Packed,
    Rule,
    is_dense,
    is_laid_out_like,
    is_plain,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Parameter(NamedTuple):
    """The tensors that one parameter's update reads and writes."""

    group: dict[str, Any]
    param: Tensor
    grad: Tensor
    states: list[Tensor]
    step: Tensor | None


class _RefusedError(Exception):
    """Why torch has to make the step."""


class TorchUpdate:
    """One optimizer's update without compiled code; see `fastamp._ops.Update`."""

    counts_on_host = False

    def __init__(
        self, rule: Rule, device: torch.device, pack: Callable[[Sequence[Tensor]], Packed]
    ) -> None:
        self._rule = rule
        self._device = device
        self._pack = pack

    def read(
        self, groups: list[dict[str, Any]], states: dict[Tensor, Any]
    ) -> tuple[Packed, Apply] | str:
        """Return the gradients and the step's update, or say why torch has to make this step."""
        parameters: list[_Parameter] = []
        try:
            for group in groups:
                _check_options(self._rule, group)
                for param in group["params"]:
                    if param.grad is not None:
                        if param.device != self._device:
                            _refuse("a parameter's dtype, layout or device")
                        parameters.append(_read(self._rule, group, param, states))
            grads = [parameter.grad for parameter in parameters]
            tensors = [each.param for each in parameters] + grads
            if not grads:
                _refuse("no parameter has a gradient")
            if len({tensor.data_ptr() for tensor in tensors if tensor.numel()}) < sum(
                tensor.numel() > 0 for tensor in tensors
            ):
                _refuse("tensors share their memory")
        except _RefusedError as refused:
            return str(refused)
        return self._pack(grads), partial(self._apply_, parameters)

    def settle(self, states: dict[Tensor, Any]) -> None:
        """Do nothing: the counts include no skipped step."""

    @torch.no_grad()
    def _apply_(
        self,
        parameters: list[_Parameter],
        stats: GradStats | None,
        found_inf: Tensor | None = None,
        *,
        zero_grad: bool = False,
    ) -> None:
        for parameter in parameters if zero_grad else ():
            parameter.param.grad = None
        if stats is not None:
            found_inf = stats.found_inf
        if found_inf is not None and found_inf.tolist():
            return
        times = 1.0 if stats is None else stats.factor.numpy().item()
        apply = _APPLY[self._rule]
        for group, param, grad, states, step in parameters:
            wide = grad.float()
            if times != 1.0:
                wide = wide * times
                if not zero_grad:
                    grad.copy_(wide)
            count = 0 if step is None else int(step.numpy().item()) + 1
            values = [param.float(), *(state.float() for state in states)]
            found = apply(group, self._rule, count, -wide if group["maximize"] else wide, *values)
            for tensor, value in zip([param, *states], found, strict=True):
                tensor.copy_(value)
            if step is not None:
                step.add_(1)


def _refuse(reason: str) -> NoReturn:
    raise _RefusedError(reason)


def _check_options(rule: Rule, group: dict[str, Any]) -> None:
    """Refuse options that ask for torch's own implementations, or are not numbers."""
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is False:
        _refuse("fused=False")
    if fused is None and foreach is not None:
        _refuse(f"foreach={foreach}")
    for name in ("capturable", "differentiable"):
        if group.get(name):
            _refuse(f"{name}=True")
    try:
        math.fabs(group["lr"])  # may be a tensor
    except (TypeError, ValueError, RuntimeError, OverflowError):
        _refuse("lr is not a number")
    for name in _NUMBERS[rule]:
        if not isinstance(group.get(name), float | int):
            _refuse(f"{name} is not a number")
    betas = group.get("betas")
    if rule in (Rule.ADAM, Rule.ADAMW) and not (
        isinstance(betas, tuple | list)
        and len(betas) == 2
        and all(isinstance(beta, float | int) for beta in betas)
    ):
        _refuse("betas are not two numbers")


def _read(
    rule: Rule, group: dict[str, Any], param: Tensor, states: dict[Tensor, Any]
) -> _Parameter:
    """Check one parameter, its gradient and its states."""
    grad = param.grad
    assert grad is not None  # noqa: S101 - the caller has checked
    if not is_plain([param, grad]):
        _refuse(OTHER_TYPE)
    if param.is_neg() or grad.is_neg():
        _refuse("a negated view")
    if param.dtype not in _DTYPES or not is_dense(param):
        _refuse("a parameter's dtype, layout or device")
    if not _is_like(grad, param):
        _refuse("a gradient's dtype, layout or device")
    if rule is Rule.SGD and group["momentum"] == 0:
        return _Parameter(group, param, grad, [], None)
    names = [*_STATES[rule]] + ["max_exp_avg_sq"] * bool(group.get("amsgrad"))
    state = states.get(param) or {}
    found = [_read_state(name, state.get(name), param) for name in names]
    if any(tensor.dtype != found[0].dtype for tensor in found):
        _refuse("the states' dtypes differ")
    step = None if rule is Rule.SGD else _read_state("step", state.get("step"), None)
    return _Parameter(group, param, grad, found, step)


def _read_state(name: str, tensor: Any, param: Tensor | None) -> Tensor:
    """Check a state of a parameter or, without a parameter, the count of steps."""
    if tensor is None:
        _refuse(NO_STATE)
    if isinstance(tensor, Tensor) and is_plain([tensor]):
        is_step = param is None and (tensor.dtype, tensor.numel()) == (torch.float32, 1)
        if is_step or (param is not None and _is_like(tensor, param)):
            return tensor
    _refuse(f"{name}: its dtype, layout or device")


def _is_like(tensor: Tensor, param: Tensor) -> bool:
    """Say whether a tensor has the shape, strides and device of a parameter."""
    return (
        tensor.dtype in _DTYPES
        and tensor.device == param.device
        and tensor.shape == param.shape
        and is_laid_out_like(tensor, param)
    )


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
    return values.double().sqrt().float()


def _decayed(grad: Tensor, param: Tensor, weight_decay: float) -> Tensor:
    """Add coupled weight decay to a gradient."""
    return grad + param * weight_decay if weight_decay else grad


def _adam(
    group: dict[str, Any],
    rule: Rule,
    step: int,
    grad: Tensor,
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
) -> list[Tensor]:
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    if group.get("decoupled_weight_decay", rule is Rule.ADAMW):
        param = param * (1 - lr * group["weight_decay"])
    else:
        grad = _decayed(grad, param, group["weight_decay"])
    if 1 - beta1 >= 0.5:  # interpolated from the nearer end, as torch.lerp does
        exp_avg = grad + (grad - exp_avg) * -beta1
    else:
        exp_avg = exp_avg + (grad - exp_avg) * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + (grad * (1 - beta2)) * grad
    states = [exp_avg, exp_avg_sq]
    if max_exp_avg_sq is not None:
        states.append(torch.maximum(exp_avg_sq, max_exp_avg_sq))
    root = math.sqrt(1 - _power(beta2, step))
    denominator = _root(states[-1]) + group["eps"] * root
    return [param - (exp_avg * (lr / (1 - _power(beta1, step)) * root)) / denominator, *states]


def _sgd(
    group: dict[str, Any], _rule: Rule, _step: int, grad: Tensor, param: Tensor, *buffers: Tensor
) -> list[Tensor]:
    grad = _decayed(grad, param, group["weight_decay"])
    momentum = group["momentum"]
    found = [buffer * momentum + grad * (1 - group["dampening"]) for buffer in buffers]
    for buffer in found:
        grad = grad + buffer * momentum if group["nesterov"] else buffer
    return [param - grad * float(group["lr"]), *found]


def _adagrad(
    group: dict[str, Any], _rule: Rule, step: int, grad: Tensor, param: Tensor, total: Tensor
) -> list[Tensor]:
    grad = _decayed(grad, param, group["weight_decay"])
    total = total + grad * grad
    lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
    return [param - (grad * lr) / (_root(total) + group["eps"]), total]


_Apply: TypeAlias = Callable[..., list[Tensor]]
_APPLY: dict[Rule, _Apply] = {
    Rule.ADAM: _adam,
    Rule.ADAMW: _adam,
    Rule.SGD: _sgd,
    Rule.ADAGRAD: _adagrad,
}
_STATES = {
    Rule.ADAM: ("exp_avg", "exp_avg_sq"),
    Rule.ADAMW: ("exp_avg", "exp_avg_sq"),
    Rule.SGD: ("momentum_buffer",),
    Rule.ADAGRAD: ("sum",),
}
_NUMBERS = {
    Rule.ADAM: ("weight_decay", "eps"),
    Rule.ADAMW: ("weight_decay", "eps"),
    Rule.SGD: ("weight_decay", "momentum", "dampening"),
    Rule.ADAGRAD: ("weight_decay", "eps", "lr_decay"),
}
