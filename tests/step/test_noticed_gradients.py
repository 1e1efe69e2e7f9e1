"""Whatever changes between two steps, the next one sees: what is asked for, and gradients."""

import pytest
import torch
from support.gradients import parameters_with
from support.updates import everything, give, make

import fastamp

SIZES = [(3,), (70, 5), (16, 16), (1025,), (64,)]
STEPS = 7
FAR = 1e9
"""A norm that no gradients have: nothing is clipped."""


def asked_for(**options):
    def change(optimizer, wanted):
        optimizer.param_groups[1].update(options if wanted else dict.fromkeys(options))

    return change


def hook(optimizer, wanted):
    if wanted:
        optimizer.handle = optimizer.register_step_post_hook(lambda *_: None)
    else:
        optimizer.handle.remove()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (asked_for(foreach=True), "foreach=True"),
        (asked_for(foreach=False), "foreach=False"),
        (asked_for(fused=False), "fused=False"),
        (asked_for(differentiable=True), "differentiable=True"),
        (hook, "there is a step hook"),
    ],
)
def test_what_is_asked_for_in_mid_run_counts_at_once_and_no_longer(change, reason, compiled):
    found = []
    for ours in (True, False):
        parameters, optimizer = make("adamw", sizes=SIZES)
        for step in range(6):
            if step in (2, 4):
                change(optimizer, step == 2)
            give(parameters, seed=step)
            with torch.set_grad_enabled(reason != "differentiable=True"):
                if ours:
                    way = fastamp.optimizer_step(optimizer, FAR).way
                    assert (reason if step in (2, 3) else "native") in way
                else:
                    optimizer.step()
        found.append([p.detach() for p in parameters])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["lr", "betas", "amsgrad", "state", "step"])
def test_what_torch_refuses_in_mid_run_is_refused_as_by_torch(change, compiled):
    errors = []
    for ours in (True, False):
        parameters, optimizer = make("adamw", sizes=SIZES)
        for step in range(3):
            give(parameters, seed=step)
            if step < 2:
                fastamp.optimizer_step(optimizer, FAR)
        if change == "lr":
            optimizer.param_groups[0]["lr"] = "fast"
        if change == "amsgrad":
            optimizer.param_groups[0]["amsgrad"] = True
        if change == "betas":
            optimizer.param_groups[0]["betas"] = 0.9
        if change == "state":
            del optimizer.state[parameters[0]]["exp_avg_sq"]
        if change == "step":
            del optimizer.state[parameters[0]]["step"]
        with pytest.raises((KeyError, TypeError)) as caught:
            fastamp.optimizer_step(optimizer, FAR) if ours else optimizer.step()
        left = everything(parameters, optimizer)
        errors.append((type(caught.value), str(caught.value), left))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sgd", {"momentum": 0.9}),
        ("sgd, nesterov", {"momentum": 0.0, "nesterov": False}),
        ("sgd, nesterov", {"nesterov": False, "dampening": 0.5}),
        ("adagrad", {"lr_decay": 0.5, "eps": 0.1, "weight_decay": 0.0}),
        ("adam, amsgrad", {"amsgrad": False}),
        ("adam, near end", {"betas": (0.9, 0.5)}),
    ],
)
def test_options_of_other_rules_may_change_too(name, change, compiled):
    found = []
    for ours in (True, False):
        parameters, optimizer = make(name, sizes=SIZES)
        before = {key: optimizer.param_groups[1][key] for key in change}
        for step in range(STEPS):
            if step in (2, 4):
                optimizer.param_groups[1].update(change if step == 2 else before)
            give(parameters, seed=step)
            if ours:
                assert fastamp.optimizer_step(optimizer, FAR).way.startswith("native")
            else:
                optimizer.step()
        found.append([p.detach() for p in parameters])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def none(parameters, step):
    for p in parameters[step % 3 :: 2]:
        p.grad = None


def all_none(parameters, step):
    for p in parameters:
        p.grad = None


def in_place(parameters, step):
    kept = parameters[1].kept
    kept.copy_(parameters[1].grad)
    parameters[1].grad = kept


def other_data(parameters, step):
    parameters[1].grad = parameters[1].kept
    parameters[1].grad.data = torch.full((70, 5), float(step))


def strided(parameters, step):
    parameters[1].grad = parameters[1].grad.t().contiguous().t()


def exchanged(parameters, step):
    parameters[2].grad, parameters[-1].grad = parameters[-1].grad, parameters[2].grad


def unaligned(parameters, step):
    values = torch.empty(1026)
    values[1:] = parameters[3].grad
    parameters[3].grad = values[1:]


def shared(parameters, step):
    parameters[-1].grad = parameters[2].grad


def own_memory(parameters, step):
    parameters[3].grad = parameters[3].detach()


def freed(parameters, step):
    parameters[1].grad = None
    values = parameters[1].detach().clone()
    parameters[1].untyped_storage().resize_(0)
    parameters[1].back = values


NATIVE_GRADS = [none, in_place, other_data, exchanged, unaligned, freed]


@pytest.mark.parametrize(
    "change", [*NATIVE_GRADS, all_none, strided, shared, own_memory], ids=lambda f: f.__name__
)
def test_gradients_may_differ_at_any_step(change, compiled):
    found = []
    for ours in (True, False):
        parameters, optimizer = make("adamw", sizes=[*SIZES[:-1], (16, 16)])
        parameters[1].kept = torch.ones(70, 5)
        for step in range(STEPS):
            give(parameters, seed=step)
            if step in (2, 3):
                change(parameters, step)
            if ours:
                way = fastamp.optimizer_step(optimizer, FAR).way
                assert way.startswith("native") == (step not in (2, 3) or change in NATIVE_GRADS)
            else:
                optimizer.step()
            if hasattr(parameters[1], "back"):
                values = parameters[1].__dict__.pop("back")
                parameters[1].untyped_storage().resize_(values.nbytes)
                with torch.no_grad():
                    parameters[1].copy_(values)
        found.append([p.detach() for p in parameters])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10")
def test_gradients_may_come_in_another_dtype_later(compiled):
    found = []
    for dtypes in ([torch.float32] * 4, [torch.float32, torch.bfloat16] * 2):
        parameters = parameters_with(*[torch.ones(n) for n in (5, 70_000)])
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for step, dtype in enumerate(dtypes):
            for p in parameters:
                p.grad_dtype = None
                p.grad = torch.full(p.shape, 0.5 + step, dtype=dtype)
            assert fastamp.optimizer_step(optimizer, FAR).way.startswith("native")
        found.append(everything(parameters, optimizer)[:2])
    assert found[0] == found[1]
