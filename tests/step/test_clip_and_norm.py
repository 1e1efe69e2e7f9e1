"""What one read and one write of the gradients promise, on every backend."""

import functools
import math

import numpy as np
import pytest
import torch
from support import reference
from support.bits import bits
from support.gradients import parameters_with, random, values_of

import fastamp
from fastamp import _ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NO_CLIP = _ops.Clip()
# 0, 1, odd, around a row, a strip, a chunk and several chunks.
SIZES = [0, 1, 7, 127, 129, 257, 8191, 8193, 65535, 65537, 3 * 65536 + 1003]


def stats_of(tensors: list[torch.Tensor], **kwargs) -> _ops.StepReport:
    return _ops.hold(tensors).measure(_ops.Clip(only_finite=False, **kwargs))


def total_of(tensors: list[torch.Tensor]) -> float:
    (part,) = _ops.hold(tensors)._parts
    return part.reduce().total.item()


@functools.cache
def exact_norm(sizes, dtype, device):
    """Return the oracle's norm of the next test's tensors, which is the same for each backend."""
    return reference.exact_norm([values_of(random(n, dtype, device, seed=n)) for n in sizes])


@pytest.mark.parametrize("sizes", [SIZES, *([size] for size in SIZES)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_right_to_the_last_float32_bit(backend, device, dtype, sizes):
    norm = stats_of([random(size, dtype, device, seed=size) for size in sizes]).norm
    assert norm.dtype == torch.float32
    assert norm.device.type == device
    assert norm.item() == exact_norm((*sizes,), dtype, device)


def assert_ordered(tensors):
    itemsizes = [t.element_size() for t in tensors]
    assert total_of(tensors) == reference.ordered_sum([values_of(t) for t in tensors], itemsizes)


def test_compiled_code_adds_in_the_promised_order(compiled, device, small):
    for dtype in DTYPES:
        assert_ordered([random(size, dtype, device, seed=size) for size in SIZES])
    count = 2100 if small else 5000
    assert_ordered([random(1 + i % 300, DTYPES[i % 3], device, seed=i) for i in range(count)])
    # A long sum hides the last bits of its terms, a short one shows a contracted product.
    for seed in range(300):
        assert_ordered([random(300, torch.float32, device, seed=seed)])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_norm_and_rescaling_do_not_depend_on_the_number_of_threads(backend, device, threads):
    torch.set_num_threads(threads)
    tensor = random(2**20 + 3, torch.float32, device)
    expected = tensor / 2
    assert stats_of([tensor]).norm.item() == reference.exact_norm([values_of(tensor)])
    _ops.hold([tensor]).rescale_(torch.tensor(0.5, device=device))
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_is_found_at_every_position(backend, device, bad, dtype):
    step = 83 if bad == -math.inf else 1
    tensor = torch.ones(1003, dtype=dtype, device=device)
    grads = _ops.hold([tensor])
    assert grads.measure(NO_CLIP).found_inf.item() == 0.0
    for i in range(0, 1003, step):
        tensor[i] = bad
        assert grads.measure(NO_CLIP).found_inf.item() == 1.0, i
        tensor[i] = 1.0


@pytest.mark.parametrize("factor", [0.5, 1 / 3, 1e-7, 2.0**-24, 65536.0, 0.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rescaling_rounds_once_to_the_nearest(backend, device, dtype, factor):
    if dtype == torch.float32:
        rng = np.random.default_rng(0)
        raw = rng.integers(0, 2**32, 100_003, dtype=np.uint32).view(np.int32)
    else:
        raw = np.arange(2**16, dtype=np.uint16).view(np.int16)
    tensor = torch.from_numpy(raw.copy()).view(dtype).to(device)
    _ops.hold([tensor]).rescale_(torch.tensor(factor, device=device))
    name = str(dtype).removeprefix("torch.")
    expected = torch.from_numpy(reference.rescale(raw, name, factor).view(raw.dtype)).view(dtype)
    assert torch.equal(tensor.isnan().cpu(), expected.isnan())
    kept = ~expected.isnan()
    np.testing.assert_array_equal(bits(tensor)[kept], bits(expected)[kept])


def test_a_factor_of_one_writes_nothing(compiled, device):
    # A signalling NaN would become a quiet one if it were written.
    tensor = torch.tensor([0x7F800001] * 1000, dtype=torch.int32, device=device).view(torch.float32)
    _ops.hold([tensor]).rescale_(torch.tensor(1.0, device=device))
    assert (bits(tensor) == 0x7F800001).all()


def test_error_if_nonfinite_is_torchs_and_changes_nothing(backend, device):
    grad, said = torch.tensor([1.0, math.nan], device=device), []
    for library in (fastamp, torch.nn.utils):
        with pytest.raises(RuntimeError) as caught:
            library.clip_grad_norm_(parameters_with(grad), 1.0, error_if_nonfinite=True)
        said.append(str(caught.value))
        assert grad[0] == 1
    assert said[0] == said[1]


def test_no_gradients_at_all(backend):
    assert fastamp.clip_grad_norm_([], 1.0).item() == 0.0
    assert fastamp.clip_grad_norm_(parameters_with(None), 1.0).item() == 0.0
    assert fastamp.clip_grad_norm_(parameters_with(torch.empty(0)), 1.0).item() == 0.0


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_a_generator_that_was_read_before_is_warned_of_as_by_torch(backend, order):
    parameters = torch.nn.Linear(1, 1).parameters()
    assert len([*parameters]) == 2
    with pytest.warns(UserWarning, match="empty generator"):
        fastamp.clip_grad_norm_(parameters, 1.0, order)


def test_torch_func_goes_torchs_way(backend):
    gradient = torch.func.grad(lambda x: fastamp.get_total_norm([x]))(torch.ones(3))
    assert torch.equal(gradient, torch.zeros(3))


class Subclass(torch.Tensor):
    """A tensor that goes torch's way."""


CLIPS = {
    "clip_grad_norm_": lambda clip, parameter: clip(parameter, 1.0),
    "get_total_norm": lambda clip, parameter: clip(parameter.grad),
}


@pytest.mark.parametrize("name", CLIPS)
def test_a_function_that_replaces_torchs_still_reaches_torchs(backend, monkeypatch, name):
    ours, theirs = (parameters_with(torch.tensor([3.0, 4.0]).as_subclass(Subclass)) for _ in "ab")
    expected = CLIPS[name](getattr(torch.nn.utils, name), *theirs)
    monkeypatch.setattr(torch.nn.utils, name, getattr(fastamp, name))
    monkeypatch.setattr(torch.nn.utils.clip_grad, name, getattr(fastamp, name), raising=False)
    assert CLIPS[name](getattr(torch.nn.utils, name), *ours) == expected
    assert torch.equal(ours[0].grad, theirs[0].grad)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_than_2_to_the_31_elements(dtype, device):
    size = 2**31 + 2**16 + 3
    if torch.cuda.mem_get_info()[0] < 2 * size * dtype.itemsize:
        pytest.skip("not enough memory on the GPU")
    grad = torch.zeros(size, dtype=dtype, device=device)
    values = {0: 1.0, 2**31 - 1: 3.0, 2**31: 5.0, size - 1: 1.0}
    for i, value in values.items():
        grad[i] = value
    assert fastamp.get_total_norm(grad).item() == 6.0
    parameter = torch.zeros(1, dtype=dtype, device=device).expand(size)
    parameter.grad = grad
    fastamp.clip_grad_norm_(parameter, 3.0)
    for i, value in values.items():
        assert grad[i].item() == pytest.approx(value / 2, rel=1e-6)
        grad[i] = 0.0
    assert fastamp.get_total_norm(grad).item() == 0.0  # nothing else was written
    grad[-1] = math.nan
    assert fastamp.get_total_norm(grad).isnan()
