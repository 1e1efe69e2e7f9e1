"""The bench's view of a GPU, from events as the profiler tells them: no GPU is needed here."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

import fastamp
from fastamp.bench import gpu
from fastamp.bench.__main__ import main
from fastamp.bench.gpu import Event, count_s, find_share

NAMES = {
    "void fastamp::(anonymous namespace)::reduce_kernel<fastamp::L2, (Sums)0, 16>(Table)": 2,
    "void fastamp::(anonymous namespace)::finish_kernel<fastamp::L2, (Sums)0>(double*)": 2,
    "void fastamp::(anonymous namespace)::rescale_kernel<16>(Table, float const*)": 1,
    "void fastamp::(anonymous namespace)::update_kernel<16>(Table, float const*)": 1,
    "Memcpy DtoD (Device -> Device)": 1,
    "void at::native::vectorized_elementwise_kernel<4>(int)": 3,
}


def test_kernels_are_found_by_their_names_and_added_up():
    events = [Event(name, (10.0 * i, 10.0 * i + 2)) for name, n in NAMES.items() for i in range(n)]
    found = count_s(events)
    expected = {"reduce": 4e-6, "finish": 4e-6, "rescale": 2e-6, "update": 2e-6, "copy": 2e-6}
    assert found == pytest.approx(expected)


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
def test_a_kernels_share_is_its_bytes_over_its_time_against_the_copys(monkeypatch):
    calls = []

    def trace(call, count):
        call()  # on the CPU
        calls.append(count)
        return [
            Event(name, (0.0, 4.0)) for name, number in NAMES.items() for _ in range(number * count)
        ]

    monkeypatch.setattr(gpu, "trace", trace)
    args = argparse.Namespace(device="cpu", seed=0)
    for dtype in (torch.float32, torch.bfloat16):
        found = {
            kernel: (time_s, share)
            for kernel, time_s, share in gpu._kernels(args, [(300, 7), (5,)], dtype, 1)
        }
        # All take 4 us; the copy moves two elements in it, the update eight.
        assert found == {
            "reduce": pytest.approx((4e-6, 0.5)),
            "finish": pytest.approx((4e-6, 0.0)),
            "rescale": pytest.approx((4e-6, 1.0)),
            "update": pytest.approx((4e-6, 4.0)),
        }
    assert calls == [gpu.CALLS] * 2


def test_the_share_of_copies_under_kernels_counts_no_time_twice():
    copies = [Event("Memcpy HtoD (Pinned -> Device)", span) for span in ((0, 10), (20, 30))]
    kernels = [Event("kernel", span) for span in ((5, 8), (6, 12), (19, 25), (40, 50))]
    others = [Event("Memset (Device)", (0, 100)), Event("Memcpy DtoD", (0, 100))]
    assert find_share([*copies, *kernels, *others]) == pytest.approx((5 + 5) / 20)
    assert math.isnan(find_share(kernels))


def test_tensors_begin_where_they_are_asked_to():
    for odd in (0, 1):
        made = gpu._make([(3,), (2, 5)], "cpu", odd, torch.float32)
        assert [tuple(tensor.shape) for tensor in made] == [(3,), (2, 5)]
        places = [tensor.storage_offset() % 8 for tensor in made]
        assert places == [odd, odd]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_that_it_needs_one(capsys):
    for words in (["gpu"], ["gpu", "--device", "cpu"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert "expected cuda, and a GPU that torch finds" in capsys.readouterr().err
