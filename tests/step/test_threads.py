"""A step in the midst of another, no thread beyond torch's number, and workers after a fork."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from support.gradients import parameters_with
from support.processes import run_python

import fastamp
from fastamp.step import native

ADAMW = partial(torch.optim.AdamW, weight_decay=0, eps=0)
SGD = partial(torch.optim.SGD, momentum=0, fused=True)
WITHOUT_GPU = [name for name in fastamp.backends() if name != "cuda"]


def in_threads(calls, *, at_once):
    """Run every call in a thread, all at once or one after the other."""
    count = len(calls) if at_once else 1
    start = threading.Barrier(count)

    def run(call):
        start.wait()
        return call()

    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(run, calls)]


@pytest.mark.parametrize("optimizer_type", [ADAMW, partial(ADAMW, fused=True), SGD])
def test_a_step_in_the_midst_of_anothers_loses_neither(
    optimizer_type, compiled, device, monkeypatch
):
    """As from two threads that step one optimizer."""
    parameters = parameters_with(torch.zeros(1000, device=device), torch.zeros(3, device=device))
    optimizer = optimizer_type(parameters, lr=1.0)
    for p in parameters:
        p.grad = torch.ones_like(p)
    prepare = native.prepare

    def prepare_and_step(prepared):
        monkeypatch.setattr(native, "prepare", prepare)
        found = prepare(prepared)
        in_threads([lambda: fastamp.optimizer_step(optimizer, math.inf)], at_once=False)
        return found

    monkeypatch.setattr(native, "prepare", prepare_and_step)
    assert fastamp.optimizer_step(optimizer, math.inf).way == "native"
    for p in parameters:
        assert p.eq(-2).all()
    states = optimizer.state_dict()["state"].values()
    assert all(state["step"] == 2 for state in states if "step" in state)


COUNT_THREADS = """
import os, torch, fastamp
threads = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)
p = torch.nn.Parameter(torch.zeros(1 << 20))
p.grad = torch.ones(1 << 20)
before = threads()
scaler = fastamp.GradScaler("cpu")
scaler.scale(torch.ones(()))
scaler.step(torch.optim.SGD([p], lr=0.1), max_norm=1e-3)
fastamp.clip_grad_norm_(p, 1e-6)
at_one = threads() - before
torch.set_num_threads(3)
fastamp.clip_grad_norm_(p, 1e-9)
print(at_one, threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
@pytest.mark.parametrize("name", WITHOUT_GPU)
def test_one_thread_means_no_thread_is_started(name):
    result = run_python(COUNT_THREADS, FASTAMP_BACKEND=name)
    at_one, at_three = result.stdout.split() or pytest.fail(result.stderr)
    assert at_one == "0"
    if name == "cpu":
        assert at_three == "2"  # so the count can tell


@pytest.mark.parametrize(
    ("start", "name"), [("spawn", WITHOUT_GPU[0]), *(("fork", name) for name in WITHOUT_GPU)]
)
def test_data_loader_workers_clip(start, name):
    code = f"from support import clips; clips.check_workers({start!r})"
    result = run_python(code, FASTAMP_BACKEND=name)
    assert result.returncode == 0, result.stderr


REPLACE = """
import sys, threading, torch, fastamp
parameters = [torch.nn.Parameter(torch.randn(300, 300)) for _ in range(30)]
for p in parameters:
    p.grad = torch.randn_like(p)
optimizer, stop = torch.optim.AdamW(parameters), []
fastamp.optimizer_step(optimizer)

def replace():  # as when a checkpoint is restored
    while not stop:
        for p in parameters:
            state = optimizer.state[p]
            state["exp_avg"], state["step"] = torch.zeros(300, 300), torch.ones(())

thread = threading.Thread(target=replace)
thread.start()
for _ in range(200):
    assert fastamp.optimizer_step(optimizer).way == "native"
stop.append(1)
thread.join()
assert all(p.isfinite().all() for p in parameters)
"""


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="no compiled code")
def test_states_that_another_thread_replaces_during_a_step_live_until_its_end():
    """The memory of freed ones would be written into."""
    done = run_python(REPLACE)
    assert done.returncode == 0, done.stderr
