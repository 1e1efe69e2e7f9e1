"""What BatchCollator promises: default_collate's results, and dataclasses."""

from __future__ import annotations

import collections
import dataclasses
import types

import numpy as np
import pytest
import torch
from support.loading import Point, Rows, Squares, assert_same
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

import fastamp
from fastamp._ops import core_for


class Subclass(torch.Tensor):
    pass


class ReadOnly(collections.abc.Mapping):
    """A mapping that cannot be built from a dict."""

    def __init__(self, a, b):
        self.items_ = {"a": a, "b": b}

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


def outcome(collate, samples):
    try:
        return collate(samples), None
    except Exception as error:  # noqa: BLE001 - which one is what is compared
        return None, type(error)


def assert_collates_as_torch(collate, samples):
    """Compare the result, or the type of the exception."""
    expected, expected_error = outcome(default_collate, samples)
    actual, error = outcome(collate, samples)
    assert error is expected_error
    if expected_error is None:
        assert_same(actual, expected)


ONE, TWO = torch.ones(2), torch.arange(6.0).reshape(2, 3)
# The leaf of sample i: layouts and kinds of tensors and arrays, numbers, and what differs.
LEAVES = {
    "tensor": lambda i: TWO + i,
    "scalar tensor": torch.tensor,
    "empty": lambda _: torch.empty(2, 0),
    "transposed": lambda i: (TWO + i).T,
    "strided": lambda i: torch.stack([ONE + i] * 2, -1)[..., 0],
    "expanded": lambda i: torch.tensor([i]).expand(3),
    "grad": lambda i: (ONE + i).requires_grad_(),
    "grad in one": lambda i: (ONE + i).requires_grad_(i == 1),
    "parameter": lambda i: torch.nn.Parameter(ONE + i),
    "subclass": lambda i: (ONE + i).as_subclass(Subclass),
    "conjugate": lambda i: torch.tensor([i + 1j]).conj(),
    "conjugate in one": lambda i: torch.tensor([1j]).conj() if i else torch.tensor([1j]),
    "negative": lambda i: torch.tensor([i + 1j]).conj().imag,
    "sparse": lambda i: (ONE + i).to_sparse(),
    "meta": lambda _: torch.ones(1, device="meta"),
    "array": lambda i: np.full((2, 3), i, "f4"),
    "scalar array": np.array,
    "array in Fortran's order": lambda i: np.asfortranarray(np.full((2, 3), i)),
    "array backwards": lambda i: np.arange(4)[::-1] + i if i else np.arange(4)[::-1],
    "half": lambda i: np.full(2, i, "f2"),
    "uint16": lambda i: np.full(2, i, "u2"),
    "big-endian": lambda i: np.full(2, i, ">f4"),
    "texts": lambda _: np.array(["a"]),
    "objects": lambda _: np.array([None]),
    "dates": lambda _: np.array(["2020-01-01"], "M8[s]"),
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i > 1,
    "NumPy's float": np.float32,
    "NumPy's int": np.int16,
    "NumPy's bool": lambda i: np.bool_(i > 1),
    "str": lambda i: "s" * i,
    "NumPy's str": lambda _: np.str_("s"),
    "bytes": bytes,
    "None": lambda _: None,
    "tensors of two dtypes": lambda i: ONE.to(torch.float64) if i else ONE,
    "tensors of two shapes": lambda i: torch.ones(2 + i),
    "arrays of two dtypes": lambda i: np.ones(2, "f8" if i else "f4"),
    "arrays of two shapes": lambda i: np.ones(2 + i),
    "numbers of two kinds": lambda i: 2.5 if i else 1,
    "a tensor and arrays": lambda i: np.ones(2) if i else ONE,
    "two lengths": lambda i: [1.0] * (1 + i),
    "two sets of keys": lambda i: {"a": 1, "b" * i: 2},
}
CONTAINERS = {
    "alone": lambda leaf, _: leaf,
    "dict": lambda leaf, i: {"a": leaf, 2: i},
    "OrderedDict": lambda leaf, i: collections.OrderedDict(a=leaf, b=i),
    "defaultdict": lambda leaf, _: collections.defaultdict(int, a=leaf),
    "UserDict": lambda leaf, i: collections.UserDict(a=leaf, b=i),
    "mapping proxy": lambda leaf, _: types.MappingProxyType({"a": leaf}),
    "ReadOnly": ReadOnly,
    "list": lambda leaf, i: [leaf, {"b": i}],
    "tuple": lambda leaf, i: (leaf, (i,)),
    "nothing": lambda _, i: {"a": {}, "b": (), "c": i},
    "UserList": lambda leaf, i: collections.UserList([leaf, i]),
    "deque": lambda leaf, i: collections.deque([leaf, i]),
    "namedtuple": Point,
    "nested": lambda leaf, i: {"x": [(leaf, i), Point(i, {"y": leaf})]},
}


@pytest.fixture(autouse=True)
def is_stacked(monkeypatch):
    """Have the core make every batch, as it makes large ones."""
    monkeypatch.setattr("fastamp.data.collate._REUSED_NBYTES", -1)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("size", [1, 3])
def test_batches_equal_default_collate(container, size, backend):
    for leaf in LEAVES.values():
        samples = [CONTAINERS[container](leaf(i), i) for i in range(size)]
        assert_collates_as_torch(fastamp.BatchCollator(), samples)


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental:UserWarning")
@pytest.mark.parametrize(
    "dtype",
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str),
    ids=str,
)
def test_every_dtype_that_torch_stacks(backend, dtype):
    try:
        samples = [torch.zeros(3, dtype=dtype) for _ in range(2)]
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch makes no such tensors here")
    assert_collates_as_torch(fastamp.BatchCollator(), samples)


def test_gradients_flow_to_the_samples(backend):
    samples = [torch.ones(2, requires_grad=True) for _ in range(3)]
    fastamp.BatchCollator()(samples).sum().backward()
    assert all(sample.grad.tolist() == [1, 1] for sample in samples)


def test_the_default_device_does_not_move_tensors(backend):
    with torch.device("meta"):
        cpu = [torch.ones(2, device="cpu")] * 2
        assert_collates_as_torch(fastamp.BatchCollator(), cpu)
        array = fastamp.BatchCollator()([np.ones(2)] * 2)  # torch's is on the default device
        assert array.device.type == ("meta" if backend == "fallback" else "cpu")


def test_arrays_that_must_not_be_written_are_taken(compiled):
    array = np.arange(3)
    array.flags.writeable = False
    assert fastamp.BatchCollator()([array, array]).tolist() == [[0, 1, 2]] * 2


def test_a_batch_is_a_copy(backend):
    sample = {"a": torch.zeros(2), "b": np.zeros(2)}
    batch = fastamp.BatchCollator()([sample])
    batch["a"] += 1
    batch["b"] += 1
    assert sample["a"].tolist() == sample["b"].tolist() == [0, 0]


def test_functions_registered_with_torch_are_used(backend, monkeypatch):
    class Custom:
        pass

    collate = fastamp.BatchCollator()
    with pytest.raises(TypeError, match="default_collate: batch must contain"):
        collate([{"a": Custom()}])
    added = torch_collate.default_collate_fn_map | {Custom: lambda batch, **_: len(batch)}
    monkeypatch.setattr(torch_collate, "default_collate_fn_map", added)
    assert collate([{"a": Custom()}, {"a": Custom()}]) == {"a": 2}


def test_samples_may_have_their_keys_in_another_order_or_more_of_them(backend):
    first = {"a": torch.ones(2), "b": torch.zeros(3)}
    for other in (
        {"b": torch.ones(3), "a": torch.zeros(2)},
        {"0": 0, **first},
        {"".join("a"): torch.zeros(2), "b": torch.ones(3)},
        collections.OrderedDict(b=torch.ones(3), a=torch.zeros(2)),
        collections.defaultdict(lambda: torch.zeros(3), a=torch.ones(2)),
        {"a": torch.ones(2)},
        {"a": torch.ones(1)},  # the shape of "a" is the first error
    ):
        assert_collates_as_torch(fastamp.BatchCollator(), [first, other, first])


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    nested: dict


@dataclasses.dataclass
class Outer:
    inner: Frozen
    name: str
    total: float = dataclasses.field(init=False)

    def __post_init__(self):
        self.total = float(self.inner.x.sum())


def test_dataclasses_keep_their_type(backend):
    outer = fastamp.BatchCollator()([Outer(Frozen(ONE * k, {"k": k}), "a") for k in range(2)])
    assert (type(outer), type(outer.inner), outer.name) == (Outer, Frozen, ["a", "a"])
    assert outer.inner.x.tolist() == [[0, 0], [1, 1]]
    assert outer.inner.nested["k"].tolist() == [0, 1]
    assert_same(outer.total, torch.tensor([0.0, 2.0], dtype=torch.float64))


def test_a_dataclass_that_torch_knows_as_a_mapping_stays_one(backend):
    @dataclasses.dataclass
    class Output(collections.OrderedDict):
        loss: float = 0.0

    output = Output()
    output["loss"] = 1.0
    assert_collates_as_torch(fastamp.BatchCollator(), [output, output])


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {"x": torch.full((3, 4), i), "a": np.full(2, i), "n": i, "ids": [i] * i, "e": []}


class Telling(fastamp.BatchCollator):
    """Says in the worker where the memory of its batches lies."""

    def __call__(self, samples):
        batch = super().__call__(samples)
        return {**batch, "shared": {k: batch[k].is_shared() for k in ("x", "a", "ids")}}


def test_workers_collate_into_shared_memory(backend):
    collate = Telling(pad={"ids": 0})
    loader = torch.utils.data.DataLoader(Samples(), 3, num_workers=2, collate_fn=collate)
    batches = list(loader)
    assert [batch["shared"] for batch in batches] == [{"x": True, "a": True, "ids": True}] * 2
    for number, batch in enumerate(batches):
        samples = [Samples()[i] for i in range(3 * number, 3 * number + 3)]
        expected = fastamp.BatchCollator(pad={"ids": 0})(samples)
        assert_same({k: v for k, v in batch.items() if k != "shared"}, expected)


def test_allocate_must_give_memory_of_the_right_size(compiled):
    core = core_for(torch.device("cpu"))
    for wrong in (torch.empty(5), torch.empty(2, 4).T[:3], torch.empty(4, 2, device="meta")):
        with pytest.raises(RuntimeError, match="allocate: expected a contiguous CPU tensor of 32"):
            core.stack([torch.ones(2)] * 4, torch.float32, lambda *_, w=wrong: w)


def test_samples_are_stacked_by_one_thread(monkeypatch):
    """A team of threads waits for one that the system has put aside."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: pytest.fail("a team is asked for"))
    dataset = Rows(4, lambda index: torch.full((1 << 18,), float(index)))
    assert next(iter(fastamp.DataLoader(dataset, 4)))[:, 0].tolist() == [0, 1, 2, 3]


def test_loaders_that_share_a_collator_have_memory_of_their_own():
    collate = fastamp.BatchCollator()
    memory = collate._memory
    loaders = [fastamp.DataLoader(Squares(8), 4, collate_fn=collate) for _ in range(2)]
    for loader in loaders:
        list(loader)
        assert loader.collate_fn is collate
    assert collate._memory is memory
