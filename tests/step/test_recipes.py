"""What torch's own tests do to a scaler, private names included: ours does what torch's does."""

import math
import pickle
import warnings
from collections import defaultdict

import pytest
import torch
from support.gradients import parameters_with, random
from support.training import OPTIMIZERS, make_scaler, mlp, one_step
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("values", [[16.0, 32.0, 64.0], [16.0, 32.0, math.inf], [6e4, 32.0, 6e4]])
def test_unscale_grads_takes_sparse_gradients(backend, device, values, dtype):
    def recipe(cls):
        index = torch.tensor([[0, 1, 0], [2, 0, 2]])
        sparse = torch.sparse_coo_tensor(index, values, (2, 3), dtype=dtype, check_invariants=True)
        sparse = sparse.to(device)
        parameter = torch.zeros_like(sparse)
        parameter.grad = sparse
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        found_inf = torch.zeros(1, device=device)
        inv_scale = torch.full((1,), 0.25, device=device)
        scaler = cls(device)
        if dtype == torch.float16:
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
                scaler._unscale_grads_(optimizer, inv_scale, found_inf, False)
        found = scaler._unscale_grads_(optimizer, inv_scale, found_inf, True)
        flag = found[found_inf.device].reshape(())
        # 6e4 + 6e4 overflows float16 before it is unscaled: what is left is nobody's to use.
        return [flag] if flag.item() else [flag, parameter.grad.to_dense()]

    overflows = values[2] == math.inf or (values[2] == 6e4 and dtype == torch.float16)
    assert assert_alike(recipe)[0].item() == overflows


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


class TakesScaler(torch.optim.SGD):
    """An optimizer of the older protocol: the scaler is an argument of its step."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        state = grad_scaler._per_optimizer_states[id(self)]
        assert state["stage"] is OptState.READY
        assert not hasattr(self, "grad_scale")
        grad_scaler.unscale_(self)
        [found_inf] = grad_scaler._found_inf_per_device(self).values()
        if not found_inf.item():
            super().step()


class TakesScale(torch.optim.SGD):
    """An optimizer of today's protocol: scale and found_inf are its attributes during its step."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        assert self.found_inf.shape == self.grad_scale.shape == ()
        if not self.found_inf.item():
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.div_(self.grad_scale)
                parameter.data.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("optimizer", [TakesScaler, TakesScale])
@pytest.mark.parametrize("bad", [None, math.inf])
def test_optimizers_that_scale_themselves(backend, device, optimizer, bad):
    def recipe(cls):
        grad = random(5, torch.float32, device)
        if bad is not None:
            grad[2] = bad
        parameters = parameters_with(grad)
        scaler = cls(device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, about the older protocol
            one_step(scaler, optimizer(parameters, lr=0.1), device)
        scaler.update()
        if cls is fastamp.GradScaler:
            assert scaler.skipped_steps == (bad is not None)
        return [parameters[0].detach(), parameters[0].grad, scaler.get_scale()]

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
