"""What BatchCollator promises: default_collate's results, and dataclasses."""

from __future__ import annotations

import collections
import dataclasses
import os
import types

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.loading import Point, Rows, Squares, assert_same
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

import fastamp
from fastamp._ops import core_for

SHARED = {name: fastamp.BatchCollator() for name in ("fallback", "cpu", "cuda")}


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


TENSORS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
TENSORS += [torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.int32]
ARRAYS = ["f4", "f8", "f2", "i8", "u1", "?", "u2", "c8", ">f4", "U3", "O", "M8[s]"]
SHAPES = st.sampled_from([(), (1,), (3,), (0,), (2, 3), (1, 4), (2, 0), (2, 1, 3)])


def tensor_like(layout):
    """Return a function that gives a tensor another layout or kind."""
    return {
        "plain": lambda t: t,
        "transposed": lambda t: t.transpose(0, -1) if t.ndim else t,
        "strided": lambda t: torch.stack([t, t], -1)[..., 0],
        "expanded": lambda t: t[..., None].expand(*t.shape, 2),
        "grad": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
        "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
        "subclass": lambda t: t.as_subclass(Subclass),
        "conjugate": lambda t: t.conj(),
        "negative": lambda t: t.conj().imag if t.is_complex() else t,
        "sparse": lambda t: t.to_sparse() if t.dtype == torch.float32 and t.ndim else t,
    }[layout]


def random_tensor(rng, dtype, shape):
    filled = torch.empty(shape, dtype=dtype)
    raw = rng.integers(0, 2 if dtype == torch.bool else 256, filled.nbytes, dtype=np.uint8)
    filled.untyped_storage().copy_(torch.from_numpy(raw).untyped_storage())
    return filled


def random_array(rng, dtype, shape, order):
    """Make an array with C's order, Fortran's, or a dimension that runs backwards."""
    array = np.asarray(rng.integers(0, 100, shape)).astype(dtype)
    if order == "-":
        return array[::-1] if shape and shape[0] > 1 else array
    return np.asarray(array, order=order)


LEAVES = st.one_of(
    st.builds(
        lambda dtype, shape, layout: (
            lambda rng: tensor_like(layout)(random_tensor(rng, dtype, shape))
        ),
        st.sampled_from(TENSORS),
        SHAPES,
        st.sampled_from(
            ["plain"] * 6
            + ["transposed", "strided", "expanded", "grad", "parameter", "subclass", "conjugate"]
            + ["negative", "sparse"]
        ),
    ),
    st.builds(
        lambda dtype, shape, order: lambda rng: random_array(rng, dtype, shape, order),
        st.sampled_from(ARRAYS),
        SHAPES,
        st.sampled_from("CCCF-"),
    ),
    st.sampled_from(
        [
            lambda rng: int(rng.integers(-5, 5)),
            lambda rng: float(rng.standard_normal()),
            lambda rng: bool(rng.integers(2)),
            lambda rng: np.float32(rng.standard_normal()),
            lambda rng: np.int16(rng.integers(9)),
            lambda rng: np.float64(rng.standard_normal()),
            lambda rng: np.bool_(rng.integers(2)),
            lambda rng: np.str_("s"),
            lambda rng: "s" * int(rng.integers(3)),
            lambda rng: bytes(int(rng.integers(3))),
            # What differs within a batch: the dtype, the shape, the kind.
            lambda rng: torch.ones(2, dtype=TENSORS[int(rng.integers(len(TENSORS)))]),
            lambda rng: torch.ones(int(rng.integers(2, 4))),
            lambda rng: np.ones(2, ARRAYS[int(rng.integers(4))]),
            lambda rng: np.ones(int(rng.integers(2, 4))),
            lambda rng: [1, 2.5, True][int(rng.integers(3))],
            lambda rng: [torch.ones(2), np.ones(2), torch.nn.Parameter(torch.ones(2))][
                int(rng.integers(3))
            ],
            lambda rng: {"a": 1, "b" * int(rng.integers(2)): 2},
            lambda rng: [1.0] * int(rng.integers(1, 3)),
            lambda rng: None,
            lambda rng: torch.ones(1, device="meta"),
        ]
    ),
)


def container(children):
    """Make containers of every kind out of what they hold."""
    two = st.tuples(children, children)
    kinds = [
        lambda a, b: {"a": a, 2: b},
        lambda a, b: {"b": a},
        lambda a, b: collections.OrderedDict(a=a, b=b),
        lambda a, b: collections.defaultdict(int, a=a),
        lambda a, b: collections.UserDict(a=a, b=b),
        lambda a, b: types.MappingProxyType({"a": a}),
        ReadOnly,
        lambda a, b: {},
        lambda a, b: [a, b],
        lambda a, b: [a],
        lambda a, b: (a, b),
        lambda a, b: (),
        lambda a, b: collections.UserList([a, b]),
        lambda a, b: collections.deque([a, b]),
        Point,
    ]
    return st.builds(
        lambda kind, pair: lambda rng: kind(pair[0](rng), pair[1](rng)), st.sampled_from(kinds), two
    )


STRUCTURES = st.recursive(LEAVES, container, max_leaves=5)


@settings(
    max_examples=1000 if "FASTAMP_AT_LARGE" in os.environ else 400,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(structure=STRUCTURES, size=st.integers(1, 4), seed=st.integers(0, 99))
def test_batches_equal_default_collate(backend, structure, size, seed):
    rng = np.random.default_rng(seed)
    assert_collates_as_torch(SHARED[backend], [structure(rng) for _ in range(size)])


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
        if default_collate([np.ones(2)]).is_meta:
            pytest.skip("torch 2.6 moves arrays")
        assert_collates_as_torch(fastamp.BatchCollator(), [np.ones(2)] * 2)


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


@dataclasses.dataclass
class Base:
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    nested: dict


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    x: torch.Tensor
    nested: Base


@dataclasses.dataclass
class Derived(Base):
    y: float
    total: float = dataclasses.field(init=False)

    def __post_init__(self):
        self.total = float(self.x.sum()) + self.y


def test_dataclasses_keep_their_type(backend):
    collate = fastamp.BatchCollator()
    base = collate([Base(torch.ones(2), "a"), Base(torch.zeros(2), "b")])
    assert type(base) is Base
    assert base.x.tolist() == [[1, 1], [0, 0]]
    assert base.name == ["a", "b"]
    frozen = collate([Frozen(torch.ones(1), {"k": k}) for k in range(2)])
    assert type(frozen) is Frozen
    assert frozen.nested["k"].tolist() == [0, 1]
    slots = collate([Slots(torch.ones(1), Base(torch.ones(1), "a"))] * 2)
    assert type(slots) is Slots
    assert type(slots.nested) is Base
    derived = collate({"d": [Derived(torch.ones(2), "n", 0.5)]}["d"] * 2)
    assert type(derived) is Derived
    assert derived.total.tolist() == [2.5, 2.5]
    assert derived.total.dtype == torch.float64


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
