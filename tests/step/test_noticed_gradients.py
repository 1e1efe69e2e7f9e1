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


def assert_as_torch(prepare, ways, sizes=SIZES):
    """Make steps by fastamp and by torch; `ways` has those of fastamp's that are not native."""
    found = []
    for ours in (True, False):
        parameters, optimizer = make("adamw", sizes=sizes)
        for step in range(STEPS):
            prepare(step, parameters, optimizer)
            if ours:
                way = fastamp.optimizer_step(optimizer, FAR).way
                assert way.startswith(ways.get(step, "native"))
            else:
                optimizer.step()
        found.append([p.detach() for p in parameters])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


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
def test_what_is_asked_for_in_mid_run_counts_at_once_and_no_longer(
    change, reason, compiled, device
):
    def prepare(step, parameters, optimizer):
        if step in (2, 4):
            change(optimizer, step == 2)
        give(parameters, seed=step)

    with torch.set_grad_enabled(reason != "differentiable=True"):
        assert_as_torch(prepare, dict.fromkeys((2, 3), f"torch's: {reason}"))


@pytest.mark.parametrize(
    "change",
    [
        lambda group, _: group.update(lr="fast"),
        lambda group, _: group.update(betas=0.9),
        lambda group, _: group.update(amsgrad=True),
        lambda _, state: state.pop("exp_avg_sq"),
        lambda _, state: state.pop("step"),
    ],
    ids=["lr", "betas", "amsgrad", "state", "step"],
)
def test_what_torch_refuses_in_mid_run_is_refused_as_by_torch(change, compiled):
    errors = []
    for step in (lambda o: fastamp.optimizer_step(o, FAR), torch.optim.AdamW.step):
        parameters, optimizer = make("adamw", sizes=SIZES)
        for seed in range(2):
            give(parameters, seed=seed)
            fastamp.optimizer_step(optimizer, FAR)
        give(parameters, seed=2)
        change(optimizer.param_groups[0], optimizer.state[parameters[0]])
        with pytest.raises((KeyError, TypeError)) as caught:
            step(optimizer)
        errors.append((type(caught.value), str(caught.value), everything(parameters, optimizer)))
    assert errors[0] == errors[1]


def none(parameters, step):
    for p in parameters[step % 3 :: 2]:
        p.grad = None


def other_data(parameters, step):
    parameters[1].grad = parameters[1].other
    parameters[1].grad.data = torch.full_like(parameters[1], step)


def strided(parameters, step):
    parameters[1].grad = parameters[1].grad.t().contiguous().t()


def exchanged(parameters, step):
    parameters[2].grad, parameters[-1].grad = parameters[-1].grad, parameters[2].grad


def unaligned(parameters, step):
    values = torch.empty(1026, device=parameters[3].device)
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


NATIVE_GRADS = [none, other_data, exchanged, unaligned, freed]


@pytest.mark.parametrize(
    "change", [*NATIVE_GRADS, strided, shared, own_memory], ids=lambda f: f.__name__
)
def test_gradients_may_differ_at_any_step(change, compiled, device):
    def prepare(step, parameters, optimizer):
        if step == 0:
            parameters[1].other = torch.ones_like(parameters[1])
        if hasattr(parameters[1], "back"):
            values = parameters[1].__dict__.pop("back")
            parameters[1].untyped_storage().resize_(values.nbytes)
            with torch.no_grad():
                parameters[1].copy_(values)
        give(parameters, seed=step)
        if step in (2, 3):
            change(parameters, step)

    ways = {} if change in NATIVE_GRADS else dict.fromkeys((2, 3), "torch's: ")
    assert_as_torch(prepare, ways, [*SIZES[:-1], (16, 16)])


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10")
def test_gradients_may_come_in_another_dtype_later(compiled, device):
    found = []
    for dtypes in ([torch.float32] * 4, [torch.float32, torch.bfloat16] * 2):
        parameters = parameters_with(*[torch.ones(n, device=device) for n in (5, 70_000)])
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for step, dtype in enumerate(dtypes):
            for p in parameters:
                p.grad_dtype = None
                p.grad = torch.full(p.shape, 0.5 + step, dtype=dtype, device=device)
            assert fastamp.optimizer_step(optimizer, FAR).way.startswith("native")
        found.append(everything(parameters, optimizer)[:2])
    assert found[0] == found[1]
