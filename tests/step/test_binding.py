"""Where the tensors lie that the core is handed, and who comes in while it steps."""

from __future__ import annotations

import threading

import pytest
import torch
from support.gradients import parameters_with
from torch.overrides import TorchFunctionMode

import fastamp
from fastamp import _ops

# These speak of the binding, not of the public API. The list of no tensors is said to be on a GPU,
# which need not be there; the argument is on the host. A kernel would read or write there: a crash.
ONE = torch.ones(())
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CLIP = {"scale": None, "max_norm": 1.0, "before": None, "skipped": None}


@pytest.fixture(params=[CPU, GPU], ids=["cpu", "cuda"])
def handle(request):
    """Return the core's handle of a device, with the ops of the CPU."""
    core = _ops.core() or pytest.skip("no compiled core")
    on_gpu = request.param is GPU
    return core.Backend(core.cpu_ops, on_gpu, request.param, 0 if on_gpu else None)


@pytest.fixture
def elsewhere(handle):
    """Return a number that is not on the handle's device."""
    return ONE if handle.device == GPU else ONE.to("meta")


@pytest.mark.parametrize("name", ["scale", "before", "skipped"])
def test_the_core_names_the_statistic_that_is_on_another_device(name, handle, elsewhere):
    packed, given = handle.pack([]), CLIP | {name: elsewhere}
    with pytest.raises(TypeError, match=f"^{name}: .* on the gradients' device"):
        handle.grad_stats(packed, only_finite=False, **given)
    update = _ops.core().Update("SGD")
    with pytest.raises(TypeError, match=f"^{name}: .* on the gradients' device"):
        handle.step([(update, [], {})], measures=True, zero_grad=False, **given)


@pytest.mark.parametrize("name", ["factor", "found_inf"])
def test_the_core_names_the_factor_or_flag_that_is_on_another_device(name, handle, elsewhere):
    if name == "factor":
        with pytest.raises(TypeError, match=r"^factor: .* on the gradients' device"):
            handle.rescale(handle.pack([]), elsewhere)
    own = _ops.core().Backend(_ops.core().cpu_ops, False, CPU, None)
    update, (parameter,) = _ops.core().Update("SGD"), parameters_with(torch.ones(3))
    step = own.read(update, torch.optim.SGD([parameter]).param_groups, {}, None)
    given = {"factor": None, "found_inf": None, name: elsewhere}
    with pytest.raises(TypeError, match=f"^{name}: .* on the gradients' device"):
        handle.apply(step, zero_grad=False, **given)
    assert parameter.tolist() == [0.0] * 3


def test_the_core_leaves_gradients_and_parameters_on_another_device_out(handle):
    (parameter,) = parameters_with(torch.ones(3, device="meta" if handle.device == CPU else "cpu"))
    assert handle.pack([parameter.grad]).rest == [0]
    groups = torch.optim.SGD([parameter]).param_groups
    found = handle.read(_ops.core().Update("SGD"), groups, {}, None)
    assert found == ("torch", "a parameter's dtype, layout or device")


# --- two threads, one optimizer ---


@pytest.mark.parametrize("what", ["step", "state_dict"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_thread_in_the_midst_of_anothers_step_disturbs_nothing(number, what, compiled, device):
    """The other one comes in when the core asks for memory, between its read and its update."""
    parameters = parameters_with(*[torch.ones(3 + i, device=device) for i in range(number)])
    optimizers = [torch.optim.AdamW([p], lr=1.0, eps=0, weight_decay=0) for p in parameters]
    stepped = optimizers if number > 1 else optimizers[0]  # which is another way through the core
    fastamp.optimizer_step(stepped, max_norm=1.0)
    calls = []

    def other():
        for optimizer in optimizers:
            if what == "step":
                fastamp.optimizer_step(optimizer, max_norm=1.0)
            optimizer.state_dict()

    class LetIn(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.empty and not calls:
                calls.append(threading.Thread(target=other))
                calls[-1].start()
                calls[-1].join()
            return function(*args, **(kwargs or {}))

    with LetIn():
        report = fastamp.optimizer_step(stepped, max_norm=1.0)
    assert (report.way, len(calls)) == ("native", 1)
    steps = 3 if what == "step" else 2
    for p, optimizer in zip(parameters, optimizers, strict=True):
        assert optimizer.state_dict()["state"][0]["step"].item() == steps
        torch.testing.assert_close(p.detach().cpu(), torch.full(p.shape, -float(steps)))
