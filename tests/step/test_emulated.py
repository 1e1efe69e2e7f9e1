"""The CUDA kernels, run on the CPU, against the CPU's own passes: every bit is the same."""

import math
import random
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from support import lean
from support.bits import bits
from support.drawn import EXAMPLES, hypothesis
from support.emulated import emulated_table, fast_float64, use_emulated
from support.python_update import python_step
from support.updates import everything

import fastamp
from fastamp import _ops

st = hypothesis.strategies
given = hypothesis.given

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS_ERROR = 2.0**-35
"""How far a reduction in pairs of float32 is from the promised one, relatively, at most."""
NEVER_CERTAIN = torch.tensor(math.nan)
"""A scale with which all is added again where float64 is slow."""


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
    """Compare with the CPU, and return the sum and the CPU's where float64 is slow."""
    expected, theirs = results_of(_ops.backend_for(CPU), memory, clip)
    with fast_float64():
        stats, _ = results_of(emulated(), memory, clip)
    torch.testing.assert_close(stats, expected, rtol=0, atol=0, equal_nan=True)
    stats, ours = results_of(emulated(), memory, clip)
    torch.testing.assert_close(stats[1:], expected[1:], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(stats[0], expected[0], rtol=PAIRS_ERROR, atol=0, equal_nan=True)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))
    return stats[0], expected[0]


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
def test_the_emulated_kernels_give_an_update_the_oracles_bits():
    found = []
    for make_step in (fastamp.optimizer_step, python_step):
        generator = torch.Generator().manual_seed(0)
        sizes = [(dtype, size) for dtype in DTYPES for size in (1, 1003)]
        values = [torch.randn(size, generator=generator).to(dtype) for dtype, size in sizes]
        parameters = [torch.nn.Parameter(value) for value in values]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        for step in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            if step == 1:
                parameters[0].grad.fill_(math.inf)
            with use_emulated(emulated_table()):
                make_step(optimizer, max_norm=1.0)
        found.append(everything(parameters, optimizer))
    assert found[0] == found[1]


@pytest.mark.emulated
def test_the_emulated_kernels_give_adamw_in_8_bits_the_fallbacks_bits():
    found = []
    sizes = [(70, 300), (9,), (3, 64), (2, 70_000)]
    for name in ("emulated", "fallback"):
        parameters, optimizer = lean.make(torch.bfloat16, "8bit", True, sizes)
        backend = use_emulated(emulated_table()) if name == "emulated" else _ops.use_only(name)
        with backend:
            lean.train(parameters, optimizer, 3, bad=(1,))
        found.append(lean.everything(parameters, optimizer))
    assert found[0] == found[1]


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_alignment_gives_the_cpus_bits(dtype):
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 255, 257, 1031, 8192 + 3):
        values = torch.randn(size + 8, generator=generator).to(dtype)
        memory = [(values, offset) for offset in range(16 // values.element_size())]
        assert_same_results(memory, _ops.Clip(max_norm=1.0))


@pytest.mark.emulated
@pytest.mark.parametrize("count", [15, 16, 17, 256, 257, 2000, 2001, 2017])
def test_every_size_of_table_gives_the_cpus_bits(count):
    values = torch.randn(count + 65_537, generator=torch.Generator().manual_seed(count))
    memory = [(row, 0) for row in (values[:65_537], *values[65_537:].split(1))][:count]
    assert_same_results(memory, _ops.Clip(max_norm=1.0))
    assert_same_results(memory, _ops.Clip(NEVER_CERTAIN))


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_every_kind_give_the_cpus_bits(dtype):
    limits = torch.finfo(dtype)
    subnormal = [limits.tiny / 2, limits.tiny * limits.eps, limits.tiny * (1 - limits.eps)]
    kinds = [0.0, limits.tiny, limits.max, *subnormal, math.inf, math.nan]
    for number in (sign * kind for kind in kinds for sign in (1, -1)):
        values = torch.randn(3000, generator=torch.Generator().manual_seed(1)).to(dtype)
        values[1::7] = number
        memory = [(values, 1), (torch.full((9,), number, dtype=dtype), 0)]
        assert_same_results(memory, _ops.Clip(max_norm=1.0))


@pytest.mark.emulated
def test_the_emulated_kernels_give_the_cpus_bits_where_all_is_added_again():
    generator = torch.Generator().manual_seed(0)
    memory = [(torch.randn(size, generator=generator), 0) for size in (70_000, 1, 8193)]
    for some in (memory, [(torch.zeros(0), 0)]):
        assert_same_results(some, _ops.Clip(NEVER_CERTAIN))


def with_norm(values, distance):
    """Return values, and more, whose norm is (1 + distance) times the middle of two float32 ones.

    Also return the smaller of the two; the rest that no float32 number fills is 2**-90 of it all.
    """
    taken = sum(Fraction(x) ** 2 for x in values.tolist())
    lower = np.float32(math.sqrt(2 * taken))
    middle = (Fraction(float(lower)) + Fraction(float(np.nextafter(lower, np.float32(np.inf))))) / 2
    total = (middle * (1 + Fraction(distance))) ** 2
    left, more = total - taken, []
    while left > total / 2**90:
        number = np.float32(math.sqrt(left))
        while Fraction(float(number)) ** 2 > left:
            number = np.nextafter(number, np.float32(0))
        more.append(float(number))
        left -= Fraction(float(number)) ** 2
    return [(values, 0), (torch.tensor(more), 0)], float(lower)


@pytest.mark.emulated
def test_a_norm_near_the_middle_of_two_numbers_is_added_again():
    rng = random.Random(0)
    for distance in (0.0, *(sign * 2.0**-power for sign in (1, -1) for power in (44, 41, 37, 30))):
        same = 0
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(rng.randrange(2**32))
            values = torch.randn(rng.choice([3, 1000, 20_000]), generator=generator).to(dtype)
            memory, lower = with_norm(values, distance)
            ours, expected = assert_same_results(memory, _ops.Clip())
            assert distance == 0.0 or (np.float32(math.sqrt(ours)) > lower) == (distance > 0)
            same += int(ours == expected)
        assert same == 3 or abs(distance) == 2.0**-30


@EXAMPLES
@given(
    drawn=st.lists(
        st.tuples(
            st.sampled_from(["equal", "swamped", "any magnitude", "one beside zeros"]),
            st.sampled_from(DTYPES),
            st.integers(1, 400) | st.sampled_from([8192, 20_000]),
            st.sampled_from([0, 0, -60, 60]),
            st.integers(0, 100),
            st.integers(0, 2**32 - 1),
        ),
        min_size=1,
        max_size=3,
    ),
    exponent=st.sampled_from([-149, -100, -76, -54, -49, 50, 57, 63, 127]) | st.integers(-149, 127),
)
@pytest.mark.emulated
def test_pairs_are_within_their_bound(drawn, exponent):
    memory = []
    for kind, dtype, size, shift, spread, seed in drawn:
        rng = np.random.default_rng(seed)
        values = rng.uniform(1, 2, size) * rng.choice([-1, 1], size)
        if kind == "equal":
            values[:] = values[0]
        elif kind == "one beside zeros":
            values[1:] = 0
        elif kind == "swamped":  # each adds just less than half of the last bit
            values[256:] = values[256:] * 2.0**-12
        else:
            values = np.ldexp(values, rng.integers(-spread, 1, size))
        limit = torch.finfo(dtype).max
        made = torch.from_numpy(np.ldexp(values, exponent + shift)).clamp(-limit, limit).to(dtype)
        memory.append((made, seed % 2))
    assert_same_results(memory, _ops.Clip(max_norm=1.0))


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_a_package_cannot_hold_the_emulated_kernels(tmp_path):
    options = ["-DFASTAMP_CUDA=EMULATE", "-DSKBUILD=2"]
    command = ["cmake", "-S", ROOT, "-B", tmp_path, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "FASTAMP_CUDA=EMULATE is for tests: no package holds" in done.stderr


def test_they_are_no_backend_of_a_user(compiled):
    assert "emulated" not in fastamp.backends()
