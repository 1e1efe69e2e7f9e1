"""What torch's own tests do to a scaler, and whole runs: ours does what torch's does."""

import functools
import math
import pickle
from collections import defaultdict

import pytest
import torch
from support.gradients import parameters_with, random
from support.training import (
    OPTIMIZERS,
    OVERFLOWS,
    assert_same_bits,
    convnet,
    make_scaler,
    mlp,
    one_step,
    our_step,
    stock_step,
    tensors_in,
    train,
)
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

import fastamp

SCALERS = (torch.amp.GradScaler, fastamp.GradScaler)


def assert_alike(recipe):
    """Compare what a recipe makes of torch's scaler and of ours, and return the latter."""
    theirs, ours = (recipe(cls) for cls in SCALERS)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, equal_nan=True)
    return ours


@pytest.mark.parametrize("inject", [None, 0, 1, 2, 3])
def test_unscale_grads_takes_any_gradients_and_writes_them_in_place(backend, device, inject):
    def recipe(cls):
        whole = torch.full((10, 10), 4.0, device=device)
        grads = [whole.t().clone(), whole.clone()[:, :5], whole.half(), whole.half().t()]
        if inject is not None:
            grads[inject][-1, -1] = math.inf
        parameters = [torch.empty_like(grad) for grad in grads]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        found_inf = torch.full((1,), 0.0, device=device)
        inv_scale = torch.full((1,), 0.25, device=device)
        found = cls(device)._unscale_grads_(optimizer, inv_scale, found_inf, True)
        assert all(p.grad is g for p, g in zip(parameters, grads, strict=True))
        assert list(found) == [found_inf.device]
        return [found[found_inf.device].reshape(()), *grads]

    found_inf = assert_alike(recipe)[0]
    assert found_inf.item() == (inject is not None)


@pytest.mark.parametrize("lazy", [True, False])
def test_the_state_has_torchs_names_before_and_after_the_first_scale(backend, device, lazy):
    def recipe(cls):
        first = cls(device, init_scale=3.0, growth_factor=4.0, backoff_factor=0.5)
        second = cls(device, init_scale=6.0, growth_factor=7.0, backoff_factor=0.8)
        first._init_growth_tracker = 5
        if not lazy:
            second.scale(torch.full((1,), 4.0, device=device))
        second.load_state_dict(first.state_dict())
        before = second._get_growth_tracker()
        second.scale(torch.full((1,), 4.0, device=device))
        assert second._scale.dtype == torch.float32
        assert second._growth_tracker.dtype == torch.int32
        second.set_growth_interval(9)
        return [second.state_dict(), before, second._scale, second._growth_tracker]

    assert_alike(recipe)


def train_two(cls, device, name, *, kind):
    """Train two models with one scaler, the second one's gradient overflowing once."""
    models = [mlp(device)[0] for _ in range(2)]
    data = mlp(device)[1]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    scaler = make_scaler(cls, device)
    for i, batch in enumerate(data[:8]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        a, b = models[0](batch), models[1](batch)
        losses = [(0.3 * a + 0.7 * b).square().mean(), (0.6 * a - 0.4 * b).square().mean()]
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        if i == 3:
            next(models[1].parameters()).grad.fill_(math.inf)
        if kind == "clip scaled":
            for model in models:
                longest = 0.1 * scaler.get_scale()
                torch.nn.utils.clip_grad_norm_(model.parameters(), longest)
        scaler.unscale_(optimizers[0])
        if kind == "clip unscaled":
            torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        flags = [scaler._found_inf_per_device(optimizer) for optimizer in optimizers]
        assert [[f.item() for f in flag.values()] for flag in flags] == [[0.0], [float(i == 3)]]
        scaler.update()
        if kind == "pickled":
            scaler = pickle.loads(pickle.dumps(scaler))
    parameters = [p.detach() for model in models for p in model.parameters()]
    return [parameters, scaler.get_scale(), scaler._get_growth_tracker()]


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["plain", "pickled", "clip scaled", "clip unscaled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_models_two_losses_and_two_optimizers_share_a_scaler(backend, device, name, kind):
    assert_alike(lambda cls: train_two(cls, device, name, kind=kind))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_spoilt_after_unscale_reach_the_parameters(backend, device, name):
    def recipe(cls):
        parameters = parameters_with(*[random(5, torch.float32, device, seed=i) for i in range(3)])
        optimizer = OPTIMIZERS[name](parameters)
        scaler = cls(device)
        scaler.scale(torch.ones((), device=device))
        scaler.unscale_(optimizer)
        for parameter in parameters:
            parameter.grad.fill_(math.nan)
        scaler.step(optimizer)
        return [parameter.isnan().all() for parameter in parameters]

    assert all(assert_alike(recipe))


class TakesScale(torch.optim.SGD):
    """An optimizer of today's protocol: scale and found_inf are its attributes during its step."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        assert self.found_inf.shape == self.grad_scale.shape == ()
        if not self.found_inf.item():
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.div_(self.grad_scale)
                parameter.data.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("bad", [None, math.inf])
def test_optimizers_that_scale_themselves(backend, device, bad):
    def recipe(cls):
        grad = random(5, torch.float32, device)
        if bad is not None:
            grad[2] = bad
        parameters = parameters_with(grad)
        scaler = cls(device)
        one_step(scaler, TakesScale(parameters, lr=0.1), device)
        scaler.update()
        if cls is fastamp.GradScaler:
            assert scaler.skipped_steps == (bad is not None)
        return [parameters[0].detach(), parameters[0].grad, scaler.get_scale()]

    assert_alike(recipe)


class TakesScaler(torch.optim.SGD):
    """An optimizer of torch's older protocol: its step takes the scaler, and may check by it."""

    _step_supports_amp_scaling = True
    checks = True

    def step(self, closure=None, *, grad_scaler=None):
        if self.checks:
            grad_scaler._check_inf_per_device(self)
        self.param_groups[0]["params"][0].data.sub_(grad_scaler._get_scale_async())


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_optimizers_that_take_the_scaler(backend, device, checks):
    def recipe(cls):
        parameters = parameters_with(torch.tensor([8.0, math.inf], device=device))
        optimizer, scaler = TakesScaler(parameters, lr=0.1), cls(device)
        optimizer.checks = checks
        one_step(scaler, optimizer, device)
        if cls is fastamp.GradScaler:
            assert scaler.last_step.skipped == scaler.skipped_steps == checks
        return [parameters[0].detach()]

    assert_alike(recipe)


def test_a_check_without_a_step_and_states_that_others_reset(backend, device):
    def recipe(cls):
        parameters = parameters_with(torch.tensor([8.0, math.inf], device=device))
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = cls(device)
        scaler.scale(torch.ones((), device=device))
        found = scaler._check_inf_per_device(optimizer)
        assert scaler._found_inf_per_device(optimizer) is found
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        flags = [flag.item() for flag in found.values()]
        scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        parameters[0].grad[1] = 16.0
        scaler.step(optimizer)
        scaler.update(torch.full((), 32.0, device=device))
        return [flags, parameters[0].grad, parameters[0].detach(), scaler.get_scale()]

    assert_alike(recipe)


@pytest.mark.parametrize("cls", SCALERS)
def test_a_disabled_scaler_does_nothing_in_torchs_words(backend, cls):
    scaler = cls("cpu", enabled=False)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.is_enabled()) == (
        1.0,
        0,
        False,
    )
    assert scaler.scale(3.0) == 3.0
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


@functools.cache
def run(cls, step, device, name, max_norm):
    """Train a model; a run of stock is the same beside each backend."""
    model, data = convnet(device)
    return train(model, data, OPTIMIZERS[name], make_scaler(cls, device), step(max_norm))


@pytest.mark.pairwise
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_runs_equal_the_stock_sequence(backend, device, name, max_norm):
    stock = run(torch.amp.GradScaler, stock_step, device, name, max_norm)
    ours = run.__wrapped__(fastamp.GradScaler, our_step, device, name, max_norm)
    assert ours["skipped"] == stock["skipped"] == list(OVERFLOWS)
    assert ours["scales"] == stock["scales"]
    assert ours["lr"] == stock["lr"]
    # One multiply or divide instead of two multiplies, and an exact norm: up to 2 ulps (2.4e-7) in
    # a gradient at each step, which 50 steps add up to less than 1e-5. The models have no biases
    # whose true gradient is 0: Adam would blow their rounding noise up to whole steps.
    for a, b in zip(ours["parameters"], stock["parameters"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(tensors_in(ours["state"]), tensors_in(stock["state"]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, check_device=False)  # of counts


@pytest.mark.parametrize("name", ["adamw foreach", "own"])  # other updates are fastamp's own
def test_without_clipping_a_power_of_two_leaves_no_difference_at_all(backend, device, name):
    results = []
    for cls, step in ((torch.amp.GradScaler, stock_step), (fastamp.GradScaler, our_step)):
        model, data = mlp(device)
        scaler = make_scaler(cls, device)
        results.append(train(model, data, OPTIMIZERS[name], scaler, step(None)))
    assert_same_bits(results[0]["parameters"], results[1]["parameters"])
    assert_same_bits(results[0]["state"], results[1]["state"])
