"""The queue of a gatherer, whatever other threads do; only its owners keep the memory alive."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from support.loading import ends

from fastamp import _ops
from fastamp.data import slots as slots_module
from fastamp.data.columns import Column
from fastamp.data.slots import Slots


def rng():
    return np.random.default_rng(0)


def random_bytes(*shape):
    return rng().integers(0, 256, shape, np.uint8)


@pytest.fixture(params=["cpu"])
def native(request):
    """Return the compiled core."""
    if request.param not in _ops.backends():
        pytest.skip("the compiled core is not available")
    from fastamp import _native

    return _native


class Job:
    """Indices, and for each column a tensor to fill."""

    def __init__(self, columns, indices):
        self.indices = torch.from_numpy(np.asarray(indices, np.int64))
        self.outputs = [
            torch.from_numpy(np.zeros((len(self.indices), *array.shape[1:]), array.dtype))
            for array in columns
        ]

    def submit_to(self, queue):
        queue.submit(self.indices, self.outputs)

    def check(self, columns):
        for array, output in zip(columns, self.outputs, strict=True):
            np.testing.assert_array_equal(output, array[self.indices.numpy()])

    def owners(self):
        return [weakref.ref(tensor) for tensor in (self.indices, *self.outputs)]


class Owner:
    """Columns that live as long as this."""

    def __init__(self, columns):
        self.columns = columns


def make_queue(native, columns, depth=2, num_threads=1):
    parts = [[(array.ctypes.data, array.nbytes)] for array in columns]
    sizes = [(len(array), array.strides[0], array[:1].nbytes, 0, None) for array in columns]
    arguments = [(part, *size) for part, size in zip(parts, sizes, strict=True)]
    return native.Gatherer(arguments, depth, num_threads, Owner(columns))


def random_job(columns, random, max_count=40):
    length = len(columns[0])
    return Job(columns, random.integers(-length, length, random.integers(max_count)))


def run_jobs(native, columns, *, seed, num_jobs, depth, num_threads):
    """Consume jobs as a loader does, and look at every one."""
    random = np.random.default_rng(seed)
    queue = make_queue(native, columns, depth, num_threads)
    jobs = [random_job(columns, random) for _ in range(num_jobs)]
    for job in jobs[: depth - 1]:
        job.submit_to(queue)
    for number, job in enumerate(jobs):
        if number + depth - 1 < num_jobs:
            jobs[number + depth - 1].submit_to(queue)
        assert queue.wait() >= 0
        job.check(columns)


# Most jobs are worth a thread's while, and some are left to the consumer.
COLUMNS = [random_bytes(300, 1300), np.arange(600.0).reshape(300, 2), np.arange(300)]


@pytest.mark.parametrize("num_threads", [0, 1, 2, 16])
@pytest.mark.parametrize("depth", [1, 2, 7])
def test_any_number_of_helpers_gathers_in_order(native, depth, num_threads):
    run_jobs(native, COLUMNS, seed=1, num_jobs=60, depth=depth, num_threads=num_threads)


def test_images_are_not_augmented_without_keys(native):
    images = np.zeros((5, 4, 4), np.uint8)
    how = (1, 4, 4, 1, [(1, 0, 1, 0, 0, 0, 0)])  # a flip that never happens
    column = ([(images.ctypes.data, 80)], 5, 16, 16, 0, how)
    queue = native.Gatherer([column], 1, 0, images)
    with pytest.raises(ValueError, match="there are no keys"):
        Job([images], [1]).submit_to(queue)
    with pytest.raises(ValueError, match="too many steps"):
        native.Gatherer([(*column[:5], (*how[:4], how[4] * 9))], 1, 0, images)


def test_more_jobs_than_the_depth_are_refused(native):
    for depth in (1, 3):
        queue = make_queue(native, COLUMNS, depth)
        jobs = [Job(COLUMNS, [n, -n]) for n in range(depth + 1)]
        for job in jobs[:depth]:
            job.submit_to(queue)
        with pytest.raises(RuntimeError, match="more jobs under way than its depth"):
            jobs[depth].submit_to(queue)
        queue.wait()
        jobs[0].check(COLUMNS)
        jobs[depth].submit_to(queue)
        for job in jobs[1:]:
            queue.wait()
            job.check(COLUMNS)


def test_waiting_for_no_job_is_refused(native):
    queue = make_queue(native, COLUMNS)
    with pytest.raises(RuntimeError, match="no job to wait for"):
        queue.wait()
    job = Job(COLUMNS, [5])
    job.submit_to(queue)
    queue.wait()
    job.check(COLUMNS)
    with pytest.raises(RuntimeError, match="no job to wait for"):
        queue.wait()


def test_a_bad_index_is_told_with_the_length_of_its_column(native):
    columns = [random_bytes(10, 3), random_bytes(5, 2)]
    queue = make_queue(native, columns, depth=3)
    jobs = [Job(columns, indices) for indices in ([0, 9, 10, 11], [0, 4, -6], [4, -5])]
    for job in jobs:
        job.submit_to(queue)
    with pytest.raises(IndexError, match=r"^index 10 is out of bounds .* with size 10$"):
        queue.wait()
    with pytest.raises(IndexError, match=r"^index -6 is out of bounds .* with size 5$"):
        queue.wait()
    queue.wait()
    jobs[2].check(columns)


def test_a_queue_keeps_its_memory_alive_and_no_longer(native):
    columns = [random_bytes(4000, 1000)]
    queue = make_queue(native, columns, depth=3)
    jobs = [Job(columns, range(n, 4000, 7)) for n in range(3)]
    array, *owners = [weakref.ref(columns[0]), *(job.owners() for job in jobs)]
    for job in jobs:
        job.submit_to(queue)
    del columns, jobs, job
    gc.collect()
    assert array() is not None
    for n, (indices, output) in enumerate(owners):
        kept = output()
        assert indices() is not None
        queue.wait()
        np.testing.assert_array_equal(kept, array()[n::7])
        assert indices() is None
        del kept
        assert output() is None
    del queue
    assert array() is None


def test_a_job_without_an_output_for_each_column_is_refused(native):
    queue, job = make_queue(native, COLUMNS), Job(COLUMNS, [1])
    with pytest.raises(ValueError, match="expected one output for each column"):
        queue.submit(job.indices, job.outputs[:2])
    job.submit_to(queue)
    queue.wait()
    job.check(COLUMNS)


def test_a_job_that_was_refused_is_not_kept(native):
    queue = make_queue(native, COLUMNS, depth=1)
    kept, refused = Job(COLUMNS, [1]), Job(COLUMNS, [2])
    kept.submit_to(queue)
    with pytest.raises(RuntimeError):
        refused.submit_to(queue)
    owners = refused.owners()
    del refused
    assert all(owner() is None for owner in owners)


# What happens at the same time. These are the tests that run under the thread sanitizer.


@pytest.fixture
def switching():
    """Let Python change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(count, body):
    """Run body(number) at once for each number, and raise what any of them raises."""
    start = threading.Barrier(count)

    def run(number):
        start.wait(30)
        body(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


@pytest.mark.usefixtures("switching")
def test_several_consumers_with_queues_of_their_own(native):
    def consume(number):
        run_jobs(native, COLUMNS, seed=number, num_jobs=80, depth=4, num_threads=2)

    at_once(4, consume)


def test_a_queue_is_destroyed_in_the_middle_of_its_work(native):
    columns = [random_bytes(2000, 999)]
    for taken in range(4):
        for num_threads in (0, 1, 3):
            queue = make_queue(native, columns, depth=6, num_threads=num_threads)
            jobs = [Job(columns, range(-2000, 2000)) for _ in range(6)]
            owners = [owner for job in jobs for owner in job.owners()]
            while jobs:
                jobs.pop(0).submit_to(queue)
            for _ in range(taken):
                queue.wait()
            del queue
            assert all(owner() is None for owner in owners)


def test_queues_without_work_start_no_threads(native):
    before = count_system_threads()
    for num_threads in (0, 1, 8):
        for _ in range(20):
            make_queue(native, COLUMNS, num_threads=num_threads)
    assert count_system_threads() <= before


@pytest.mark.usefixtures("switching")
def test_consumers_that_stop_early_leave_nothing_behind(native):
    before = count_system_threads()

    def consume(number):
        random = np.random.default_rng(number)
        for _ in range(10):
            queue = make_queue(native, COLUMNS, depth=4, num_threads=2)
            jobs = [random_job(COLUMNS, random) for _ in range(4)]
            for job in jobs:
                job.submit_to(queue)
            for job in jobs[: random.integers(4)]:
                queue.wait()
                job.check(COLUMNS)

    at_once(3, consume)
    # Two threads stay, for the next queue; the system may list one that was joined for a moment.
    assert ends(lambda: count_system_threads() <= before + 2)


def count_system_threads():
    return len([*Path("/proc/self/task").glob("*")])


@pytest.mark.usefixtures("switching")
def test_errors_and_batches_of_several_consumers_do_not_mix(native):
    length = len(COLUMNS[0])

    def consume(number):
        queue = make_queue(native, COLUMNS, depth=5, num_threads=3)
        for start in range(0, 60, 5):
            jobs = [Job(COLUMNS, [number] * (n % 9)) for n in range(start, start + 5)]
            for n, job in enumerate(jobs, start):
                if n % 3 == 0 and n % 9:
                    job.indices[-1] = length + number
                job.submit_to(queue)
            for n, job in enumerate(jobs, start):
                if n % 3 == 0 and n % 9:
                    with pytest.raises(IndexError, match=f"^index {length + number} is out of"):
                        queue.wait()
                else:
                    queue.wait()
                    job.check(COLUMNS)

    at_once(3, consume)


@pytest.mark.usefixtures("switching")
def test_a_queue_may_move_from_one_consumer_to_the_next(native):
    queue, random = make_queue(native, COLUMNS, depth=4, num_threads=2), rng()
    jobs = [random_job(COLUMNS, random) for _ in range(30)]
    turn = SimpleQueue()
    turn.put(0)

    def consume(_):
        while (number := turn.get()) < len(jobs):
            for job in jobs[number : number + 3]:
                job.submit_to(queue)
            for job in jobs[number : number + 3]:
                queue.wait()
                job.check(COLUMNS)
            turn.put(number + 3)
        turn.put(number)

    at_once(3, consume)


@pytest.mark.usefixtures("switching")
def test_slots_given_back_by_another_thread_are_filled_again(native, monkeypatch):
    monkeypatch.setattr(slots_module, "_REUSE_NBYTES", 1)
    values = np.arange(64, dtype=np.int64)[:, None].repeat(50, axis=1)
    column, size, max_bytes = Column(values, torch.int64), 8, 20 * 8 * 50 * 8
    slots, held = Slots(max_bytes=max_bytes), SimpleQueue()

    def drop(_):
        while (batch := held.get()) is not None:
            indices, output = batch
            assert torch.equal(output, torch.from_numpy(values)[indices])

    def produce(number):
        random = np.random.default_rng(number)
        queue = make_queue(native, [values], depth=3, num_threads=2)
        for _ in range(40):
            batches = []
            for _ in range(3):
                indices = torch.from_numpy(random.integers(0, 64, size))
                batches.append((indices, slots.allocate((size, 50), column.dtype)))
                queue.submit(indices, batches[-1][1:])
            for batch in batches:
                queue.wait()
                held.put(batch)

    with ThreadPoolExecutor(2) as droppers:
        ends = [droppers.submit(drop, n) for n in range(2)]
        at_once(2, produce)
        held.put(None)
        held.put(None)
        for end in ends:
            end.result()
    assert 0 < slots.held_nbytes <= max_bytes


@pytest.mark.usefixtures("switching")
def test_threads_that_wait_at_once_are_refused_and_lose_nothing(native):
    columns = [random_bytes(64, 1 << 17)]
    queue = make_queue(native, columns, depth=4, num_threads=0)
    taken, refused = SimpleQueue(), SimpleQueue()

    def consume(_):
        while taken.qsize() < len(jobs):
            try:
                taken.put(queue.wait())
            except RuntimeError as error:  # noqa: PERF203 - the next may be taken
                if "no job to wait for" not in str(error):
                    refused.put(str(error))

    for random in [rng()] * 50:  # until they meet, on a busy machine
        jobs = [Job(columns, random.integers(0, 64, 64)) for _ in range(4)]
        for job in jobs:
            job.submit_to(queue)
        at_once(3, consume)
        for job in jobs:
            job.check(columns)
        if not refused.empty():
            break
        while not taken.empty():
            taken.get()
    assert not refused.empty()
    while not refused.empty():
        assert refused.get() == "another thread waits for a batch of this iterator"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_to_make_its_own_iterator(native):
    queue, job = make_queue(native, COLUMNS, depth=2), Job(COLUMNS, [1])
    job.submit_to(queue)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks with threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            queue.wait()
        except RuntimeError as error:
            status = 0 if "before the process forked" in str(error) else 2
            del queue
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    queue.wait()
    job.check(COLUMNS)
