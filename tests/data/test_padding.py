"""What BatchCollator(pad=...) promises: ragged leaves in one batch, and telling errors."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from support.loading import Point, assert_same

import fastamp


def padded(rows, pad, shape):
    """Pad arrays the slow and obvious way."""
    out = np.full((len(rows), *shape), pad, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        out[(i, *map(slice, row.shape))] = row
    return out


RAGGED = [
    [(3,), (5,), (0,)],
    [(2, 3), (4, 1), (1, 2)],
    [(2, 3), (4, 3), (0, 3)],
    [(3, 2), (3, 4), (3, 1)],
    [(2, 0, 3), (2, 2, 1), (1, 1, 1)],
    [(2, 3, 2), (2, 1, 2), (2, 3, 2)],
    [(4,), (4,)],
    [(), ()],
]


@pytest.mark.parametrize("kind", ["tensor", "array", "transposed"])
@pytest.mark.parametrize("dtype", ["i8", "u1", "f4", "f2", "c8", "?"])
@pytest.mark.parametrize("shapes", RAGGED, ids=str)
def test_ragged_leaves_are_padded_to_the_longest(backend, kind, dtype, shapes):
    rng = np.random.default_rng(0)
    rows = [np.asarray(rng.integers(0, 100, shape)).astype(dtype) for shape in shapes]
    expected = padded(rows, 1, np.max(np.array(shapes, dtype=int), axis=0))
    make = {
        "tensor": torch.from_numpy,
        "array": lambda a: a,
        "transposed": lambda a: torch.from_numpy(a.copy(order="F")),
    }[kind]
    batch = fastamp.BatchCollator(pad={"x": 1})([{"x": make(row)} for row in rows])["x"]
    assert_same(batch, torch.from_numpy(expected))


def test_lists_of_numbers_are_padded(backend):
    samples = [
        {"ids": [1, 2, 3], "labels": [5], "f": (0.5,), "i": 7},
        {"ids": [], "labels": [1, 2], "f": (), "i": 8},
    ]
    batch = fastamp.BatchCollator(pad={"ids": 0, "labels": -100, "f": 0})(samples)
    assert_same(batch["ids"], torch.tensor([[1, 2, 3], [0, 0, 0]]))
    assert_same(batch["labels"], torch.tensor([[5, -100], [1, 2]]))
    assert_same(batch["f"], torch.tensor([[0.5], [0]], dtype=torch.float64))
    assert_same(batch["i"], torch.tensor([7, 8]))
    assert_same(fastamp.BatchCollator(pad=0)([[], []]), torch.zeros(2, 0, dtype=torch.int64))
    nested = fastamp.BatchCollator(pad=0)([[[1, 2]], [[3, 4], [5, 6]]])
    assert nested.tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


def test_padding_follows_the_structure_of_a_sample(backend):
    @dataclasses.dataclass
    class Item:
        ids: torch.Tensor

    def sample(n):
        ids = torch.ones(n)
        return {"text": {"ids": ids}, "pair": (ids, n), "point": Point(ids, n), "item": Item(ids)}

    pad = {"text": {"ids": 9}, "pair": {0: 8}, "point": {"x": 7}, "item": {"ids": 6}}
    batch = fastamp.BatchCollator(pad)([sample(1), sample(2)])
    assert batch["text"]["ids"].tolist() == [[1, 9], [1, 1]]
    assert batch["pair"][0].tolist() == [[1, 8], [1, 1]]
    assert batch["point"].x.tolist() == [[1, 7], [1, 1]]
    assert batch["item"].ids.tolist() == [[1, 6], [1, 1]]


def test_padding_keeps_gradients_and_promotes_dtypes(backend):
    samples = [torch.ones(2, requires_grad=True), torch.ones(3, dtype=torch.float64)]
    batch = fastamp.BatchCollator(pad=0)(samples)
    assert batch.dtype == torch.float64
    batch.sum().backward()
    assert samples[0].grad.tolist() == [1, 1]


@pytest.mark.parametrize("make", [torch.ones, np.ones, lambda n: [1] * n])
def test_ragged_input_names_its_keys_and_the_remedy(backend, make):
    samples = [{"text": {"ids": make(n)}} for n in (3, 3, 4)]
    message = r"^samples\[i\]\['text'\]\['ids'\]: .* equal size.*\(BatchCollator takes `pad` for"
    with pytest.raises(RuntimeError, match=message):
        fastamp.BatchCollator()(samples)


def test_padding_needs_one_number_of_dimensions(backend):
    with pytest.raises(RuntimeError, match=r"^samples\[i\]: .* equal size"):
        fastamp.BatchCollator(pad=0)([torch.ones(2), torch.ones(2, 2)])


@pytest.mark.parametrize(
    ("pad", "samples", "error", "message"),
    [
        ({"idz": 0}, [{"ids": torch.ones(1)}], ValueError, "pad has the keys ['idz'] for samples"),
        ({1: 0}, [(torch.ones(1),)], ValueError, "keys [1] for samples[i], which has [0]"),
        (
            {"ids": {"x": 0}},
            [{"ids": torch.ones(1)}],
            TypeError,
            "samples[i]['ids']: expected a nu",
        ),
        ({"ids": 0}, [{"ids": "text"}], TypeError, "samples[i]['ids']: expected a tensor, an arr"),
        ({"ids": 0}, [{"ids": {"x": 1}}], TypeError, "numbers of one depth, got dict"),
        ({"ids": 0}, [{"ids": ["a"]}], TypeError, "of one depth, got list with <U1 elements"),
        ({"ids": 0}, [{"ids": [1, [2]]}], TypeError, "got list with object elements"),
        (0.5, [torch.ones(1, dtype=torch.int64)], ValueError, "torch.int64 does not hold it"),
        (-1, [torch.ones(1, dtype=torch.uint8)], ValueError, "torch.uint8 does not hold it"),
        (math.inf, [torch.ones(1, dtype=torch.int32)], ValueError, "torch.int32 does not hold it"),
        (math.nan, [[1], [1, 2]], ValueError, "torch.int64 does not hold it"),
        ("0", [[1]], ValueError, "pad='0' for samples[i]: torch.int64 does not hold it"),
        (2**63, [[1]], ValueError, "pad=9223372036854775808 for samples[i]: torch.int64 does not"),
    ],
)
def test_bad_padding_is_refused_at_the_first_batch(backend, pad, samples, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fastamp.BatchCollator(pad)(samples)


def test_what_padding_does_not_help_is_told_as_torch_tells_it(backend):
    sparse = [torch.ones(2).to_sparse(), torch.ones(3).to_sparse()]
    for samples in ([np.ones(2), None], [np.ones(2), {"x": 1}], sparse):
        with pytest.raises(RuntimeError) as expected:
            torch.utils.data.default_collate(samples)
        with pytest.raises(RuntimeError) as caught:
            fastamp.BatchCollator()(samples)
        assert str(expected.value) in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("pad", [None, 0])
def test_nested_tensors_are_refused_as_torch_refuses_them(layout, pad, backend):
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
    with pytest.raises(RuntimeError, match="not currently supported by the default collate_fn"):
        fastamp.BatchCollator(pad)([nested] * 2)
