"""Steps that are skipped, or consume gradients: what they leave, byte by byte."""

import copy
import math
import sys

import pytest
import torch
from support.bits import bits
from support.updates import RULES, SIZES, give, make, scaler_of

import fastamp

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
            with pytest.raises(RuntimeError, match="no parameter has a gradient; leave zero_"):
                scaler.nonfinite_parameters(module)
    assert found[0] == found[1]


def test_the_step_holds_no_gradient_afterwards(backend, device):
    parameters, optimizer = make("adamw")
    give(parameters)
    grad = parameters[0].grad
    before = sys.getrefcount(grad)
    fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert sys.getrefcount(grad) == before
