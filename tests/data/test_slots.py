"""Memory of batches: leased while anybody looks into it, under a cap, steady over many epochs."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from support.loading import Rows, assert_same, check, make_array
from torch.utils.data import TensorDataset

import fastamp
from fastamp.data import slots as slots_module
from fastamp.data.slots import Slots

FLOATS = (1024, torch.float32)
NBYTES = 4096


@pytest.fixture
def reused(monkeypatch):
    """Lease small tensors too."""
    monkeypatch.setattr(slots_module, "_REUSE_NBYTES", NBYTES)


def allocate(slots, shape=(1024,), dtype=torch.float32):
    return slots.allocate(shape, dtype)


@pytest.mark.parametrize("shape", [(1 << 18,), (512, 1, 512), (3, 1 << 18, 2)])
def test_a_leased_batch_is_a_tensor_of_its_own(shape):
    rows = torch.zeros(shape[0], *shape[1:])
    with torch.no_grad():
        (batch,) = next(iter(fastamp.DataLoader(TensorDataset(rows), shape[0])))
    assert batch._base is None
    assert (batch.shape, batch.stride()) == (rows.shape, rows.stride())
    batch.detach_()
    weight = torch.ones((), requires_grad=True)
    batch.add_(1).mul_(weight)  # "a view was created in no_grad mode", if it were one
    batch.sum().backward()
    assert weight.grad == batch.numel()
    with pytest.raises(RuntimeError, match="not resizable"):
        batch.detach().resize_(2 * batch.numel())


@pytest.mark.usefixtures("reused")
@pytest.mark.parametrize(
    "look",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[5:9],
        lambda tensor: tensor.view(torch.uint8)[-1:],
        lambda tensor: tensor.view(32, 32).T[3],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.numpy()[::2],
        lambda tensor: torch.from_numpy(tensor.numpy()),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: memoryview(tensor.numpy()),
        torch.nn.Parameter,
    ],
    ids=[
        "itself",
        "slice",
        "bytes",
        "transposed",
        "detached",
        "numpy",
        "back",
        "storage",
        "memoryview",
        "parameter",
    ],
)
def test_a_slot_returns_when_the_last_view_has_died(look):
    slots = Slots()
    tensor = allocate(slots)
    address = tensor.data_ptr()
    view = look(tensor)
    del tensor
    gc.collect()
    assert allocate(slots).data_ptr() != address
    del view
    assert address in {(first := allocate(slots)).data_ptr(), allocate(slots).data_ptr()}
    assert first.is_contiguous()
    assert slots.held_nbytes == 2 * NBYTES


@pytest.mark.usefixtures("reused")
def test_a_slot_returns_when_the_last_graph_that_saved_it_has_died():
    slots = Slots()
    batch = allocate(slots).fill_(3)
    address = batch.data_ptr()
    weight = torch.ones(1024, requires_grad=True)
    loss = (weight * batch).sum()
    del batch
    other = allocate(slots).fill_(9)
    assert other.data_ptr() != address
    loss.backward()
    assert torch.equal(weight.grad, torch.full((1024,), 3.0))
    del loss
    assert allocate(slots).data_ptr() == address


@pytest.mark.usefixtures("reused")
def test_slots_are_used_again_in_any_shape_and_dtype():
    slots = Slots()
    addresses = set()
    for shape, dtype in [FLOATS, ((32, 64), torch.int16), ((2, 256), torch.float64)] * 5:
        tensor = slots.allocate(shape if isinstance(shape, tuple) else (shape,), dtype)
        assert tensor.dtype == dtype
        assert tensor.shape == torch.Size(shape if isinstance(shape, tuple) else (shape,))
        tensor.zero_()
        addresses.add(tensor.data_ptr())
        del tensor
    assert len(addresses) == 1
    assert slots.held_nbytes == NBYTES


@pytest.mark.usefixtures("reused")
def test_beyond_the_cap_memory_is_fresh():
    slots = Slots(max_bytes=3 * NBYTES)
    kept = [allocate(slots).fill_(i) for i in range(10)]
    assert slots.held_nbytes == 3 * NBYTES
    assert len({tensor.data_ptr() for tensor in kept}) == 10
    assert [int(tensor[0]) for tensor in kept] == [*range(10)]
    del kept
    assert slots.held_nbytes <= 3 * NBYTES
    allocate(slots, (4096,))
    assert slots.held_nbytes <= 3 * NBYTES


def test_small_tensors_are_not_leased():
    slots = Slots()
    nbytes = slots_module._REUSE_NBYTES
    assert nbytes == 1 << 20
    allocate(slots, (nbytes - 1,), torch.uint8)
    assert slots.held_nbytes == 0
    allocate(slots, (nbytes,), torch.uint8)
    assert slots.held_nbytes == nbytes


@pytest.mark.usefixtures("reused")
def test_a_lease_outlives_the_slots():
    slots = Slots()
    tensor = allocate(slots).fill_(4)
    gone = weakref.ref(slots)
    del slots
    assert gone() is None
    assert torch.equal(tensor, torch.full((1024,), 4.0))


@pytest.mark.usefixtures("reused")
def test_slots_come_back_from_other_threads():
    slots = Slots()
    errors = []

    def use(number):
        for _ in range(300):
            tensor = allocate(slots).fill_(number)
            if not bool((tensor == number).all()):
                errors.append(number)

    workers = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    assert slots.held_nbytes <= 8 * NBYTES  # a thread drops one when it has the next


@pytest.mark.parametrize("shape", [(), (0,), (0, 5000), (3, 0), (1,)])
def test_tensors_of_any_size_are_made(shape):
    tensor = Slots().allocate(shape, torch.complex64)
    assert tensor.shape == shape
    assert tensor.dtype == torch.complex64
    assert tensor.is_contiguous()


def test_batches_of_workers_lie_in_shared_memory(backend):
    loader = fastamp.DataLoader(Rows(8, lambda i: torch.full((3,), i)), 4, num_workers=1)
    batches = list(loader)
    assert all(batch.is_shared() for batch in batches)
    assert_same(torch.cat(batches)[:, 0], torch.arange(8))


@pytest.mark.cuda
def test_batches_for_cuda_are_gathered_into_pinned_memory(device):
    assert Slots(pinned=True).allocate((3,), torch.float32).is_pinned()
    x = make_array(torch.int32, 100, 3)
    (batch,) = fastamp.DataLoader(x, 100, pin_memory=True)
    assert batch.is_pinned()
    assert_same(torch.cat(list(fastamp.DataLoader(x, 9, device=device))).cpu(), x)


@pytest.mark.usefixtures("reused")
@pytest.mark.parametrize("kind", ["arrays", "python"])
def test_a_loader_uses_slots_again(kind, compiled):
    x = make_array(torch.int32, 64, 1024)
    dataset = TensorDataset(x) if kind == "arrays" else Rows(64, lambda i: (x[i],))
    loader = fastamp.DataLoader(dataset, 4)
    addresses, batches = [], []
    for (batch,) in loader:
        addresses.append(batch.data_ptr())
        batches.append(batch.clone())
        del batch
    assert len(set(addresses)) <= torch.get_num_threads() + 4 < len(addresses)
    assert_same(torch.cat(batches), x)
    kept = [batch for (batch,) in loader]
    assert len({batch.data_ptr() for batch in kept}) == 16
    assert_same(torch.cat(kept), x)


STEADY = """
import ctypes, gc, os, resource, sys
import torch
from torch.utils.data import TensorDataset
import fastamp
from fastamp.data import slots
from support.loading import Squares

# One arena: what threads leave behind in others is used again, but not by the next thread.
M_ARENA_MAX = -8
assert ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
if sys.argv[1] == "leased":
    slots._REUSE_NBYTES = 1

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for later is not ours
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def counts():
    with open("/proc/self/status") as file:
        threads = next(int(line.split()[1]) for line in file if line.startswith("Threads"))
    return threads, len(os.listdir("/proc/self/fd"))

X, Y = torch.zeros(1000, 500), torch.zeros(1000, dtype=torch.int64)
tokens = fastamp.TokenDataset(torch.zeros(5001, dtype=torch.uint8), 100)
torch.set_num_threads(3)
loaders = [
    fastamp.DataLoader(TensorDataset(X, Y), 100, shuffle=True, seed=1, max_bytes=10**6),
    fastamp.DataLoader(tokens, 16, shuffle=True),
    fastamp.DataLoader(Squares(20), 5, shuffle=True),
    fastamp.prefetch(fastamp.DataLoader(X, 500)),
]

def epochs(count, stop=None):
    for _ in range(count):
        for loader in loaders:
            for done, batch in enumerate(loader):
                if done == stop:
                    break

epochs(10)
before, counted = resident(), counts()
epochs(60)
grown = resident() / before - 1
assert abs(grown) < 0.01, f"grew by {grown:.2%} in 60 epochs"
epochs(150, stop=2)
grown = resident() / before - 1
assert abs(grown) < 0.01, f"grew by {grown:.2%} in 150 epochs that were broken off"
threads, files = counts()
# The pool starts its two threads when there is work for them; each pass of 210 would leave more.
assert threads <= counted[0] + 2, (threads, counted)
assert files == counted[1]

batches = [batch for _ in range(40) for batch in loaders[0]]
assert resident() > before + 75e6
del batches
assert resident() < before + 20e6, (resident() - before) / 1e6
"""


def test_memory_threads_and_files_are_steady(backend):
    check(STEADY, "fresh", backend=backend)


def test_memory_is_steady_where_it_is_leased(compiled):
    check(STEADY, "leased", backend=compiled)


WORKERS = """
import gc, os, threading, time
import fastamp
from support.loading import Squares

def counts():
    gc.collect()
    deadline = time.monotonic() + 30
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    children = os.popen(f"ps --ppid {os.getpid()} -o comm=").read().split()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), children.count("python")

loader = fastamp.DataLoader(Squares(40), 4, num_workers=2)
list(loader)
before = counts()
for _ in range(3):
    list(loader)
    next(iter(loader))
    for batch in fastamp.prefetch(loader):
        break
    del batch
assert counts() == before, (counts(), before)
"""


def test_workers_and_their_files_do_not_pile_up():
    check(WORKERS)
