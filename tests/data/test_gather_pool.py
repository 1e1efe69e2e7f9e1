"""The threads that gather: one pool for the process, which passes share and leave behind."""

from __future__ import annotations

import pytest
from support.loading import HOST, check

pytestmark = pytest.mark.skipif(HOST != "cpu", reason="needs the compiled core")

# Each test runs in a process of its own, which has no threads that gather before.
COMMON = """
import os
from pathlib import Path
import numpy as np
import torch
import fastamp
from fastamp import _native
from support.loading import ends

torch.set_num_threads(4)
LARGE, SMALL = torch.arange(64 * 5000.0).view(64, -1), torch.arange(64)  # batches of 80 KB, 32 B

def count_threads():
    # Only of those that gather: torch has threads of its own.
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("fastamp gather")

def check_pass(data=LARGE):  # by NumPy: torch's own threads do not survive a fork either
    made = [batch.numpy() for batch in fastamp.DataLoader(data, 4)]
    np.testing.assert_array_equal(np.concatenate(made), data)

def run_child(body):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def run(code):
    check(COMMON + code, backend="cpu")


def test_any_number_of_passes_shares_the_threads():
    run("""
passes = [zip(*(fastamp.DataLoader(LARGE, 4) for _ in range(5))) for _ in range(3)]
for batches in zip(*passes):
    assert all(torch.equal(batch, batches[0][0]) for made in batches for batch in made)
    assert count_threads() <= 3  # a thread that has not run yet has no name
for _ in range(100):
    check_pass()
assert ends(lambda: 1 <= count_threads() <= 3)
assert len([*Path("/proc/self/task").glob("*")]) < 12
""")


def test_small_batches_start_no_thread():
    run("""
assert count_threads() == 0
for _ in range(20):
    check_pass(SMALL)
assert count_threads() == 0
""")


def test_more_threads_are_started_for_a_pass_that_asks_for_more():
    run("""
torch.set_num_threads(2)
for _ in range(20):
    check_pass()
assert ends(lambda: count_threads() == 1)
torch.set_num_threads(8)
check_pass()
assert ends(lambda: check_pass() or count_threads() > 1)
assert count_threads() <= 7
""")


def test_a_thread_takes_the_queues_in_turn():
    """Nobody is woken before all jobs of three queues wait; then one thread does all of them."""
    run("""
shared, index = torch.zeros(1), torch.tensor([0])
kept, marks = [], []

def submit(value, num_jobs, width=1):
    columns = torch.full((1, 1), value), torch.ones(1, width)
    memory = [([(c.data_ptr(), c.nbytes)], 1, c.nbytes, c.nbytes, 0, None) for c in columns]
    kept.append((_native.Gatherer(memory, num_jobs, 1, columns), columns))
    for _ in range(num_jobs):
        marks.append(torch.zeros(1, width))
        kept[-1][0].submit(index, [shared, marks[-1]])

submit(1.0, 2)
submit(2.0, 3)
submit(3.0, 1, width=1 << 16)
assert ends(lambda: all(mark.all() for mark in marks))
assert shared == 2 and count_threads() == 1
""")


def test_a_forked_child_has_threads_of_its_own():
    """Also if its parent's are in the middle of copies, and again in a child of the child."""
    run("""
def check_here():
    assert count_threads() == 0
    check_pass()
    assert ends(lambda: 1 <= count_threads() <= 3)

for _ in range(5):
    batches = iter(fastamp.DataLoader(LARGE, 4))
    next(batches)
    run_child(lambda: (check_here(), run_child(check_here)))
    np.testing.assert_array_equal(np.concatenate([*batches]), LARGE[4:])
""")


def test_the_process_ends_while_threads_sleep_or_copy():
    run("""
check_pass()
for _ in range(5):
    left = [iter(fastamp.DataLoader(LARGE, 4)) for _ in range(3)]
    assert all(torch.equal(next(batches), LARGE[:4]) for batches in left)
""")
