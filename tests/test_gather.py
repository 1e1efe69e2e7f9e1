"""What a gatherer promises: the rows at the indices, in order, whatever other threads do."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view

from fastamp import _backend
from fastamp._backend import Column
from fastamp.data import slots as slots_module
from fastamp.data.slots import Slots

pytestmark = pytest.mark.usefixtures("one_thread")

GUARD_NBYTES = 128  # before and after every output
GUARD = 0xA5
LARGE_NBYTES = [255, 256, 257, 1000, 4095, 4096, 4097, 4161, 12345]
WIDE = {torch.uint8: np.uint8, torch.uint16: np.uint16, torch.int32: np.int32}


def rng():
    return np.random.default_rng(0)


def random_bytes(*shape):
    return rng().integers(0, 256, shape, np.uint8)


def same_dtype(array):
    """Return an array as a column that is not cast."""
    if isinstance(array, torch.Tensor):
        return Column(array, array.dtype)
    return Column(array, torch.from_numpy(np.empty(0, array.dtype)).dtype)


def make_output(count, column):
    """Return a tensor to fill, inside memory that must stay as it is."""
    shape = (count, *column.row_shape)
    nbytes = int(np.prod(shape)) * column.dtype.itemsize
    memory = torch.full((2 * GUARD_NBYTES + nbytes,), GUARD, dtype=torch.uint8)
    return memory[GUARD_NBYTES : GUARD_NBYTES + nbytes].view(column.dtype).view(shape), memory


def check(column, indices, output, memory):
    array = np.asarray(column.array)
    expected = array[np.asarray(indices, np.int64)]
    assert output.dtype == column.dtype
    np.testing.assert_array_equal(output.numpy(), expected.astype(output.numpy().dtype))
    assert (memory[:GUARD_NBYTES] == GUARD).all()
    assert (memory[len(memory) - GUARD_NBYTES :] == GUARD).all()


def gather(columns, indices):
    """Gather one batch and compare it with NumPy's."""
    gatherer = _backend.host_ops().gatherer(columns, 1)
    outputs, memories = zip(*(make_output(len(indices), c) for c in columns), strict=True)
    gatherer.submit(torch.tensor(indices, dtype=torch.int64), outputs)
    assert gatherer.wait() >= 0
    for column, output, memory in zip(columns, outputs, memories, strict=True):
        check(column, indices, output, memory)


def raised(columns, indices):
    """Return the text of the error that the indices cause."""
    gatherer = _backend.host_ops().gatherer(columns, 1)
    outputs = [make_output(len(indices), column)[0] for column in columns]
    gatherer.submit(torch.tensor(indices, dtype=torch.int64), outputs)
    with pytest.raises(IndexError) as info:
        gatherer.wait()
    return str(info.value)


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_rows_of_every_size_are_copied(backend, library):
    indices = [6, 0, -1, 3, 3, -7, 5]
    for nbytes in [*range(1, 131), *LARGE_NBYTES]:
        gather([same_dtype(library(random_bytes(7, nbytes)))], indices)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 31, 300])
def test_batches_of_every_length_are_copied(backend, count):
    columns = [same_dtype(random_bytes(64, 65)), same_dtype(np.arange(64)[:, None])]
    gather(columns, rng().integers(-64, 64, count).tolist())


@pytest.mark.parametrize(
    "array",
    [
        random_bytes(9, 200)[:, 31:100],
        random_bytes(18, 33)[::2],
        random_bytes(9, 65)[::-1],
        np.broadcast_to(random_bytes(1, 70), (9, 70)),
        sliding_window_view(random_bytes(80), 72),
        sliding_window_view(np.arange(80), 72),
        torch.arange(80).as_strided((9, 72), (1, 1)),
        torch.arange(1000.0).view(10, 100)[1:, 3:90],
        torch.arange(18.0).view(9, 2)[:, 1],
        torch.arange(72).view(9, 2, 4).to(torch.bfloat16).float(),
    ],
    ids=[
        "gaps",
        "every second",
        "backwards",
        "one row",
        "overlapping bytes",
        "overlapping int64",
        "overlapping tensor",
        "tensor with gaps",
        "scalars with gaps",
        "three dimensions",
    ],
)
def test_rows_may_lie_anywhere(backend, array):
    gather([same_dtype(array)], [8, 0, -9, 4, -1, 4])


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("length", [1, 7, 64, 257, 5000])
def test_tokens_are_widened(backend, dtype, length):
    numpy_dtype = WIDE[dtype]
    bounds = np.iinfo(numpy_dtype)
    array = rng().integers(bounds.min, bounds.max, (5, length), numpy_dtype, endpoint=True)
    array[1], array[2] = bounds.min, bounds.max
    windows = sliding_window_view(array.reshape(-1), length)
    columns = [Column(array, torch.int64), Column(torch.from_numpy(array), torch.int64)]
    gather([*columns, same_dtype(array)], [2, 1, -5, 0, 4, -1])
    gather([Column(windows, torch.int64)], [1, -1, 0, len(windows) - 2])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_tokens_may_begin_at_an_odd_address(backend, dtype):
    tokens = np.frombuffer(random_bytes(1 + 40 * np.dtype(dtype).itemsize).data, dtype, offset=1)
    gather([Column(tokens.reshape(8, 5), torch.int64)], [7, 0, 3])


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8],
    ids=str,
)
def test_every_dtype_is_copied_bit_by_bit(backend, dtype):
    array = torch.from_numpy(random_bytes(6, 5 * dtype.itemsize))
    array = (array % 2).view(dtype) if dtype is torch.bool else array.view(dtype)
    column = Column(array, dtype)
    output, _ = make_output(3, column)
    gatherer = _backend.host_ops().gatherer([column], 1)
    gatherer.submit(torch.tensor([5, 0, -2]), [output])
    gatherer.wait()
    bits = array.view(torch.uint8)[[5, 0, 4]]
    assert torch.equal(output.view(torch.uint8), bits)


@pytest.mark.parametrize("shape", [(4, 0), (4, 3, 0), (4,), (4, 1)])
def test_rows_without_elements_and_scalars_are_rows(backend, shape):
    gather([same_dtype(np.ones(shape, np.float32))], [3, 0, -4])
    gather([Column(np.ones(shape, np.uint16), torch.int64)], [3, 0, -4])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (7, 5)])
def test_a_batch_may_be_empty(backend, shape):
    gather([same_dtype(np.ones(shape, np.float32))], [])


@pytest.mark.parametrize("bad", [7, -8, 1 << 40, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 4])
def test_an_index_out_of_bounds_is_named(backend, bad, position):
    indices = [0, 6, -7, 3, -1]
    indices[position] = bad
    text = raised([same_dtype(random_bytes(7, 3))], indices)
    assert text == f"index {bad} is out of bounds for dimension 0 with size 7"


def test_the_first_of_several_bad_indices_is_named(backend):
    assert "index 9 " in raised([same_dtype(random_bytes(7, 3))], [0, 9, -20, 8])


def test_every_column_has_bounds_of_its_own(backend):
    columns = [same_dtype(random_bytes(7, 3)), same_dtype(random_bytes(4, 2))]
    text = raised(columns, [3, 5])
    assert text == "index 5 is out of bounds for dimension 0 with size 4"


def test_no_index_is_in_bounds_of_nothing(backend):
    for bad in (0, -1):
        assert "with size 0" in raised([same_dtype(np.ones((0, 3), np.float32))], [bad])


def test_batches_come_in_the_order_of_submission(backend):
    column = same_dtype(np.arange(1000).reshape(500, 2))
    depth = 5
    gatherer = _backend.host_ops().gatherer([column], depth)
    batches = [rng().integers(-500, 500, n).tolist() for n in (1, 400, 0, 3, 90) * 8]
    under_way = []
    for number, indices in enumerate(batches):
        under_way.append((indices, *make_output(len(indices), column)))
        gatherer.submit(torch.tensor(indices, dtype=torch.int64), under_way[-1][1:2])
        if number + 1 >= depth:
            gatherer.wait()
            check(column, *under_way.pop(0))
    for job in under_way:
        gatherer.wait()
        check(column, *job)


def test_batches_after_an_error_are_right(backend):
    column = same_dtype(np.arange(20))
    gatherer = _backend.host_ops().gatherer([column], 3)
    jobs = [([n, 19] if n != 1 else [n, 20], *make_output(2, column)) for n in range(3)]
    for indices, output, _ in jobs:
        gatherer.submit(torch.tensor(indices), [output])
    gatherer.wait()
    with pytest.raises(IndexError, match="index 20 is out of bounds"):
        gatherer.wait()
    gatherer.wait()
    check(column, *jobs[0])
    check(column, *jobs[2])


# The queue itself, with memory that only its owners keep alive.


@pytest.fixture(params=["cpu"])
def native(request):
    """Return the compiled core."""
    if request.param not in _backend.backends():
        pytest.skip("the compiled core is not available")
    from fastamp import _native

    return _native


class Owner:
    """Arrays that live as long as this."""

    def __init__(self, *arrays):
        self.arrays = arrays

    @property
    def addresses(self):
        return [array.ctypes.data for array in self.arrays]


class Job(Owner):
    """Indices, and for each column an array to fill."""

    def __init__(self, columns, indices):
        indices = np.asarray(indices, np.int64)
        outputs = [np.zeros((len(indices), *array.shape[1:]), array.dtype) for array in columns]
        super().__init__(indices, *outputs)

    def submit_to(self, queue):
        address, *outputs = self.addresses
        queue.submit(address, len(self.arrays[0]), outputs, self)

    def check(self, columns):
        indices, *outputs = self.arrays
        for array, output in zip(columns, outputs, strict=True):
            np.testing.assert_array_equal(output, array[indices])


def make_queue(native, columns, depth=2, num_threads=1):
    arguments = [
        (a.ctypes.data, len(a), a.strides[0], a[:1].nbytes, native.Cast.NONE) for a in columns
    ]
    return native.GatherQueue(arguments, depth, num_threads, Owner(*columns))


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
        done, _, bad_position, _ = queue.wait()
        assert done is job
        assert bad_position == -1
        job.check(columns)


COLUMNS = [random_bytes(300, 130), np.arange(600.0).reshape(300, 2), np.arange(300)]


@pytest.mark.parametrize("num_threads", [0, 1, 2, 16])
@pytest.mark.parametrize("depth", [1, 2, 7])
def test_any_number_of_helpers_gathers_in_order(native, depth, num_threads):
    run_jobs(native, COLUMNS, seed=1, num_jobs=60, depth=depth, num_threads=num_threads)


def test_more_jobs_than_the_depth_are_refused(native):
    for depth in (1, 3):
        queue = make_queue(native, COLUMNS, depth)
        jobs = [Job(COLUMNS, [n, -n]) for n in range(depth + 1)]
        for job in jobs[:depth]:
            job.submit_to(queue)
        with pytest.raises(RuntimeError, match="more jobs under way than its depth"):
            jobs[depth].submit_to(queue)
        assert queue.wait()[0] is jobs[0]
        jobs[depth].submit_to(queue)
        for job in jobs[1:]:
            assert queue.wait()[0] is job
            job.check(COLUMNS)


def test_waiting_for_no_job_is_refused(native):
    queue = make_queue(native, COLUMNS)
    with pytest.raises(RuntimeError, match="no job to wait for"):
        queue.wait()
    job = Job(COLUMNS, [5])
    job.submit_to(queue)
    assert queue.wait()[0] is job
    with pytest.raises(RuntimeError, match="no job to wait for"):
        queue.wait()


def test_a_bad_index_is_told_with_its_position_and_column(native):
    columns = [random_bytes(10, 3), random_bytes(5, 2)]
    queue = make_queue(native, columns, depth=3)
    for indices in ([0, 9, 10, 11], [0, 4, 5], [4, -5]):
        Job(columns, indices).submit_to(queue)
    assert queue.wait()[2:] == (2, 0)
    assert queue.wait()[2:] == (2, 1)
    assert queue.wait()[2:] == (-1, -1)


def test_owners_keep_the_memory_alive_and_no_longer(native):
    columns = [random_bytes(4000, 1000)]
    expected = columns[0].copy()
    queue = make_queue(native, columns, depth=3)
    jobs = [Job(columns, range(n, 4000, 7)) for n in range(3)]
    array, *owners = [weakref.ref(columns[0]), *map(weakref.ref, jobs)]
    for job in jobs:
        job.submit_to(queue)
    del columns, jobs, job
    gc.collect()
    assert all(owner() is not None for owner in (array, *owners))
    for n, owner in enumerate(owners):
        job = queue.wait()[0]
        assert job is owner()
        np.testing.assert_array_equal(job.arrays[1], expected[n::7])
        del job
        assert owner() is None
    del queue
    assert array() is None


def test_a_job_that_was_refused_is_not_kept(native):
    queue = make_queue(native, COLUMNS, depth=1)
    kept, refused = Job(COLUMNS, [1]), Job(COLUMNS, [2])
    kept.submit_to(queue)
    with pytest.raises(RuntimeError):
        refused.submit_to(queue)
    owner = weakref.ref(refused)
    del refused
    assert owner() is None


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
            owners = [weakref.ref(job) for job in jobs]
            while jobs:
                jobs.pop(0).submit_to(queue)
            for _ in range(taken):
                queue.wait()
            del queue
            assert all(owner() is None for owner in owners)


def test_queues_come_and_go_without_work(native):
    for num_threads in (0, 1, 8):
        for _ in range(20):
            make_queue(native, COLUMNS, num_threads=num_threads)


@pytest.mark.usefixtures("switching")
def test_consumers_that_stop_early_leave_nothing_behind(native):
    before = count_system_threads()

    def consume(number):
        random = np.random.default_rng(number)
        for _ in range(10):
            queue = make_queue(native, COLUMNS, depth=4, num_threads=2)
            for _ in range(4):
                random_job(COLUMNS, random).submit_to(queue)
            for _ in range(random.integers(4)):
                queue.wait()[0].check(COLUMNS)

    at_once(3, consume)
    deadline_s = time.monotonic() + 10  # the system may list a thread that was joined for a moment
    while count_system_threads() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert count_system_threads() <= before


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
                    job.arrays[0][-1] = length + number
                job.submit_to(queue)
            for n, job in enumerate(jobs, start):
                done, _, bad_position, bad_column = queue.wait()
                assert done is job
                if n % 3 == 0 and n % 9:
                    assert (bad_position, bad_column) == (n % 9 - 1, 0)
                else:
                    assert bad_position == -1
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
                assert queue.wait()[0] is job
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
                addresses = [batches[-1][1].data_ptr()]
                queue.submit(indices.data_ptr(), size, addresses, batches[-1])
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_to_make_its_own_iterator(native):
    queue = make_queue(native, COLUMNS, depth=2)
    Job(COLUMNS, [1]).submit_to(queue)
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
    queue.wait()[0].check(COLUMNS)
