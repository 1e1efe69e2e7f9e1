"""What torch.compile makes of the clip functions and steps: one graph, and one break of it."""

import math

import pytest
import torch
from support.bits import bits
from support.gradients import parameters_with, random
from torch._dynamo.utils import counters

import fastamp

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def grads_of(parameters):
    return [p.grad for p in parameters if p.grad is not None]


CALLS = {
    "clip_grad_norm_": lambda lib, ps: lib.clip_grad_norm_(ps, 0.5),
    "of a generator": lambda lib, ps: lib.clip_grad_norm_((p for p in ps), 0.5),
    "largest magnitude": lambda lib, ps: lib.clip_grad_norm_(ps, 0.5, math.inf),
    "order 3": lambda lib, ps: lib.clip_grad_norm_(ps, 0.5, 3.0),
    "get_total_norm": lambda lib, ps: lib.get_total_norm(grads_of(ps)),
}


def compiled_call(lib, call, parameters):
    torch.compiler.reset()
    return torch.compile(lambda: call(lib, parameters), backend="aot_eager", fullgraph=True)()


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch 2.8 cannot trace its own function")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_whole_graph_does_what_torchs_function_does_in_it(backend, device, call):
    found = []
    for lib in (fastamp, torch.nn.utils):
        grads = [random(1003, dtype, device, seed=i) for i, dtype in enumerate(DTYPES)]
        parameters = parameters_with(None, *grads)
        norm = compiled_call(lib, call, parameters)
        assert parameters[0].grad is None
        found.append([norm, *(p.grad for p in parameters[1:])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


STEPS = {
    "step": lambda scaler, optimizer: scaler.step(optimizer, max_norm=0.5),
    "update": lambda scaler, _: scaler.update(),
    "clip_grad_norm_": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 0.5),
    "optimizer_step": lambda _, optimizer: fastamp.optimizer_step(optimizer, 0.5),
}


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch 2.8 counts otherwise")
@pytest.mark.parametrize("call", STEPS.values(), ids=STEPS)
def test_a_step_breaks_the_graph_once_and_gives_the_bits_of_the_eager_one(backend, device, call):
    found = []
    for compiles in (True, False):
        parameters = parameters_with(*[random(9, torch.float32, device, seed=i) for i in (1, 2)])
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        scaler = fastamp.GradScaler(device, init_scale=8.0)
        scaler.scale(torch.ones((), device=device))
        scaler.unscale_(optimizer)

        def train(x, scaler=scaler, optimizer=optimizer):
            y = x + 1
            call(scaler, optimizer)
            return y * 2

        torch.compiler.reset()
        counters.clear()
        run = torch.compile(train, backend="eager") if compiles else train
        assert run(torch.ones(())).item() == 4
        assert sum(counters["graph_break"].values()) == compiles
        assert counters["stats"]["unique_graphs"] == 2 * compiles  # before the call and after it
        found.append([bits(t.detach()).tobytes() for p in parameters for t in (p, p.grad)])
    assert found[0] == found[1]


def test_what_a_step_calls_may_be_compiled(backend, device):
    parameters = parameters_with(random(9, torch.float32, device))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    torch.compiler.reset()
    counters.clear()

    def train():
        return fastamp.GradScaler(device, enabled=False).step(optimizer, lambda: double(x))

    x = torch.ones((), device=device)
    assert [torch.compile(train, backend="eager")().item(), train().item()] == [2.0, 2.0]
    assert counters["stats"]["unique_graphs"] >= 1
