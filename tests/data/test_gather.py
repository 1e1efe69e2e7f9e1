"""The gather of long rows: bit-identical to index_select, at any size, and in leased memory."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.loading import assert_same, make_array
from torch.utils.data import TensorDataset

import fastamp
from fastamp._ops import core_for
from fastamp.data import sources
from fastamp.data.memory import Memory


@pytest.fixture
def core():
    found = core_for(torch.device("cpu"))
    if found is None:
        pytest.skip("there is no compiled core")
    return found


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 63, 64, 65, 4095, 4097, 300_001])
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_every_size_are_copied(core, nbytes, count, threads):
    array = make_array("u1", 9, nbytes + 1)[:, 1:]  # at an odd address, with gaps between rows
    array, rows = torch.from_numpy(array), torch.randint(9, (count,))
    out = torch.zeros(count, nbytes, dtype=torch.uint8)
    core.gather([array], rows, [out], threads)
    assert torch.equal(out, array[rows])


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "i4"])
@pytest.mark.parametrize("length", [0, 1, 33, 300])
def test_integers_become_int64(core, dtype, length):
    nbytes = make_array("u1", 1 + 50 * np.dtype(dtype).itemsize + 4 * length)[1:]  # an odd address
    tokens = np.frombuffer(nbytes.tobytes(), dtype)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, max(length, 1))[:, :length]
    out, again = (torch.zeros(3, length, dtype=torch.int64) for _ in range(2))
    array = torch.from_numpy(windows.copy())
    core.gather([array, array], torch.tensor([3, 0, 9]), [out, again], 2)
    assert out.tolist() == again.tolist() == windows[[3, 0, 9]].tolist()


@pytest.mark.parametrize("bad", [-1, 9, 10**12])
def test_a_row_that_does_not_exist_is_named_and_nothing_is_copied(core, bad):
    array, out = torch.ones(9, 5), torch.zeros(3, 5)
    with pytest.raises(IndexError, match=f"index {bad} is out of bounds for dimension 0 with size"):
        core.gather([array], torch.tensor([0, 1, bad]), [out], 2)
    assert not out.any()


DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.uint16, torch.complex128)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_batches_are_those_of_small_ones(dtype, backend):
    """Rows from 4 KiB on, in batches from 4 MiB on, are the core's."""
    x, y = make_array(dtype, 40, 3, 50_000), torch.arange(40)
    loader = fastamp.DataLoader(TensorDataset(x, y), 32, shuffle=True, seed=1)
    for rows, numbers in loader:
        assert_same(rows, torch.stack([x[i] for i in numbers]))


def test_the_core_gathers_windows_of_tokens_and_large_batches_in_one_call(core, monkeypatch):
    calls = []
    watched = SimpleNamespace(gather=lambda *a: calls.append(len(a[0])) or core.gather(*a))
    monkeypatch.setattr(sources, "core_for", lambda _: watched)
    list(fastamp.DataLoader(fastamp.TokenDataset(np.arange(33, dtype="u2"), 4), 8))
    list(fastamp.DataLoader(TensorDataset(torch.ones(32, 50_000), torch.arange(32)), 32))
    assert calls == [2, 1]


def test_a_batch_in_use_is_never_written_and_its_memory_comes_back(monkeypatch, backend):
    monkeypatch.setattr(sources, "LEASED_NBYTES", 1)
    monkeypatch.setattr("fastamp.data.memory.LEASED_NBYTES", 1)
    x = torch.rand(64, 3, requires_grad=False)
    loader = fastamp.DataLoader(TensorDataset(x), 4)
    kept = [batch for (batch,) in loader]
    assert torch.equal(torch.cat(kept), x)
    part = kept[3][1:2].view(-1)  # a view alone holds the memory
    address = kept[3].data_ptr()
    del kept
    addresses = {batch.data_ptr() for (batch,) in loader}
    assert address not in addresses
    assert len(addresses) <= 3
    assert torch.equal(part, x[13])


def free_nbytes(memory):
    return sum(lease.memory.nbytes for lease in memory.free)


def test_a_graph_that_saved_a_batch_holds_its_memory(monkeypatch):
    monkeypatch.setattr("fastamp.data.memory.LEASED_NBYTES", 1)
    memory, weight = Memory(), torch.ones(4, requires_grad=True)
    saved = memory.allocate((4,), torch.float32).fill_(2.0)
    loss = (weight * saved).sum()
    del saved
    assert free_nbytes(memory) == 0
    memory.allocate((4,), torch.float32).fill_(9.0)
    loss.backward()
    assert torch.equal(weight.grad, torch.full((4,), 2.0))
    del loss
    gc.collect()
    assert free_nbytes(memory) == 32


def test_few_buffers_wait_and_none_beyond_max_bytes(monkeypatch):
    monkeypatch.setattr("fastamp.data.memory.LEASED_NBYTES", 1)
    memory = Memory(max_bytes=100)
    made = [memory.allocate((size,), torch.uint8) for size in range(80, 102)]
    del made
    assert free_nbytes(memory) <= 400
    taken = memory.allocate((90,), torch.uint8)
    assert (taken.numel(), free_nbytes(memory) <= 100) == (90, True)
    few = Memory()
    few.allocate((80,), torch.uint8)
    larger = few.allocate((81,), torch.uint8)
    smaller = few.allocate((50,), torch.uint8)
    assert (larger.numel(), smaller.numel(), free_nbytes(few)) == (81, 50, 80)


@pytest.mark.parametrize("threads", [2, 16, 64])
def test_a_loader_holds_one_batch(threads):
    data, held = torch.zeros(40, 1 << 20, dtype=torch.uint8), []
    torch.set_num_threads(threads)
    loader = fastamp.DataLoader(TensorDataset(data), 4)
    allocate = Memory.allocate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "allocate", lambda *args: held.append(args) or allocate(*args))
        batches = iter(loader)
        next(batches)
        assert len(held) == 1
        assert free_nbytes(loader._fastamp.memory) == 4 << 20  # of the batch that was dropped


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("collate_fn", [None, fastamp.BatchCollator()])
def test_item_batches_are_leased_above_32_mib_alone(collate_fn):
    for count, leased in ((32, 0), (33, 1)):
        data = [torch.zeros(1 << 20, dtype=torch.uint8)] * count
        loader = fastamp.DataLoader(data, count, collate_fn=collate_fn)
        next(iter(loader))
        assert len(loader._fastamp.memory.free) == leased


@pytest.mark.usefixtures("core")
def test_the_core_collates_small_arrays_and_torch_what_it_collates_faster(monkeypatch):
    monkeypatch.setattr("fastamp.data.collate.default_collate", lambda _: "torch's")
    for leaf, by_torch in ((np.ones(8192), 0), (np.ones(8193), 1), (torch.ones(4), 1), (1.0, 1)):
        for collate in (fastamp.BatchCollator(), fastamp.BatchCollator().make_default):
            assert isinstance(collate([leaf] * 2), str) == by_torch


def test_a_write_at_each_step_makes_no_batch_twice(monkeypatch):
    made, make = [], sources.Gathered.make
    monkeypatch.setattr(sources.Gathered, "make", lambda *args: made.append(args[3]) or make(*args))
    monkeypatch.setattr(torch, "as_tensor", None)  # nobody reads the rows one by one
    data, x = torch.zeros(40, 3), torch.zeros(4, 3)
    for number, (rows,) in enumerate(fastamp.DataLoader(TensorDataset(data), 4)):
        assert torch.equal(rows, x + number)
        data += 1
    assert made == [*range(0, 40, 4)]


def test_a_gathered_batch_takes_at_most_eight_calls_of_python():
    data = TensorDataset(torch.ones(40), torch.ones(40, 3))
    batches = iter(fastamp.DataLoader(data, 4, shuffle=True))
    next(batches)
    calls = []

    def note(frame, event, _):
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        next(batches)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 8, calls
