"""CUDA graphs: the step inside one, and a capture while fastamp's threads are at work."""

from __future__ import annotations

import time

import pytest
import torch
from support.processes import run_python

import fastamp

SIZES = [(1003,), (64, 64), (7,), *[(5,)] * 50]
FIRST_CALL = """
import torch, fastamp
parameter = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
parameter.grad = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    norm = fastamp.clip_grad_norm_(parameter, 1.0)
for scale in (3.0, 0.01):
    parameter.grad.fill_(scale)
    graph.replay()
    length = scale * 1000 ** 0.5
    torch.testing.assert_close(norm.item(), length, rtol=1e-6, atol=0)
    expected = min(scale, scale / (length + 1e-6))
    torch.testing.assert_close(parameter.grad, torch.full_like(parameter.grad, expected))
"""


class Training:
    """Parameters with gradients that stay where they are, their optimizer and a scaler."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        values = [torch.randn(size, device="cuda", generator=generator) for size in SIZES]
        self.parameters = [torch.nn.Parameter(value) for value in values]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.01, fused=True, capturable=True)
        self.scaler = fastamp.GradScaler("cuda", init_scale=8.0, growth_interval=2)
        self.scaler.scale(torch.ones((), device="cuda"))
        self.step(0)

    def give(self, seed):
        """Fill the gradients, every third time with one that overflowed."""
        generator = torch.Generator("cuda").manual_seed(seed)
        for parameter in self.parameters:
            parameter.grad.normal_(generator=generator)
        if seed % 3 == 2:
            self.parameters[1].grad[3, 4] = torch.inf

    def step(self, seed=None):
        if seed is not None:
            self.give(seed)
        self.scaler.step(self.optimizer, max_norm=1.0)
        self.scaler.update()


@pytest.mark.cuda
def test_a_captured_step_replays_as_the_eager_one():
    eager, captured = Training(), Training()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for seed in range(1, 9):
        eager.step(seed)
        captured.give(seed)
        graph.replay()
        pairs = zip(eager.parameters, captured.parameters, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        assert torch.equal(eager.scaler._scale, captured.scaler._scale)
    assert eager.scaler.skipped_steps == captured.scaler.skipped_steps == 3


def test_a_count_of_skipped_steps_is_made_before_a_capture(monkeypatch):
    """Made inside, each replay would set it to 0."""
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    assert [*scaler._skipped] == [torch.device("cpu")]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="the first step on cuda:0 is in the capture"):
        scaler._counter(torch.device("cuda:0"))
    assert len(scaler._skipped) == 1


@pytest.mark.cuda
def test_the_first_call_of_a_process_may_be_captured():
    done = run_python(FIRST_CALL)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.parametrize("source", ["loader", "prefetch", "tracker"])
def test_a_region_is_captured_while_a_thread_is_at_work(source):
    def produce():
        for i in range(200):
            time.sleep(1e-3)
            yield torch.full((1000 + i,), float(i))

    tracker = fastamp.MetricsTracker()
    rows = torch.arange(200.0).repeat(1000, 1).T.contiguous()
    if source == "loader":
        batches = iter(fastamp.DataLoader(rows, 1, device="cuda"))
    else:
        batches = iter(fastamp.prefetch(produce(), "cuda"))
    seen = [next(batches).mean()]
    weight = torch.randn(256, 256, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = weight
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            product = product @ weight * 0.05
            time.sleep(0.005)
        if source == "tracker":
            tracker.flush()
    graph.replay()
    seen += [batch.mean() for batch in batches]
    assert torch.stack(seen).tolist() == list(map(float, range(200)))
    assert product.isfinite().all()
    tracker.close()
