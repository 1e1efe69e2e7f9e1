"""The optimizers' updates in torch's operators: csrc/step/rules.h, one tensor at a time.

The oracle of the compiled updates. Products, sums, quotients and roots are rounded one by one, so
that all backends get the same bits.
"""

from __future__ import annotations

import math

import torch
from torch.amp.grad_scaler import OptState

import fastamp
from fastamp import _ops
from fastamp._ops import Clip
from fastamp.step import StepReport
from fastamp.step.make_step import grads_to_read, measure


class PythonScaler(fastamp.GradScaler):
    """A scaler whose steps are made here: the fallback reads, and Python updates."""

    def step(self, optimizer, *, max_norm=None, zero_grad=False):
        states = self._states_of([optimizer])
        with _ops.use_only("fallback"):
            scale = self._scale if self.is_enabled() else None
            stats = measure(grads_to_read([optimizer], None), Clip(scale, max_norm))
        make_update(optimizer, stats.factor.item(), stats.found_inf.item(), zero_grad=zero_grad)
        self.last_step = StepReport(stats.values, "by Python")
        states[0]["stage"] = OptState.STEPPED
        states[0]["found_inf_per_device"] = {torch.device("cpu"): stats.found_inf}


@torch.no_grad()
def make_update(optimizer, factor=1.0, found_inf=0.0, *, zero_grad=False):
    """Multiply gradients by a factor and update, unless `found_inf` is set; make missing states."""
    rule, names = next(found for cls, found in _RULES.items() if isinstance(optimizer, cls))
    for group in optimizer.param_groups:
        for param in (each for each in group["params"] if each.grad is not None):
            state = optimizer.state[param]
            for name in names:
                like = torch.zeros(()) if name == "step" else param
                state.setdefault(name, torch.zeros_like(like))
            if not found_inf:
                _update(rule, group, param, [state[name] for name in names], factor, zero_grad)
            if zero_grad:
                param.grad = None


def _update(rule, group, param, states, factor, zero_grad):
    grad = param.grad.float()
    if factor != 1.0:
        grad = grad * factor
        if not zero_grad:
            param.grad.copy_(grad)
    values = [param.float(), *(each.float() for each in states)]
    updated = rule(group, -grad if group["maximize"] else grad, *values)
    for tensor, value in zip([param, *states], updated, strict=True):
        tensor.copy_(value)


def _power(base, exponent):
    """Square repeatedly: `**` differs between C libraries."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _root(values):
    """Return correctly rounded roots: the last bit of MKL's float32 ones is sometimes wrong."""
    return values.double().sqrt().float()


def _adam(group, grad, param, step, exp_avg, exp_avg_sq):
    (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), group["weight_decay"]
    step, count = step + 1, int(step) + 1
    if group["decoupled_weight_decay"]:
        param = param * (1 - lr * decay)
    elif decay:
        grad = grad + param * decay
    if 1 - beta1 >= 0.5:  # interpolated from the nearer end, as torch.lerp does
        exp_avg = grad + (grad - exp_avg) * -beta1
    else:
        exp_avg = exp_avg + (grad - exp_avg) * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + (grad * (1 - beta2)) * grad
    root = math.sqrt(1 - _power(beta2, count))
    denominator = _root(exp_avg_sq) + group["eps"] * root
    change = (exp_avg * (lr / (1 - _power(beta1, count)) * root)) / denominator
    return [param - change, step, exp_avg, exp_avg_sq]


def _sgd(group, grad, param):
    return [param - (grad + param * group["weight_decay"]) * float(group["lr"])]


# Of a class: the arithmetic, and the states. Without momentum SGD has none.
_RULES = {
    torch.optim.Adam: (_adam, ["step", "exp_avg", "exp_avg_sq"]),
    torch.optim.SGD: (_sgd, []),
}


def python_step(optimizer, max_norm=None, *, zero_grad=False):
    """Do what fastamp.optimizer_step does, with the update made here; return its report."""
    if max_norm is None:
        make_update(optimizer, zero_grad=zero_grad)
        return StepReport(None, "by Python")
    scaler = PythonScaler(enabled=False)
    scaler.step(optimizer, max_norm=max_norm, zero_grad=zero_grad)
    return scaler.last_step
