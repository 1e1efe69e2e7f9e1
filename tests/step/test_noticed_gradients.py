"""Whatever gradients come between two steps, the next one reads them anew."""

import pytest
import torch
from support.updates import give, make

import fastamp

SIZES = [(3,), (70, 5), (16, 16), (1025,), (64,)]
STEPS = 7
FAR = 1e9
"""A norm that no gradients have: nothing is clipped."""


def assert_as_torch(prepare, ways, sizes=SIZES):
    """Make steps by fastamp and by torch; `ways` has those of fastamp's that are not native."""
    found = []
    for ours in (True, False):
        parameters, optimizer = make("adamw", sizes=sizes)
        for step in range(STEPS):
            prepare(step, parameters, optimizer)
            if ours:
                way = fastamp.optimizer_step(optimizer, FAR).way
                assert way.startswith(ways.get(step, "native"))
            else:
                optimizer.step()
        found.append([p.detach() for p in parameters])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def none(parameters, step):
    for p in parameters[step % 3 :: 2]:
        p.grad = None


def other_data(parameters, step):
    parameters[1].grad = parameters[1].other
    parameters[1].grad.data = torch.full_like(parameters[1], step)


def strided(parameters, step):
    parameters[1].grad = parameters[1].grad.t().contiguous().t()


def exchanged(parameters, step):
    parameters[2].grad, parameters[-1].grad = parameters[-1].grad, parameters[2].grad


def unaligned(parameters, step):
    values = torch.empty(1026, device=parameters[3].device)
    values[1:] = parameters[3].grad
    parameters[3].grad = values[1:]


def shared(parameters, step):
    parameters[-1].grad = parameters[2].grad


def own_memory(parameters, step):
    parameters[3].grad = parameters[3].detach()


def freed(parameters, step):
    parameters[1].grad = None
    values = parameters[1].detach().clone()
    parameters[1].untyped_storage().resize_(0)
    parameters[1].back = values


NATIVE_GRADS = [none, other_data, exchanged, unaligned, freed]


@pytest.mark.parametrize(
    "change", [*NATIVE_GRADS, strided, shared, own_memory], ids=lambda f: f.__name__
)
def test_gradients_may_differ_at_any_step(change, compiled, device):
    def prepare(step, parameters, optimizer):
        if step == 0:
            parameters[1].other = torch.ones_like(parameters[1])
        if hasattr(parameters[1], "back"):
            values = parameters[1].__dict__.pop("back")
            parameters[1].untyped_storage().resize_(values.nbytes)
            with torch.no_grad():
                parameters[1].copy_(values)
        give(parameters, seed=step)
        if step in (2, 3):
            change(parameters, step)

    ways = {} if change in NATIVE_GRADS else dict.fromkeys((2, 3), "torch's: ")
    assert_as_torch(prepare, ways, [*SIZES[:-1], (16, 16)])
