"""What a gatherer promises: the rows at the indices, batch by batch, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view

import fastamp
from fastamp.data.columns import Column, Windows, make_gatherer

GUARD_NBYTES = 128  # before and after every output
GUARD = 0xA5
LARGE_NBYTES = [255, 256, 257, 1000, 4095, 4096, 4097, 4161, 12345]
WIDE = {torch.uint8: np.uint8, torch.uint16: np.uint16, torch.uint32: np.uint32}
WIDE[torch.int32] = np.int32


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
    gatherer = make_gatherer(columns, 1)
    outputs, memories = zip(*(make_output(len(indices), c) for c in columns), strict=True)
    gatherer.submit(torch.tensor(indices, dtype=torch.int64), outputs)
    assert gatherer.wait() >= 0
    for column, output, memory in zip(columns, outputs, memories, strict=True):
        check(column, indices, output, memory)


def raised(columns, indices):
    """Return the text of the error that the indices cause."""
    gatherer = make_gatherer(columns, 1)
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


@pytest.mark.parametrize("nbytes", [4095, 4096, 4097, 5000, 12345])
def test_batches_larger_than_the_caches_are_copied(backend, nbytes):
    """They take another way past 4 MiB; rows of an odd length have every alignment."""
    columns = [same_dtype(random_bytes(7, nbytes)), Column(np.ones((7, 60), "u2"), torch.int64)]
    for count in (1030, 300):
        gather(columns, rng().integers(-7, 7, count).tolist())


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [1, 5, 64, 700])
def test_windows_may_lie_in_several_arrays(backend, dtype, size):
    """Every window of the sequence, also where the arrays are shorter than a window."""
    numpy_dtype = np.dtype(str(dtype).removeprefix("torch."))
    tokens = rng().integers(0, 250, 2000, np.uint8).astype(numpy_dtype)
    for cuts in ([], [1999], [1000, 1001, 1002, 1010, 1900], range(2, 2000, 3)):
        parts = np.split(tokens, cuts)
        for step in (1, size):
            expected = sliding_window_view(tokens, size)[::step]
            columns = [
                Column(Windows(parts, step, expected.shape), d) for d in {torch.int64, dtype}
            ]
            indices = rng().integers(-len(expected), len(expected), 60)
            gatherer = make_gatherer(columns, 1)
            outputs = [make_output(60, column) for column in columns]
            gatherer.submit(torch.from_numpy(indices), [output for output, _ in outputs])
            gatherer.wait()
            for column, output in zip(columns, outputs, strict=True):
                check(column._replace(array=expected), indices, *output)
            assert str(len(expected)) in raised(columns, [0, len(expected)])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_tokens_may_begin_at_an_odd_address(backend, dtype):
    tokens = np.frombuffer(random_bytes(1 + 40 * np.dtype(dtype).itemsize).data, dtype, offset=1)
    gather([Column(tokens.reshape(8, 5), torch.int64)], [7, 0, 3])


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8),
        *(torch.uint16, torch.uint32, torch.uint64),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6,), (6, 5)], ids=str)
def test_every_dtype_is_copied_bit_by_bit(backend, dtype, shape):
    array = torch.from_numpy(random_bytes(*shape[:-1], shape[-1] * dtype.itemsize))
    array = (array % 2).view(dtype) if dtype is torch.bool else array.view(dtype)
    column = Column(array, dtype)
    output, _ = make_output(3, column)
    gatherer = make_gatherer([column], 1)
    gatherer.submit(torch.tensor([5, 0, -2]), [output])
    gatherer.wait()
    bits = array.view(6, -1).view(torch.uint8)[[5, 0, 4]]
    assert torch.equal(output.view(3, -1).view(torch.uint8), bits)


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
    gatherer = make_gatherer([column], depth)
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
    gatherer = make_gatherer([column], 3)
    jobs = [([n, 19] if n != 1 else [n, 20], *make_output(2, column)) for n in range(3)]
    for indices, output, _ in jobs:
        gatherer.submit(torch.tensor(indices), [output])
    gatherer.wait()
    with pytest.raises(IndexError, match="index 20 is out of bounds"):
        gatherer.wait()
    gatherer.wait()
    check(column, *jobs[0])
    check(column, *jobs[2])


def test_a_pass_that_is_left_early_has_split_few_of_its_batches(monkeypatch):
    """All 100,000 at once took 20 ms, and an object for each."""
    split, made = torch.split, []
    monkeypatch.setattr(torch, "split", lambda *args: made.append(split(*args)) or made[-1])
    data = torch.utils.data.TensorDataset(torch.arange(100_000))
    for options in ({}, {"shuffle": True}):
        next(iter(fastamp.DataLoader(data, 1, **options)))
    assert 2 <= sum(map(len, made)) <= 1000
    monkeypatch.undo()
    data = torch.utils.data.TensorDataset(torch.arange(1034))
    for drop_last in (False, True):
        batches = fastamp.DataLoader(data, 3, drop_last=drop_last)
        expected = [[*range(i, min(i + 3, 1034))] for i in range(0, 1034, 3)]
        assert [b.tolist() for (b,) in batches] == expected[: len(expected) - drop_last]
