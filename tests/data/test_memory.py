"""A dataset whose memory or file changes during a pass: torch's values or an error, no crash."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from support.loading import HOST, check
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import fastamp

# Each case runs in a child of one process, which a read of freed memory would end.
CASES = """
import ctypes, faulthandler, json, mmap, os, sys, tempfile, warnings
import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader, Subset, TensorDataset
import fastamp
from support.loading import assert_same

N, BATCH = 64, 4
torch.set_num_threads(3)
warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # torch's, of a map

def rows(seed):  # 64 KB each: freed memory of this size is given back to the system
    return torch.arange(N * 16384, dtype=torch.int32).reshape(N, 16384) + seed

def replace(x):
    x.data = rows(7)

def resize(x):
    x.resize_(2 * N, 16384)
    x[N:] = 1

def empty(x):
    x.untyped_storage().resize_(0)

def shrink(x):
    x.resize_(20, 16384)

def swap(x):
    torch.utils.swap_tensors(x, rows(7))

changes = {
    "share_memory_": lambda x: x.share_memory_(),
    "data": replace,
    "resize_": resize,
    "storage is emptied": empty,
    "shrinks": shrink,
    "swap_tensors": swap,
}

def batches(make, x, change):
    found = []
    try:
        for count, batch in enumerate(make(x)):
            found.append([part.clone() for part in batch] if type(batch) is list else batch.clone())
            if count == 2:
                change(x)
    except (RuntimeError, IndexError) as error:
        found.append(type(error).__name__)
    return found

def compare(change, wrap):
    def loader(kind, **options):
        return lambda x: kind(wrap(x), BATCH, **options)

    expected = batches(loader(TorchDataLoader), rows(0), change)
    assert_same(batches(loader(fastamp.DataLoader), rows(0), change), expected)
    # The thread that gathers ahead may be in the middle of a copy, which only the core survives.
    if fastamp.backends()[0] != "fallback":
        ahead = batches(loader(fastamp.DataLoader, device="meta"), rows(0), change)
        assert len(ahead) >= len(expected)

def cut(nbytes, view=lambda x: x):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.bin")
        rows(0).numpy().tofile(path)
        mapped = np.memmap(path, np.int32, "r", shape=(N, 16384))
        iterator = iter(fastamp.DataLoader(view(mapped), BATCH))
        assert len(next(iterator)) in (1, BATCH)
        os.truncate(path, nbytes)
        check_cut(iterator)

def check_cut(iterator):
    errors = 0
    while True:
        try:
            next(iterator)
        except BufferError as error:
            assert "its file was truncated" in str(error)
            errors += 1
        except StopIteration:
            break
    assert errors > 1  # the first may have been copied before

def cut_tokens(random_offsets):
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in "abc"]
        for path in paths:
            rows(0)[:16].numpy().tofile(path)
        dataset = fastamp.TokenDataset(paths, 16384, np.int32, 0, random_offsets)
        iterator = iter(fastamp.DataLoader(dataset, 4, seed=1))
        next(iterator)
        os.truncate(paths[1], 4096 * 10 + 5)
        check_cut(iterator)

def chain():
    # A fault that is none of the loader's goes to who asked for it before.
    faulthandler.enable()
    list(fastamp.DataLoader(rows(0), BATCH))
    ctypes.string_at(0)

def gather_bytes(source, target, num_bytes):
    from types import SimpleNamespace
    from fastamp import _native
    column = [(source.ctypes.data, num_bytes)], 1, num_bytes, num_bytes, 0, None
    gatherer = _native.Gatherer([column], 1, 1, source)
    output = SimpleNamespace(data_ptr=lambda: target.ctypes.data)
    gatherer.submit(torch.tensor([0]), [output])
    gatherer.wait()

def write_wrongly(num_bytes):
    # Stands for a bug of the core: an output where nothing can be written.
    faulthandler.enable()
    target = np.frombuffer(mmap.mmap(-1, num_bytes, prot=mmap.PROT_READ), np.uint8)
    gather_bytes(np.zeros(num_bytes, np.uint8), target, num_bytes)

def read_cut_after(change):
    # disable() restores the handlers that enable() found, and so removes those of the core.
    faulthandler.enable()
    gather_bytes(np.zeros(1, np.uint8), np.zeros(1, np.uint8), 1)
    faulthandler.disable()
    change()
    for num_bytes in (1000, 100_000):
        with tempfile.TemporaryFile() as file:
            file.truncate(num_bytes)
            mapped = mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ)
            file.truncate(0)
        source = np.frombuffer(mapped, np.uint8)
        try:
            gather_bytes(source, np.zeros(num_bytes, np.uint8), num_bytes)
        except BufferError as error:
            assert "its memory is gone" in str(error)
        else:
            raise AssertionError("no error")

wraps = {"tensor": lambda x: x, "pair": lambda x: TensorDataset(x, torch.arange(N)),
         "subset": lambda x: Subset(x, range(N - 1, -1, -1))}
def of_tensors(change):
    for wrap in wraps.values():
        compare(changes[change], wrap)

cases = {name: (lambda name=name: of_tensors(name)) for name in changes}
cases["file is emptied"] = lambda: cut(0)
cases["file is cut"] = lambda: cut(4096 * 40 + 100)
cases["file of a view"] = lambda: cut(0, view=lambda m: fastamp.ArrayDataset({"a": m.T.T}))
cases["file of a tensor"] = lambda: cut(0, view=torch.from_numpy)
cases["token files"] = lambda: cut_tokens(False)
cases["random token files"] = lambda: cut_tokens(True)
cases["somebody else's"] = chain
cases["the core's, small"] = lambda: write_wrongly(1000)
cases["the core's, large"] = lambda: write_wrongly(100_000)
cases["disabled"] = lambda: read_cut_after(lambda: None)
cases["enabled again"] = lambda: read_cut_after(faulthandler.enable)

results = {}
for name in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            cases[name]()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    results[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(results))
"""
OF_TENSORS = ["share_memory_", "data", "resize_", "storage is emptied", "shrinks", "swap_tensors"]
OF_FILES = ["file is emptied", "file is cut", "file of a view", "file of a tensor", "token files"]
OF_FILES += ["random token files"]
OTHERS_FAULTS = ["somebody else's", "the core's, small", "the core's, large"]
COMPILED = [*OF_FILES, *OTHERS_FAULTS, "disabled", "enabled again"]


@functools.cache
def results(backend):
    names = [*OF_TENSORS, *(COMPILED if backend == "cpu" else [])]
    return json.loads(check(CASES, *names, backend=backend))


@pytest.mark.parametrize("change", OF_TENSORS)
def test_a_tensor_that_gets_other_memory_gives_what_torch_gives(change, backend):
    assert results(backend)[change] == 0


@pytest.mark.parametrize("width", [10, 100_000])
def test_what_is_written_into_a_tensor_is_in_the_next_batch(width, backend):
    """Also in a column that is small beside the others, and what others have begun before."""

    def read(loader_type):
        x, y, seen = torch.zeros(12, width), torch.zeros(12), []
        for rows, labels in loader_type(TensorDataset(x, y), 2):
            seen.append((rows.unique().tolist(), labels.tolist()))
            (x if len(seen) % 2 else y).add_(1)
        return seen

    assert read(fastamp.DataLoader) == read(TorchDataLoader)


def test_what_is_written_into_an_inference_tensor_is_in_the_next_batch(backend):
    """It has no version counter, so nothing is gathered ahead."""

    def read(loader_type):
        with torch.inference_mode():
            x, seen = torch.zeros(12, 100_000), []
            for (rows,) in loader_type(TensorDataset(x), 2):
                seen.append(rows.unique().tolist())
                x.add_(1)
        return seen

    assert read(fastamp.DataLoader) == read(TorchDataLoader)


def test_an_array_cannot_be_resized_during_a_pass(backend):
    array = np.arange(64)
    batches = iter(fastamp.DataLoader(array, 4))
    next(batches)
    with pytest.raises(ValueError, match="cannot resize"):
        array.resize(128)


@pytest.mark.parametrize("case", OF_FILES)
def test_a_mapped_file_that_is_cut_is_an_error(case, compiled):
    assert results(compiled)[case] == 0


@pytest.mark.parametrize("change", ["disabled", "enabled again"])
def test_a_cut_file_is_an_error_also_after_faulthandler_is(change, compiled):
    assert results(compiled)[change] == 0


@pytest.mark.skipif(HOST != "cpu", reason="needs the compiled core")
@pytest.mark.parametrize("case", OTHERS_FAULTS)
def test_a_fault_elsewhere_still_ends_the_process(case):
    assert results("cpu")[case] == -11
