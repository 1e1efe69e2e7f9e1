"""The CUDA kernels, run on the CPU, against the CPU's own passes: every bit is the same."""

import contextlib
import ctypes

import pytest
import torch
from support import lean, updates
from support.emulated import emulated_table, use_emulated
from support.emulated_build import library

import fastamp


@pytest.fixture(autouse=True)
def kernels(request):
    """Skip tests of kernels that are not there."""
    if request.node.get_closest_marker("emulated") and emulated_table() is None:
        pytest.skip("no compiled core, no C++ compiler or no glibc")


@pytest.mark.emulated
def test_the_emulated_kernels_give_the_cpus_bits():
    """All of them: the sanitizers run this one."""
    found = []
    for with_core in (use_emulated(emulated_table()), contextlib.nullcontext()):
        with with_core:
            for module, (parameters, optimizer) in (
                (lean, lean.make(torch.bfloat16, "8bit", True, [(70, 300), (9,), (2, 70_000)])),
                (lean, lean.make(torch.bfloat16, "bfloat16", False, [(70, 300), (9,)])),
                (updates, updates.make("adamw", torch.float16, fused=True)),
            ):
                for step in range(3):
                    module.give(parameters, step)
                    parameters[0].grad.view(-1)[0] = torch.inf if step == 1 else 1
                    report = fastamp.optimizer_step(optimizer, max_norm=1.0)
                norm = fastamp.clip_grad_norm_(parameters, 0.5)
                found.append([report.way, norm, *module.everything(parameters, optimizer)])
    assert found[:3] == found[3:]


@pytest.mark.emulated
def test_a_device_without_a_context_gets_none_when_the_guard_ends():
    emulated = ctypes.CDLL(str(library()))
    contexts = (ctypes.c_bool * 2)()
    for own, device, expected in ((-1, 1, [1, False, True]), (0, 1, [0, True, True])):
        after = emulated.fastamp_emulated_device(own, device, contexts)
        assert [after, *contexts] == expected
    assert [emulated.fastamp_emulated_device(-1, 0, contexts), *contexts] == [0, False, False]


def test_they_are_no_backend_of_a_user(compiled):
    assert "emulated" not in fastamp.backends()
