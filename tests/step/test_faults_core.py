"""float64 where a device has none, and where a gradient is; slips and threads at the core."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from support import played_mps
from support.gradients import parameters_with, random
from support.played_mps import WIDE, Played, PlayMps
from support.training import SignMomentum
from torch.overrides import TorchFunctionMode

import fastamp
from fastamp import _ops
from fastamp._ops import fallback, held

# --- devices without float64 ---


class PlayDevice(PlayMps):
    """Lets tensors be made on the played device, whatever its name is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        asked = (kwargs or {}).get("device")
        is_plain = isinstance(made, torch.Tensor) and not isinstance(made, Played)
        if is_plain and asked is not None and torch.device(asked) == played_mps.MPS:
            return Played(made)
        return made


@pytest.fixture(params=["xla", "maia"])
def narrow(request, monkeypatch):
    """Yield the name of a device whose float64 is a TypeError, as on MPS, or a RuntimeError.

    Of "xpu" and "privateuseone" torch looks for the driver, and cannot be told not to.
    """
    monkeypatch.setattr(played_mps, "MPS", torch.device(request.param))
    for module in (fallback, held):
        monkeypatch.setattr(module, "PLAIN_TYPES", (*module.PLAIN_TYPES, Played))
    error, make = TypeError if request.param == "xla" else RuntimeError, Played.__new__

    def refuse_float64(cls, held):
        if held.dtype in WIDE:
            raise error(request.param + " has no float64")
        return make(cls, held)

    monkeypatch.setattr(Played, "__new__", refuse_float64)
    with PlayDevice():
        yield request.param


def played_parameters(*values):
    parameters = []
    for value in values:
        parameters.append(Played(torch.zeros(len(value))).requires_grad_())
        parameters[-1].grad = Played(torch.tensor(value))
    return parameters


def test_clipping_asks_for_no_float64_where_a_device_has_none(narrow):
    parameters = played_parameters([3.0, 0.0], [4.0])
    norm = fastamp.clip_grad_norm_(parameters, 1.0)
    assert norm.device.type == narrow
    assert norm.item() == 5
    torch.testing.assert_close(parameters[0].grad.held, torch.tensor([0.6, 0.0]))
    largest = fastamp.get_total_norm([p.grad for p in parameters], math.inf)
    assert largest.item() == pytest.approx(0.8, rel=1e-5)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("how", ["step", "clip, then step"])
def test_a_step_asks_for_no_float64_where_a_device_has_none(narrow, how, enabled, bad):
    factor = 4.0 if enabled else 1.0
    parameters = played_parameters([3 * factor, 0.0], [math.inf if bad else 4 * factor])
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = fastamp.GradScaler(narrow, init_scale=4.0, enabled=enabled)
    scaler.scale(Played(torch.ones(())))
    if how == "clip, then step":
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert scaler.last_step.norm.device.type == narrow
    assert scaler.last_step.skipped == bad
    expected = torch.zeros(1) if bad else torch.tensor([-0.8])
    torch.testing.assert_close(parameters[1].held, expected)


# --- gradients in float64 ---


@pytest.mark.parametrize("with_float32", [False, True])
@pytest.mark.parametrize("how", ["step", "clip, then step", "clip_grad_norm_"])
@pytest.mark.parametrize("name", ["sgd", "sgd fused", "somebody's"])
def test_gradients_in_float64_are_clipped_in_float64(name, how, with_float32, backend):
    dtypes = [torch.float64, torch.float32 if with_float32 else torch.float64]
    grads = [random(7, dtype, "cpu", seed=i) for i, dtype in enumerate(dtypes)]
    parameters = parameters_with(*[grad * 4 for grad in grads])
    expected = parameters_with(*[grad.double() for grad in grads])
    norm = torch.nn.utils.clip_grad_norm_(expected, 0.1)
    optimizer = SignMomentum(parameters, 1.0)
    if name != "somebody's":
        optimizer = torch.optim.SGD(parameters, lr=1.0, fused=name == "sgd fused" or None)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if how == "clip_grad_norm_":
        scaler.unscale_(optimizer)
        found = fastamp.clip_grad_norm_(parameters, 0.1)
    if how == "clip, then step":
        found = scaler.clip_grad_norm_(optimizer, 0.1)
    scaler.step(optimizer, max_norm=0.1 if how == "step" else None)
    found = scaler.last_step.norm if how == "step" else found
    torch.testing.assert_close(found, norm, rtol=1e-15, atol=0)
    for p, clipped in zip(parameters, expected, strict=True):
        tolerance = 1e-15 if p.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(p.grad.double(), clipped.grad, rtol=tolerance, atol=0)
        if name != "somebody's":  # whose steps are of other sizes
            torch.testing.assert_close(p.detach(), -p.grad, rtol=0, atol=0)


# --- where the tensors lie that the core is handed ---

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
        handle.apply(update, step, zero_grad=False, **given)
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
