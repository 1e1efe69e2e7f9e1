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
    is_adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one
    for group in optimizer.param_groups:
        names = ["exp_avg", "exp_avg_sq"] if is_adam else ["momentum_buffer"]
        if not is_adam and not group["momentum"]:
            names = []
        for param in (each for each in group["params"] if each.grad is not None):
            state = optimizer.state[param]
            if is_adam:
                state.setdefault("step", torch.zeros(()))
            for name in names:
                if state.get(name) is None:
                    state[name] = torch.zeros_like(param if is_adam else param.grad)
            if not found_inf:
                rule, states = _adam if is_adam else _sgd, [state[name] for name in names]
                _update(rule, group, param, state.get("step"), states, factor, zero_grad)
            if zero_grad:
                param.grad = None


def _update(rule, group, param, step, states, factor, zero_grad):
    grad = param.grad.float()
    if factor != 1.0:
        grad = grad * factor
        if not zero_grad:
            param.grad.copy_(grad)
    count = 0 if step is None else int(step.add_(1).item())
    values = [param.float(), *(each.float() for each in states)]
    updated = rule(group, count, -grad if group.get("maximize") else grad, *values)
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


def _decayed(grad, param, weight_decay):
    """Add coupled weight decay to a gradient."""
    return grad + param * weight_decay if weight_decay else grad


def _adam(group, step, grad, param, exp_avg, exp_avg_sq):
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    if group["decoupled_weight_decay"]:
        param = param * (1 - lr * group["weight_decay"])
    else:
        grad = _decayed(grad, param, group["weight_decay"])
    if 1 - beta1 >= 0.5:  # interpolated from the nearer end, as torch.lerp does
        exp_avg = grad + (grad - exp_avg) * -beta1
    else:
        exp_avg = exp_avg + (grad - exp_avg) * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + (grad * (1 - beta2)) * grad
    root = math.sqrt(1 - _power(beta2, step))
    denominator = _root(exp_avg_sq) + group["eps"] * root
    change = (exp_avg * (lr / (1 - _power(beta1, step)) * root)) / denominator
    return [param - change, exp_avg, exp_avg_sq]


def _sgd(group, _step, grad, param, *buffers):
    grad = _decayed(grad, param, group["weight_decay"])
    momentum = group["momentum"]
    found = [buffer * momentum + grad for buffer in buffers]
    for buffer in found:
        grad = grad + buffer * momentum if group["nesterov"] else buffer
    return [param - grad * float(group["lr"]), *found]


def python_step(optimizer, max_norm=None, *, zero_grad=False):
    """Do what fastamp.optimizer_step does, with the update made here; return its report."""
    if max_norm is None:
        make_update(optimizer, zero_grad=zero_grad)
        return StepReport(None, "by Python")
    scaler = PythonScaler(enabled=False)
    scaler.step(optimizer, max_norm=max_norm, zero_grad=zero_grad)
    return scaler.last_step
