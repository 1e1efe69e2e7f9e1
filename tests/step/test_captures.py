"""CUDA graphs: clips and steps inside one."""

import math

import pytest
import torch
from support.gradients import parameters_with, random
from support.processes import run_python

import fastamp

FIRST_CALL = """
import torch, fastamp
parameter = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
parameter.grad = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fastamp.clip_grad_norm_(parameter, 1.0)
except RuntimeError as error:
    assert "make one step before the capture" in str(error)
else:
    raise AssertionError("not refused")
fastamp.clip_grad_norm_(parameter, 1.0)
norms = []
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    norm = fastamp.clip_grad_norm_(parameter, 1.0)
for scale in (3.0, 0.01):
    parameter.grad.fill_(scale)
    graph.replay()
    norms.append(norm.item())
    expected = min(scale, scale / (norms[-1] + 1e-6))
    torch.testing.assert_close(parameter.grad, torch.full_like(parameter.grad, expected))
print(norms)
"""


def graph_of(call):
    """Capture a call that has already run once on another stream, as torch asks for."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.cuda
def test_a_captured_clip_replays_with_new_gradients(device):
    sizes = [1, 1003, 70_001, *[64] * 3000]  # more than one table of tensors
    static = parameters_with(*[torch.zeros(size, device=device) for size in sizes])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fastamp.clip_grad_norm_(static, 1.0)
    torch.cuda.current_stream().wait_stream(stream)
    graph, norm = graph_of(lambda: fastamp.clip_grad_norm_(static, 1.0))
    for seed in range(3):
        scale = 10.0 ** (seed - 4)  # the first two are short enough to stay as they are
        grads = [scale * random(size, torch.float32, device, seed=seed) for size in sizes]
        for parameter, grad in zip(static, grads, strict=True):
            parameter.grad.copy_(grad)
        graph.replay()
        eager = parameters_with(*grads)
        assert torch.equal(norm, fastamp.clip_grad_norm_(eager, 1.0))
        for a, b in zip(static, eager, strict=True):
            assert torch.equal(a.grad, b.grad)


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["step", "clip_grad_norm_"])
def test_a_captured_step_replays_with_new_gradients_and_overflows(how, device):
    sizes = (1, 1003, 70_001, *[5] * 50)
    results = []
    for captured in (False, True):
        parameters = parameters_with(*[torch.zeros(size, device=device) for size in sizes])
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True, capturable=True)
        scaler = fastamp.GradScaler(device, init_scale=1024.0, growth_interval=2)

        def step(scaler=scaler, optimizer=optimizer):
            if how == "clip_grad_norm_":
                scaler.clip_grad_norm_(optimizer, 1e-2)
            else:
                scaler.step(optimizer, max_norm=1e-2)
            scaler.update()

        scaler.scale(torch.ones((), device=device))
        run = step
        for seed in range(6):
            for parameter, size in zip(parameters, sizes, strict=True):
                parameter.grad.copy_(random(size, torch.float32, device, seed=seed))
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
    assert results[0][-2] == 1024.0 * 2 / 4


def test_a_count_of_skipped_steps_is_made_before_a_capture(monkeypatch):
    """Made inside, each replay would set it to 0."""
    scaler = fastamp.GradScaler("cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="the first step on cuda:0 is in the capture"):
        scaler._skipped.on(torch.device("cuda:0"))
    assert not scaler._skipped


@pytest.mark.cuda
def test_the_first_call_of_a_process_is_refused_in_a_capture_and_later_ones_replay(device):
    done = run_python(FIRST_CALL)
    assert done.returncode == 0, done.stderr
    eager = [torch.full((1000,), scale, device=device) for scale in (3.0, 0.01)]
    assert done.stdout.strip() == str([fastamp.get_total_norm(grad).item() for grad in eager])
