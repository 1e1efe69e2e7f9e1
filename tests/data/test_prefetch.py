"""What fastamp.prefetch promises: the same batches, no further ahead than asked, no thread left."""

from __future__ import annotations

import collections
import gc
import subprocess
import sys
import threading
import typing
import weakref

import pytest
import torch
from support.loading import Rows, assert_same, ends
from support.waits import sync_refused

import fastamp
from fastamp.data.structure import map_tensors


class Pair(typing.NamedTuple):
    x: torch.Tensor
    label: str


BATCHES = [
    torch.arange(6).reshape(2, 3),
    {"x": torch.ones(2), "name": ["a", "b"], "n": {"y": torch.zeros(1)}},
    collections.OrderedDict(z=torch.ones(1), a=torch.zeros(2, dtype=torch.int32)),
    (torch.ones(3), 1, None),
    [torch.ones(3), "text", b"bytes"],
    Pair(torch.ones(2), "label"),
    [Pair(torch.ones(2), "label"), {"deep": (torch.zeros(1),)}],
    "no tensor",
    None,
    torch.empty(0, 4),
]
DEVICES = [None, "cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fastamp_0")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert ends(lambda: not threads())


def to(device, batch):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device or "cpu"), batch)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("thread", [False, True])
def test_batches_keep_order_values_and_types(thread, device):
    ahead = fastamp.prefetch(BATCHES, device, thread=thread)
    for _ in range(2):  # every iter is a new pass
        assert_same(list(ahead), to(device, BATCHES))
    assert len(ahead) == len(BATCHES)


@pytest.mark.parametrize("device", [*DEVICES, "meta"], indirect=True)
def test_the_sizes_of_a_packed_sequence_stay_on_the_host(device):
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    (batch,) = fastamp.prefetch([packed], device)
    assert batch.data.device.type == (device or "cpu")
    assert batch.batch_sizes.tolist() == [2, 2, 1]


def test_a_batch_on_the_cpu_is_the_producers_own():
    batch = {"x": torch.ones(2)}
    (same,) = fastamp.prefetch([batch])
    assert same is batch
    (same,) = fastamp.prefetch([batch], "cpu")
    assert same["x"].data_ptr() == batch["x"].data_ptr()


def test_a_length_is_there_where_the_iterable_has_one():
    assert len(fastamp.prefetch(fastamp.DataLoader(torch.ones(10), 3))) == 4
    with pytest.raises(TypeError, match="'generator' has no len"):
        len(fastamp.prefetch(x for x in ()))


class BrokenError(Exception):
    def __init__(self, one, *, two):
        super().__init__(one)
        self.two = two


@pytest.mark.parametrize("thread", [False, True])
def test_the_producers_own_exception_is_raised_in_its_place(thread):
    error = BrokenError("broken", two=2)

    def produce_and_fail():
        yield 1
        yield 2
        raise error

    iterator = iter(fastamp.prefetch(produce_and_fail(), thread=thread))
    assert [next(iterator), next(iterator)] == [1, 2]
    with pytest.raises(BrokenError) as caught:
        next(iterator)
    assert caught.value is error
    assert "produce_and_fail" in [entry.name for entry in caught.traceback]
    with pytest.raises(StopIteration):
        next(iterator)
    assert ends(lambda: not threads())


def counted(ended):
    try:
        while True:
            yield torch.zeros(3)
    finally:
        ended.append(True)


def break_off(iterator, ended):
    for batch in iterator:
        assert batch.shape == (3,)
        break


def drop(iterator, ended):
    next(iterator)
    assert len(threads()) == 1


def never_begin(iterator, ended):
    assert not threads()


@pytest.mark.parametrize("consume", [break_off, drop, never_begin])
def test_the_thread_ends_with_its_pass(consume):
    ended = []
    iterator = iter(fastamp.prefetch(counted(ended), thread=True))
    consume(iterator, ended)
    del iterator
    assert ends(lambda: not threads())
    assert len(ended) == 1 or (consume is never_begin and not ended)  # the generator, too


def test_batches_are_not_held_once_delivered():
    class Batch:
        pass

    iterator = iter(fastamp.prefetch((Batch() for _ in range(5)), thread=True))
    alive = weakref.WeakSet()
    for batch in iterator:
        alive.add(batch)
        del batch
        assert len(alive) <= 2
    assert ends(lambda: not alive)


@pytest.mark.cuda
def test_the_device_that_is_current_in_the_caller_is_meant(device):
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        ahead = fastamp.prefetch([torch.ones(3)], device)
        (batch,) = ahead
    assert batch.device.index == last
    (batch,) = ahead  # also after the caller has gone back to another device
    assert batch.device.index == last


def busy(elapsed_ms=20):
    torch.cuda._sleep(int(elapsed_ms * 1e6))


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("own_stream", [False, True])
def test_values_are_right_behind_a_long_kernel(pinned, own_stream, device):
    """Batches are read late, by kernels that wait; later ones are copied into freed memory."""

    def produce():
        for i in range(200):
            batch = torch.full((1000,), i, dtype=torch.float32)
            yield batch.pin_memory() if pinned else batch

    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    sums = []
    with torch.cuda.stream(stream):
        for i, batch in enumerate(fastamp.prefetch(produce(), device)):
            if i % 20 == 0:
                busy()
            sums.append(torch.stack([batch.min(), batch.max()]))
            del batch
        expected = torch.arange(200, dtype=torch.float32, device=device)
        assert torch.equal(torch.stack(sums), expected[:, None].expand(200, 2))


@pytest.mark.cuda
@pytest.mark.parametrize("through", ["prefetch", "DataLoader"])
def test_the_host_does_not_wait(through, device):
    x = torch.arange(4000, dtype=torch.float32).reshape(1000, 4)
    if through == "DataLoader":
        batches = fastamp.DataLoader(x, 10, device=device)
    else:
        batches = fastamp.prefetch(fastamp.DataLoader(x, 10), device)
    list(batches)  # the first pinned memory is allocated
    torch.cuda.synchronize()
    iterator = iter(batches)
    with sync_refused():
        taken = []
        busy(200)
        taken.extend(next(iterator) for _ in range(20))
        assert not torch.cuda.current_stream().query()  # the kernel still runs
    assert torch.equal(torch.cat(taken).cpu(), x[:200])


def test_a_process_ends_while_a_pass_is_alive():
    code = """
import torch, fastamp

def products():
    while True:
        yield torch.ones(100, 100) @ torch.ones(100, 100)

batches = iter(fastamp.prefetch(products(), thread=True))
next(batches)
"""
    command = [sys.executable, "-c", code]  # an interpreter of its own, which ends as users' do
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


class Resumable:
    """A loader with a state, as torchdata's, which knows what was taken, not what was delivered."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 10:
            self.place += 1
            yield torch.tensor(self.place)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def test_a_resume_behind_prefetch_loses_no_batch_of_another_loader():
    wrapped = fastamp.prefetch(Resumable())
    batches = iter(wrapped)
    seen = [int(next(batches)) for _ in range(3)]
    state = wrapped.state_dict()
    resumed = fastamp.prefetch(Resumable())
    resumed.load_state_dict(state)
    assert [*seen, *map(int, resumed)] == [*range(1, 11)]


@pytest.mark.parametrize(
    "source", [Resumable(), fastamp.DataLoader(torch.ones(3))], ids=["other", "fastamp"]
)
def test_a_thread_for_a_loader_with_a_state_is_refused(source):
    with pytest.raises(ValueError, match="thread: expected False for an iterable with a state"):
        fastamp.prefetch(source, thread=True)


class Graph:
    """Moves itself to a device, as PyG's and DGL's batches."""

    def __init__(self, x, device="cpu"):
        self.x, self.device = x, device

    def to(self, device, **_):
        return Graph(self.x, str(device))


def test_objects_that_move_themselves_are_moved():
    batch = {"graph": Graph(torch.ones(2)), "list": [Graph(torch.ones(1))], "text": "a"}
    (moved,) = fastamp.prefetch([batch], "meta")
    assert moved["graph"].device == moved["list"][0].device == "meta"
    loader = fastamp.DataLoader(Rows(4, lambda i: i), 4, collate_fn=Graph, device="meta")
    assert next(iter(loader)).device == "meta"
    assert map_tensors(lambda t: t + 1, batch)["graph"] is batch["graph"]


def test_prefetch_without_a_copy_takes_no_batch_before_the_loop_asks():
    """A generator may write each batch into the same memory."""

    def write_into_one():
        batch = torch.zeros(1)
        for number in range(3):
            yield batch.fill_(number)

    assert [batch.item() for batch in fastamp.prefetch(write_into_one(), "cpu")] == [0, 1, 2]
