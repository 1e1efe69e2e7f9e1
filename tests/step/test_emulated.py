"""The CUDA kernels, run on the CPU, against the CPU's own passes: every bit is the same."""

import ctypes
import math
import random

import numpy as np
import pytest
import torch
from support.bits import bits
from support.emulated import emulated_table, use_emulated
from support.emulated_build import library

import fastamp
from fastamp import _ops

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def kernels(request):
    """Skip tests of kernels that are not there."""
    if request.node.get_closest_marker("emulated") and emulated_table() is None:
        pytest.skip("no compiled core, no C++ compiler or no glibc")


def memory_of_gradients(rng, small):
    """Make memory and where a gradient begins in it: many, or large ones; some are not finite."""
    many, most = rng.choice([(1, 140_000), (20, 9000)] if small else [(2300, 9000), (10, 1 << 20)])
    dtypes = rng.choice([DTYPES, *([dtype] for dtype in DTYPES)])
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    made = []
    for _ in range(rng.randint(max(1, many // 2), many)):
        size = rng.choice([0, 1, rng.randint(1, 600), rng.randint(1, most), 8192, 65536])
        offset = rng.choice([0, 0, rng.randrange(1, 9)])
        scale = 10.0 ** rng.randint(-30, 30) if rng.random() < 0.1 else 1.0
        values = scale * torch.randn(offset + size, generator=generator)
        made.append((values.to(rng.choice(dtypes)), offset))
    if rng.random() < 0.2:
        made[-1][0][-1:] = rng.choice([math.inf, -math.inf, math.nan])
    return made


def results_of(backend, memory, clip):
    """Return the sum, the statistics, the count of skipped steps, and memory after a rescaling."""
    copies = [values.clone() for values, _ in memory]
    tensors = [values[offset:] for values, (_, offset) in zip(copies, memory, strict=True)]
    skipped = None if clip.skipped is None else clip.skipped.clone()
    packed = backend.pack(tensors)
    work, _ = backend.reduce(packed)
    stats = backend.grad_stats(packed, *clip._replace(skipped=skipped))
    backend.rescale(packed, _ops.GradStats(stats).factor)
    return [work[0], stats, skipped], copies


def emulated():
    with use_emulated(emulated_table()):
        return _ops.backend_for(CPU)


def assert_same_results(memory, clip):
    expected, theirs = results_of(_ops.backend_for(CPU), memory, clip)
    stats, ours = results_of(emulated(), memory, clip)
    torch.testing.assert_close(stats, expected, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


@pytest.mark.emulated
def test_the_emulated_kernels_give_the_cpus_bits(small):
    rng = random.Random(16)
    largest = many = 0
    for _ in range(10 if small else 60):
        memory = memory_of_gradients(rng, small)
        largest = max(largest, sum(values.numel() for values, _ in memory))
        many = max(many, len(memory))
        scale, skipped = (rng.choice([None, torch.tensor(rng.uniform(0.1, 1e5))]) for _ in "ab")
        before = rng.choice([None, torch.tensor(0.0), torch.tensor(1.0)])
        max_norm = rng.choice([None, 0.0, 1.0])
        clip = _ops.Clip(scale, max_norm, rng.random() < 0.5, before, skipped)
        assert_same_results(memory, clip)
    assert small or (largest > 9_000_000 and many > 2200)


@pytest.mark.emulated
def test_a_device_without_a_context_gets_none_when_the_guard_ends():
    emulated = ctypes.CDLL(str(library()))
    contexts = (ctypes.c_bool * 2)()
    for own, device, expected in ((-1, 1, [1, False, True]), (0, 1, [0, True, True])):
        after = emulated.fastamp_emulated_device(own, device, contexts)
        assert [after, *contexts] == expected
    assert [emulated.fastamp_emulated_device(-1, 0, contexts), *contexts] == [0, False, False]


@pytest.mark.emulated
def test_a_driver_that_is_too_old_is_named_with_the_oldest_that_serves():
    refusal = ctypes.CDLL(str(library())).fastamp_emulated_refusal
    refusal.restype = ctypes.c_char_p
    assert refusal(13000) == b""
    assert refusal(12080).startswith(
        b"the NVIDIA driver is for CUDA 12.8, and the kernels need one for 13.0 or later; update"
    )


def test_they_are_no_backend_of_a_user(compiled):
    assert "emulated" not in fastamp.backends()
