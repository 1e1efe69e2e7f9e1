"""Steps that are skipped, or consume gradients: what they leave, byte by byte."""

import copy
import math
import sys
from unittest import mock

import pytest
import torch
from support.bits import bits
from support.gradients import parameters_with, random
from support.training import make_scaler, one_step
from support.updates import RULES, SIZES, give, make, scaler_of

import fastamp

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
FIRST_FAULT = [(2, 13), (2, 15)]
SECOND_FAULT = [(2, 13)]
"""The versions in which torch's faults are known: another one may have mended them."""


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MARGIN = 17
"""Elements of memory before and after a tensor that nobody may write."""


def put_into(memory, tensor):
    """Move a tensor into memory of its own, between elements that are watched."""
    size = (tensor.numel() + 2 * MARGIN,)
    block = torch.full(size, 3.0, dtype=tensor.dtype, device=tensor.device)
    memory.append(block)
    within = block[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)
    return within.copy_(tensor.detach())


def watched(name, dtype, steps, **options):
    """Return parameters after some steps, their optimizer, and all the memory that they have."""
    parameters, optimizer = make(name, dtype, sizes=SIZES[:4], **options)
    memory = []
    for p in parameters:
        p.data = put_into(memory, p)
    for step in range(steps):
        give(parameters, seed=step)
        optimizer.step()
    for p in parameters:
        for key, value in optimizer.state[p].items() if p in optimizer.state else ():
            if value is not None:
                optimizer.state[p][key] = put_into(memory, value)
    return parameters, optimizer, memory


def with_gradients(parameters, memory, scale, bad=()):
    """Give gradients that lie in watched memory, some elements of which are not finite."""
    give(parameters, scale, seed=9)
    for p in parameters:
        p.grad = put_into(memory, p.grad)
    for place, value in bad:
        parameters[place].grad.view(-1)[-1] = value


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_a_skipped_step_writes_no_byte(name, dtype, zero_grad, compiled, device):
    for bad, max_norm in ([(0, math.inf)], 1.0), ([(3, math.nan), (1, -math.inf)], None):
        parameters, optimizer, memory = watched(name, dtype, 2, fused=True)
        scaler = scaler_of()
        with_gradients(parameters, memory, 1.0, bad)
        before = [bits(block).tobytes() for block in memory]
        options = copy.deepcopy(optimizer.state_dict())
        tensors = [id(t) for s in optimizer.state.values() for t in s.values()]
        scaler.step(optimizer, max_norm=max_norm, zero_grad=zero_grad)
        assert scaler.last_step.way.startswith("native")
        assert scaler.last_step.skipped
        assert [bits(block).tobytes() for block in memory] == before
        assert str(optimizer.state_dict()) == str(options)
        assert [id(t) for s in optimizer.state.values() for t in s.values()] == tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_a_step_writes_nothing_beside_its_tensors(name, dtype, compiled, device):
    parameters, optimizer, memory = watched(name, dtype, 2, fused=True)
    with_gradients(parameters, memory, 1.0)
    scaler = scaler_of()
    scaler.step(optimizer, max_norm=1.0)
    assert scaler.last_step.way.startswith("native")
    assert not scaler.last_step.skipped
    for block in memory:
        assert (torch.cat([block[:MARGIN], block[-MARGIN:]]) == 3).all()


@pytest.mark.parametrize("options", [{"fused": True}, {}], ids=["fused", "left open"])
@pytest.mark.parametrize("name", RULES)
def test_a_first_step_that_is_skipped_leaves_zeros_or_nothing(name, options, backend, device):
    parameters, optimizer, memory = watched(name, torch.float32, 0, **options)
    if options:
        assert not optimizer.state
    before = copy.deepcopy([p.detach() for p in parameters])
    scaler = scaler_of()
    for _ in range(3):
        with_gradients(parameters, memory, 1.0, [(1, math.inf)])
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    assert scaler.skipped_steps == 3
    assert all(map(torch.equal, before, parameters))
    optimizer.state_dict()  # asks for the counts
    found = [v for state in optimizer.state.values() for v in state.values() if v is not None]
    assert not any(value.any() for value in found)


def uninitialized(tensor, **_options):
    """Return what fresh memory may hold."""
    return torch.full_like(tensor, math.nan)


def sgd_after(cls, device, overflows, **options):
    """Train with SGD, whose first step may overflow; return a parameter and its momentum."""
    (parameter,) = parameters_with(torch.zeros(1000, device=device))
    optimizer, scaler = torch.optim.SGD([parameter], 0.1, 0.9, **options), make_scaler(cls, device)
    with mock.patch.object(torch, "empty_like", uninitialized):
        for i in range(3):
            parameter.grad = random(1000, torch.float32, device, seed=i) * scaler.get_scale()
            if overflows and i == 0:
                parameter.grad[0] = math.inf
            one_step(scaler, optimizer, device)
            scaler.update()
    return torch.stack([parameter.detach(), optimizer.state[parameter]["momentum_buffer"]])


@pytest.mark.parametrize("overflows", [True, False])
@pytest.mark.parametrize("rule", [{"nesterov": True}, {"dampening": 0.5}], ids=str)
def test_fused_sgd_takes_fresh_memory_for_momentum_in_torch_and_not_here(
    rule, overflows, backend, device
):
    if TORCH in FIRST_FAULT and overflows and device == "cpu":
        assert sgd_after(torch.amp.GradScaler, device, overflows, fused=True, **rule).isnan().all()
    expected = sgd_after(torch.amp.GradScaler, device, overflows, foreach=False, **rule)
    for options in ({"fused": True}, {}):
        ours = sgd_after(fastamp.GradScaler, device, overflows, **options, **rule)
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("max_norm", [None, 1e9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_sgd_leaves_most_short_parameters_as_they_are_in_torch_and_not_here(
    dtype, max_norm, enabled, compiled
):
    (parameter,), (other,) = (parameters_with(torch.ones(1000, dtype=dtype)) for _ in "ab")
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    scaler = scaler_of(enabled=enabled, init_scale=1.0)
    scaler.step(optimizer, max_norm=max_norm)
    assert scaler.last_step.way.startswith("native")
    assert optimizer.param_groups[0]["fused"] is True
    assert parameter.eq(-1).all()
    torch.optim.SGD([other], lr=1.0, fused=True).step()
    if TORCH in SECOND_FAULT and dtype != torch.float32:
        assert other.eq(-1).sum() == 8


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_end_unscaled_and_clipped_or_are_left_as_they_are(
    dtype, zero_grad, compiled, device
):
    parameters, optimizer = make("adamw", dtype, sizes=SIZES[:4], fused=True)
    for factor, max_norm in (64.0, 0.5), (64.0, None), (1.0, 1e9):
        give(parameters, factor, seed=1)
        expected = [p.grad.float() / factor for p in parameters]
        grads = [p.grad for p in parameters]
        before = [grad.clone() for grad in grads]
        if max_norm is not None:
            norm = torch.linalg.vector_norm(torch.cat([g.flatten().double() for g in expected]))
            expected = [g * min(1.0, max_norm / (norm.item() + 1e-6)) for g in expected]
        scaler = scaler_of(init_scale=factor)
        scaler.step(optimizer, max_norm=max_norm, zero_grad=zero_grad)
        assert scaler.last_step.way.startswith("native")
        if zero_grad:
            assert all(p.grad is None for p in parameters)
            assert all(map(torch.equal, grads, before))
        else:
            assert all(p.grad is grad for p, grad in zip(parameters, grads, strict=True))
            torch.testing.assert_close(grads, [g.to(dtype) for g in expected])


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("options", [{"fused": True}, {}, {"foreach": True}], ids=str)
def test_consumed_gradients_are_none_and_change_no_result(options, skips, backend, device):
    found = []
    for zero_grad in (True, False):
        parameters, optimizer = make("adamw", sizes=SIZES[:4], **options)
        scaler = scaler_of()
        for step in range(3):
            give(parameters, scaler.get_scale(), seed=step)
            if skips and step == 1:
                parameters[0].grad[0] = math.inf
            scaler.step(optimizer, max_norm=0.5, zero_grad=zero_grad)
            scaler.update()
            assert all((p.grad is None) == zero_grad for p in parameters)
        found.append([bits(p.detach()).tobytes() for p in parameters])
        if zero_grad:
            module = torch.nn.ParameterList(parameters)
            with pytest.raises(RuntimeError, match="zero_grad=True: the last step set all grad"):
                scaler.nonfinite_parameters(module)
    assert found[0] == found[1]


def test_the_step_holds_no_gradient_afterwards(backend, device):
    parameters, optimizer = make("adamw")
    give(parameters)
    grad = parameters[0].grad
    before = sys.getrefcount(grad)
    fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert sys.getrefcount(grad) == before
