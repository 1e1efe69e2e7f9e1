"""CUDA graphs: a step and a clip inside one."""

import math

import pytest
import torch
from support.gradients import parameters_with, random

import fastamp


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["step", "scaler.clip_grad_norm_", "fastamp.clip_grad_norm_"])
def test_a_captured_step_replays_with_new_gradients_and_overflows(how, device):
    sizes = (1, 1003, 70_001, *[5] * 3000)  # more than one table of tensors
    results = []
    for captured in (False, True):
        parameters = parameters_with(*[torch.zeros(size, device=device) for size in sizes])
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True, capturable=True)
        scaler = fastamp.GradScaler(device, init_scale=1024.0, growth_interval=2)

        def step(scaler=scaler, optimizer=optimizer, parameters=parameters):
            if how == "fastamp.clip_grad_norm_":
                fastamp.clip_grad_norm_(parameters, 1e-2)
                return
            if how == "scaler.clip_grad_norm_":
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
            if captured and seed == 0:  # it has run once, as torch asks for
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                run = graph.replay
        norm = scaler.last_step.norm if how == "step" else torch.zeros(())
        tensors = [t.detach() for p in parameters for t in (p, p.grad)]
        results.append([*tensors, norm, scaler.get_scale(), scaler.skipped_steps])
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert results[0][-2] == 1024.0 * (1 if how.startswith("fastamp") else 2 / 4)


def test_a_count_of_skipped_steps_is_made_before_a_capture(monkeypatch):
    """Made inside, each replay would set it to 0."""
    scaler = fastamp.GradScaler("cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="the first step on cuda:0 is in the capture"):
        scaler._skipped.on(torch.device("cuda:0"))
    assert not scaler._skipped
