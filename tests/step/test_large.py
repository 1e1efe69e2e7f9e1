"""Many tensors, large tensors, and steps that a CUDA graph replays."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import reference
from support.bits import bits
from support.gradients import parameters_with, random, values_of
from support.training import make_scaler

import fastamp


def many_parameters(device, backend, small):
    """Make 100,000 parameters of 1 to 3 elements that share one memory, and that of their grads.

    Fewer for the fallback, which takes seconds, and where the test has to be small: still more than
    one table of tensors.
    """
    count = 2500 if small else 20_000 if backend == "fallback" else 100_000
    sizes = [1 + i % 3 for i in range(count)]
    values = torch.zeros(sum(sizes), device=device)
    grads = random(sum(sizes), torch.float32, device)
    parameters = list(values.split(sizes))
    for parameter, grad in zip(parameters, grads.split(sizes), strict=True):
        parameter.grad = grad
    return parameters, values, grads


def test_thousands_of_tensors_are_clipped_at_once(backend, device, small):
    parameters, _, grads = many_parameters(device, backend, small)
    before = grads.clone()
    norm = reference.exact_norm([values_of(before)])
    assert fastamp.clip_grad_norm_(parameters, 1.0).item() == norm
    factor = reference.finish(float(norm) ** 2, 1.0, 1.0)["factor"]
    expected = reference.rescale(bits(before), "float32", factor)
    np.testing.assert_array_equal(bits(grads), expected)


def test_thousands_of_tensors_take_a_step(backend, device, small):
    parameters, values, grads = many_parameters(device, backend, small)
    before = grads.clone()
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = make_scaler(fastamp.GradScaler, device)
    scaler.scale(torch.ones((), device=device))
    scaler.step(optimizer, max_norm=1e9)
    assert torch.equal(values, before / -1024)
    assert scaler.last_step.norm.item() == reference.exact_norm([values_of(before / 1024)])
    scaler.update()
    grads[-1] = math.nan
    scaler.step(optimizer, max_norm=1e9)
    assert scaler.last_step.skipped
    assert torch.equal(values, before / -1024)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_than_2_to_the_31_elements(dtype):
    size = 2**31 + 2**16 + 3
    if torch.cuda.mem_get_info()[0] < 2 * size * dtype.itemsize:
        pytest.skip("not enough memory on the GPU")
    grad = torch.zeros(size, dtype=dtype, device="cuda")
    values = {0: 1.0, 2**31 - 1: 3.0, 2**31: 5.0, size - 1: 1.0}
    for i, value in values.items():
        grad[i] = value
    assert fastamp.get_total_norm(grad).item() == 6.0
    parameter = torch.zeros(1, dtype=dtype, device="cuda").expand(size)
    parameter.grad = grad
    fastamp.clip_grad_norm_(parameter, 3.0)
    for i, value in values.items():
        assert grad[i].item() == pytest.approx(value / 2, rel=1e-6)
        grad[i] = 0.0
    assert fastamp.get_total_norm(grad).item() == 0.0  # nothing else was written
    grad[-1] = math.nan
    assert fastamp.get_total_norm(grad).isnan()


def graph_of(call):
    """Capture a call that has already run once on another stream, as torch asks for."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.cuda
def test_a_captured_clip_replays_with_new_gradients():
    sizes = [1, 1003, 70_001, *[64] * 3000]  # more than one table of tensors
    static = parameters_with(*[torch.zeros(size, device="cuda") for size in sizes])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fastamp.clip_grad_norm_(static, 1.0)
    torch.cuda.current_stream().wait_stream(stream)
    graph, norm = graph_of(lambda: fastamp.clip_grad_norm_(static, 1.0))
    for seed in range(3):
        scale = 10.0 ** (seed - 4)  # the first two are short enough to stay as they are
        grads = [scale * random(size, torch.float32, "cuda", seed=seed) for size in sizes]
        for parameter, grad in zip(static, grads, strict=True):
            parameter.grad.copy_(grad)
        graph.replay()
        eager = parameters_with(*grads)
        assert torch.equal(norm, fastamp.clip_grad_norm_(eager, 1.0))
        for a, b in zip(static, eager, strict=True):
            assert torch.equal(a.grad, b.grad)


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["step", "clip_grad_norm_"])
def test_a_captured_step_replays_with_new_gradients_and_overflows(how):
    sizes = (1, 1003, 70_001)
    results = []
    for captured in (False, True):
        parameters = parameters_with(*[torch.zeros(size, device="cuda") for size in sizes])
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True, capturable=True)
        scaler = make_scaler(fastamp.GradScaler, "cuda")

        def step(scaler=scaler, optimizer=optimizer):
            if how == "clip_grad_norm_":
                scaler.clip_grad_norm_(optimizer, 1e-2)
            else:
                scaler.step(optimizer, max_norm=1e-2)
            scaler.update()

        scaler.scale(torch.ones((), device="cuda"))
        run = step
        for seed in range(6):
            for parameter, size in zip(parameters, sizes, strict=True):
                parameter.grad.copy_(random(size, torch.float32, "cuda", seed=seed))
            if seed in (2, 4):
                parameters[1].grad[7] = math.inf
            torch.cuda.synchronize()
            run()
            if captured and seed == 0:
                graph, _ = graph_of(step)
                run = graph.replay
        norm = scaler.last_step.norm if how == "step" else torch.zeros(())
        tensors = [t.detach() for p in parameters for t in (p, p.grad)]
        results.append([*tensors, norm, scaler.get_scale(), scaler.skipped_steps])
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert results[0][-2] == 1024.0 / 4
