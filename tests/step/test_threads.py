"""A step in the midst of another, no thread beyond torch's number, and workers after a fork."""

from pathlib import Path

import pytest
from support.processes import run_python

import fastamp

WITHOUT_GPU = [name for name in fastamp.backends() if name != "cuda"]


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
