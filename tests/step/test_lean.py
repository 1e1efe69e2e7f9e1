"""Lean optimizers: exact weights in 16 and 16 bits, states in 8, the same bits everywhere."""

import contextlib
import copy
import math
import pickle
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import lean, ranks
from support.bits import bits
from support.devices import HAS_CORE, needs_core
from support.gradients import random
from support.lean import FAMILY, OPTIONS, everything, give, make, train

import fastamp
from fastamp import _ops
from fastamp._ops import choose, formats


def same_bits(one, other):
    return bits(one.detach()).tobytes() == bits(other.detach()).tobytes()


@pytest.fixture(scope="module")
def expected():
    """What the fallback makes of each format; the other backends have to get the same bits."""
    found = {}
    for name, *formats_of in FAMILY:
        with _ops.use_only("fallback"):
            parameters, optimizer = make(*formats_of, name=name)
            said = train(parameters, optimizer, 5)
        assert {way for way, _ in said} == {"fallback"}
        found[(name, *formats_of)] = everything(parameters, optimizer)
    return found


@pytest.mark.parametrize(("name", "dtype", "moments", "exact"), FAMILY)
def test_all_backends_get_the_same_bits(name, dtype, moments, exact, compiled, device, expected):
    parameters, optimizer = make(dtype, moments, exact, name=name)
    said = train(parameters, optimizer, 5)
    assert [skipped for _, skipped in said] == [False, False, True, False, False]
    assert {way for way, _ in said} == {"native"}
    assert everything(parameters, optimizer) == expected[name, dtype, moments, exact]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 700)), min_size=1, max_size=4),
    st.lists(st.integers(0, 30_000), max_size=2),
    st.sampled_from(FAMILY),
    st.sets(st.integers(0, 3)),
)
def test_all_sizes_get_the_same_bits(matrices, vectors, case, bad):
    sizes = [*matrices, *((size,) for size in vectors), (3, 64)]
    name, *formats_of = case
    found = []
    for backend in ("fallback", "cpu")[: len(fastamp.backends())]:
        with _ops.use_only(backend):
            parameters, optimizer = make(*formats_of, sizes, name)
            train(parameters, optimizer, 4, bad=bad)
        found.append(everything(parameters, optimizer))
    assert found[0] == found[-1]


@pytest.mark.parametrize("name", ["SGD", "Lion"])
def test_float32_steps_as_in_float64(name, backend, device):
    parameters, optimizer = make(torch.float32, "float32", True, [(4, 100), (9,)], name)
    group, expected = optimizer.param_groups[0], [p.detach().cpu().double() for p in parameters]
    states = [torch.zeros_like(each) for each in expected]
    rate, decay = group["lr"], group["weight_decay"]
    for step in range(6):
        give(parameters, step)
        optimizer.step()
        for place, parameter in enumerate(parameters):
            grad, weight, state = parameter.grad.cpu().double(), expected[place], states[place]
            if name == "SGD":
                state.mul_(group["momentum"]).add_(grad + decay * weight)
                weight -= rate * state
            else:
                (beta1, beta2), sign = group["betas"], torch.sign
                change = sign(beta1 * state + (1 - beta1) * grad)
                state.mul_(beta2).add_((1 - beta2) * grad)
                weight -= rate * (change + decay * weight)
    for parameter, weight in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().cpu().double(), weight, rtol=1e-5, atol=1e-6)


def test_float32_is_bit_identical_to_torchs_adamw_in_fastamps_step(compiled, device):
    ours, optimizer = make(torch.float32, "float32", True)
    theirs = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    groups = [
        {**g, "params": p}
        for g, p in zip(
            ({}, {"lr": 3e-3, "betas": (0.3, 0.99)}), (theirs[:4], theirs[4:]), strict=True
        )
    ]
    torchs = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    assert train(ours, optimizer, 5) == train(theirs, torchs, 5)
    assert everything(ours, optimizer) == everything(theirs, torchs)


@pytest.mark.parametrize("name", OPTIONS)
def test_exact_weights_are_those_of_float32_over_a_thousand_steps(name, backend, device):
    sizes, steps = [(3, 100), (50,)], 1000 if backend != "fallback" else 100
    short, exact = make(torch.bfloat16, "8bit", True, sizes, name)
    wide, master = make(torch.float32, "8bit", True, sizes, name)
    bad = {0, 1, 7, 50}
    train(short, exact, steps, bad=bad)
    train(wide, master, steps, bad=bad)
    for ours, theirs in zip(exact.master_weights(), wide, strict=True):
        assert same_bits(ours, theirs)
    for ours, theirs in zip(short, wide, strict=True):
        assert (ours.float() - theirs).abs().max() <= theirs.abs().max() * 2**-8


@pytest.mark.parametrize("exact", [True, False])
def test_updates_that_are_smaller_than_a_bfloat16_step_add_up(exact, backend, device):
    parameter = torch.nn.Parameter(torch.ones(4, 64, dtype=torch.bfloat16, device=device))
    optimizer = fastamp.AdamW([parameter], lr=1e-4, weight_decay=0.0, exact=exact)
    for step in range(100):
        noise = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        parameter.grad = (1 + 0.1 * noise).to(parameter)
        optimizer.step()
    moved = 1 - optimizer.master_weights()[0].mean().item()
    assert moved == pytest.approx(0.01, rel=0.15)  # plain rounding to nearest moves nothing
    assert 1 - torch.tensor(1 - 1e-4).bfloat16().item() == 0


def test_weights_that_get_no_gradient_decay_by_random_bits_of_their_own(backend, device):
    """Rows of an embedding without tokens: their first moments are all zero."""
    parameter = torch.nn.Parameter(torch.ones(2, 4096, dtype=torch.bfloat16, device=device))
    optimizer = fastamp.AdamW([parameter], lr=1e-3, weight_decay=1.0, exact=False)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert (parameter < 1).float().mean().item() == pytest.approx(0.001 / 2**-8, abs=0.05)


def test_halves_give_back_every_float32():
    values = torch.cat(
        [
            torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32).view(torch.float32),
            torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4e38, 1e-45, -1e-45, 65504.5]),
        ]
    )
    values = values[~values.isnan()]
    high, low = formats.split(values)
    assert same_bits(formats.join(high, low), values)
    assert formats.split(torch.tensor([math.nan]))[0].isnan().all()


@pytest.mark.parametrize(("signed", "top"), [(True, 247), (False, 63487 + 1 / 32)])
def test_a_decoded_code_is_encoded_as_itself_with_a_million_scales(signed, top):
    # A row is a block of all codes; its largest one gives the scale that it was decoded with.
    # Scales are any float32 and the ends of the range; noise is the least and the most.
    ends = torch.tensor([2**-100 / top, torch.finfo(torch.float32).max / top]).view(torch.int32)
    drawn = torch.randint(1, 0x7F800000, (1_130_000,), generator=torch.Generator().manual_seed(0))
    drawn[:20] = (ends[:, None] + torch.arange(-5, 5)).flatten()
    codes = torch.arange(256).to(torch.uint8).expand(250, 256)
    noises = [None] * signed
    noises += [torch.full_like(codes, n, dtype=torch.int32) for n in (0, -1)]
    count = 0
    for scales in drawn.to(torch.int32).view(torch.float32).split(250):
        values = formats.decode(codes, scales[:, None], signed=signed)
        is_small, is_large = scales * top < 2**-100, (scales * top).isinf()
        is_kept = ~is_small & ~is_large
        for noise in noises:
            again, found = formats.encode(values, signed=signed, noise=noise)
            assert torch.equal(again[is_kept], codes[is_kept])
            assert ((found[:, 0] - scales).abs() <= scales * 2e-7)[is_kept].all()
            assert not found[is_small].any()
            assert found[is_large].isinf().all()
        count += int(is_kept.sum())
    assert count > 1_000_000


def test_codes_are_within_a_thirty_second_part(backend):
    values = torch.exp2(-16 * torch.rand(100, 256, generator=torch.Generator().manual_seed(0)))
    for signed in (True, False):
        codes, scales = formats.encode(values, signed=signed)
        error = (formats.decode(codes, scales, signed=signed) - values).abs()
        smallest = values.amax(dim=1, keepdim=True) / (247 if signed else 63487)
        assert (error <= values / 32 + smallest / 16).all()


def test_a_second_moment_that_decays_slowly_is_not_stuck(backend, device):
    # A thousandth a step, of codes that are 3 to 6 % apart: one element keeps the block's scale.
    parameter = torch.nn.Parameter(torch.zeros(2, 256, device=device))
    optimizer = fastamp.AdamW([parameter], moments="8bit", lr=0.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for step in range(300):
        parameter.grad = 0.01 * random((2, 256), torch.float32, device, seed=step)
        parameter.grad[:, 0] = 1.0
        optimizer.step()
    state = optimizer.state[parameter]
    moments = formats.decode(state["exp_avg_sq_codes"], state["exp_avg_sq_scale"], signed=False)
    assert moments[:, 1:].mean().item() == pytest.approx(1e-3 * 0.999**300, rel=0.05)


@pytest.mark.parametrize("moments", ["bfloat16", "8bit"])
@pytest.mark.parametrize(("name", "factor"), [("SGD", 0.999), ("Lion", 0.99)])
def test_a_momentum_that_decays_slowly_is_not_stuck(name, factor, moments, backend, device):
    parameter = torch.nn.Parameter(torch.zeros(2, 4096, device=device))
    option = {"momentum": factor} if name == "SGD" else {"betas": (0.9, factor)}
    optimizer = getattr(fastamp, name)([parameter], lr=0.0, moments=moments, **option)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    (form,) = _ops.torch_update.states_of(optimizer.rule, optimizer.param_groups[0])
    first = form.read(state).clone()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(100):
        parameter.grad[:, ::256] = (1 - factor) * first[0, 0] * (100 if name == "Lion" else 1)
        optimizer.step()
    decayed = (form.read(state) / first)[:, 1:256].mean().item()
    assert decayed == pytest.approx(factor**100, rel=0.05)


def test_zero_grad_hooks_and_scalers_step_alike(backend, device):
    found = []
    ways = ["optimizer_step", "scaler", "hooked", "torch's scaler"]
    for how in ways[: 3 if device == "cuda" else 4]:  # torch's has no bfloat16 on a GPU
        parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100), (9,)])
        cls = torch.amp.GradScaler if how == "torch's scaler" else fastamp.GradScaler
        scaler = cls(device, init_scale=4.0)
        called = []
        if how == "hooked":
            optimizer.register_step_post_hook(lambda *_, called=called: called.append(1))
        for step in range(3):
            give(parameters, step)
            if "scaler" in how:
                scaler.scale(torch.ones((), device=device))
                for parameter in parameters:
                    parameter.grad *= 4
                scaler.step(optimizer)
                scaler.update()
            else:
                fastamp.optimizer_step(optimizer, zero_grad=how == "optimizer_step")
        assert len(called) == 3 * (how == "hooked")
        found.append(everything(parameters, optimizer)[:2])
    assert found == [found[0]] * len(found)


def test_a_bare_step_is_the_same_step_and_calls_a_closure(backend, device):
    parameters, optimizer = make(torch.bfloat16, "8bit", True)
    others, other = make(torch.bfloat16, "8bit", True)
    for step in range(3):
        give(others, step)
        assert optimizer.step(lambda step=step: give(parameters, step) or 1.5) == 1.5
        fastamp.optimizer_step(other)
    assert everything(parameters, optimizer) == everything(others, other)


def warns_of_operators(backend):
    """Expect a warning where a gradient's layout takes a step from compiled code."""
    if backend == "fallback":
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match="in torch's operators, .* a gradient's dtype, layout")


def test_a_gradient_with_gaps_in_its_memory_is_stepped(backend, device):
    parameters, optimizer = make(torch.float32, "8bit", True, [(4, 100)])
    others, other = make(torch.float32, "8bit", True, [(4, 100)])
    give(parameters, 0)
    others[0].grad = parameters[0].grad.repeat_interleave(2, dim=1)[:, ::2]
    optimizer.step()
    with warns_of_operators(backend):
        other.step()
    assert same_bits(parameters[0], others[0])


def test_an_expanded_gradient_is_clipped_once(backend, device):
    parameters, optimizer = make(torch.float32, "8bit", True, [(4, 100)])
    others, other = make(torch.float32, "8bit", True, [(4, 100)])
    # of a sum: one element in memory
    parameters[0].grad = torch.ones((), device=device).expand(4, 100)
    others[0].grad = torch.ones(4, 100, device=device)
    with warns_of_operators(backend):
        assert fastamp.optimizer_step(optimizer, max_norm=5.0).norm == 20
    assert fastamp.optimizer_step(other, max_norm=5.0).norm == 20
    assert same_bits(parameters[0], others[0])
    assert torch.equal(parameters[0].grad, others[0].grad)
    assert parameters[0].grad[0, 0].item() == pytest.approx(0.25)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_weights_that_were_set_to_zero_stay_numbers(zero, backend, device):
    parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100)])
    train(parameters, optimizer, 2, bad=())
    with torch.no_grad():
        parameters[0].fill_(zero)  # a pruned weight: its lower half belongs to another one
    assert (optimizer.master_weights()[0].abs() < 2**-126).all()
    train(parameters, optimizer, 1, first=2, bad=())
    assert parameters[0].isfinite().all()


def test_a_parameter_with_gaps_in_its_memory_is_refused(backend, device):
    whole = torch.ones(4, 100, device=device)
    parameter = torch.nn.Parameter(whole[:, :70])
    optimizer = fastamp.AdamW([parameter])
    parameter.grad = torch.ones(4, 70, device=device)
    with pytest.raises(RuntimeError, match=r"\['params'\]\[0\]: there are gaps .*\.contiguous"):
        optimizer.step()
    assert (whole == 1).all()


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_another_order_of_memory_in_mid_run_is_refused(moments, backend, device):
    model = torch.nn.Conv2d(64, 64, 3, device=device)
    optimizer = fastamp.AdamW(model.parameters(), moments=moments)
    give([*model.parameters()], 0)
    optimizer.step()
    model.to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"\['params'\]\[0\]: exp_avg.*\.load_state_dict"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    optimizer.load_state_dict(optimizer.state_dict())  # in the new order
    optimizer.step()


def test_another_shape_in_mid_run_is_refused(backend, device):
    parameters, optimizer = make(torch.float32, "8bit", True, [(4, 100)])
    give(parameters, 0)
    optimizer.step()
    for shape in [(), (4,), (100, 4), (4, 10, 10)]:
        parameters[0].grad = None
        parameters[0].data = torch.ones(shape, device=device)
        parameters[0].grad = torch.ones(shape, device=device)
        with pytest.raises(RuntimeError, match="exp_avg_codes: its shape or memory format"):
            optimizer.step()
        assert (parameters[0] == 1).all()


def test_a_learning_rate_may_be_a_tensor(backend, device):
    parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100)])
    others, other = make(torch.bfloat16, "8bit", True, [(4, 100)], lr=torch.tensor(1e-2))
    train(parameters, optimizer, 3)
    train(others, other, 3)
    assert same_bits(parameters[0], others[0])


@pytest.mark.parametrize(("name", "dtype", "moments", "exact"), FAMILY)
def test_a_loaded_state_resumes_to_the_bit(name, dtype, moments, exact):
    parameters, optimizer = make(dtype, moments, exact, name=name, seed=7)
    train(parameters, optimizer, 3)
    others, other = make(dtype, moments, exact, name=name)
    for theirs, ours in zip(others, parameters, strict=True):
        theirs.data.copy_(ours)
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert other.param_groups[0]["seed"] == 7
    train(parameters, optimizer, 3, first=3)
    train(others, other, 3, first=3)
    assert everything(parameters, optimizer) == everything(others, other)


def test_torchs_adamw_does_not_take_codes_for_moments():
    parameters, optimizer = make(torch.float32, "8bit", True, [(4, 100)])
    train(parameters, optimizer, 1)
    torchs = torch.optim.AdamW(parameters)
    torchs.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        torchs.step()


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
def test_torchs_adamw_goes_on_here_and_back(moments):
    theirs, _ = make(torch.float32, "float32", True)
    torchs = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    train(theirs, torchs, 3)
    ours = [torch.nn.Parameter(each.detach().clone()) for each in theirs]
    optimizer = fastamp.AdamW(ours, lr=1.0, moments=moments)
    optimizer.load_state_dict(torchs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-2
    back = torch.optim.AdamW([torch.nn.Parameter(each.detach().clone()) for each in theirs])
    back.load_state_dict(fastamp.to_torch(optimizer.state_dict()))
    parts = {"float32": 0, "bfloat16": 2**-8, "8bit": 2**-5}
    for one, other in zip(torchs.state.values(), back.state.values(), strict=True):
        assert one["step"] == other["step"] == 2
        for name in ("exp_avg", "exp_avg_sq"):
            largest = one[name].abs().max() if one[name].numel() else torch.ones(())
            bound = parts[moments] * (one[name].abs() + largest / 247)
            assert ((one[name] - other[name]).abs() <= bound).all()
    train(ours, optimizer, 2, first=3)
    train(theirs, torchs, 2, first=3)
    if moments == "float32" and HAS_CORE:
        assert all(same_bits(one, other) for one, other in zip(ours, theirs, strict=True))


@needs_core  # for torch's bits
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_torchs_sgd_goes_on_here_and_back(momentum):
    theirs, _ = make(torch.float32, "float32", True, [(4, 100), (9,)])
    torchs = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=0.1)
    ours = [torch.nn.Parameter(each.detach().clone()) for each in theirs]
    optimizer = fastamp.SGD(ours, lr=1.0)
    train(theirs, torchs, 2, bad=())
    optimizer.load_state_dict(torchs.state_dict())
    for one, other in zip(ours, theirs, strict=True):
        one.data.copy_(other)
    train(ours, optimizer, 2, first=2, bad=())
    torchs.load_state_dict(fastamp.to_torch(optimizer.state_dict()))
    for one, other in zip(theirs, ours, strict=True):
        one.data.copy_(other)
    train(ours, optimizer, 2, first=4, bad=())
    train(theirs, torchs, 2, first=4, bad=())
    assert all(same_bits(one, other) for one, other in zip(ours, theirs, strict=True))


def test_torch_has_no_lion():
    with pytest.raises(ValueError, match="torch has no optimizer for it"):
        fastamp.to_torch(fastamp.Lion([torch.zeros(3)]).state_dict())


def test_a_state_in_other_formats_is_converted():
    parameters, optimizer = make(torch.bfloat16, "8bit", True)
    train(parameters, optimizer, 3)
    _, wide = make(torch.bfloat16, "float32", False)
    wide.load_state_dict(optimizer.state_dict())
    assert wide.param_groups[0]["moments"] == "float32"
    assert wide.param_groups[0]["exact"] is False
    _, again = make(torch.bfloat16, "8bit", True)
    again.load_state_dict(wide.state_dict())
    for one, other in zip(optimizer.state.values(), again.state.values(), strict=True):
        for name in one.keys() - {"low"}:
            torch.testing.assert_close(one[name], other[name], rtol=2e-7, atol=0)
        assert not other["low"].any()


def test_hooks_of_a_load_see_and_change_the_state():
    parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100)])
    train(parameters, optimizer, 2)
    saved, seen = optimizer.state_dict(), []

    def replaced(_, state):
        given = copy.deepcopy(state)
        given["state"][0]["step"].fill_(7.0)
        return given

    optimizer.register_load_state_dict_pre_hook(replaced)
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.extend(state["step"].item() for state in loaded.state.values())
    )
    optimizer.load_state_dict(saved)
    assert seen == [7.0]
    assert saved["state"][0]["step"] == 2


def test_a_state_of_an_older_torch_is_loaded(backend):
    parameters, optimizer = make(torch.float32, "float32", True, [(4, 100)])
    saved = torch.optim.AdamW(parameters).state_dict()
    saved["state"][0] = {"step": 3, "exp_avg": torch.ones(4, 100), "exp_avg_sq": torch.ones(4, 100)}
    for name in ("maximize", "foreach", "capturable", "differentiable", "fused"):
        del saved["param_groups"][0][name]
    optimizer.load_state_dict(saved)
    train(parameters, optimizer, 1)
    assert optimizer.state[parameters[0]]["step"] == 4


def test_weights_that_became_float32_use_no_lower_half(backend, device):
    parameters, optimizer = make(torch.bfloat16, "float32", True, [(4, 100)])
    train(parameters, optimizer, 2)
    parameters[0].data, parameters[0].grad = parameters[0].detach().float(), None
    before = parameters[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    assert torch.equal(optimizer.master_weights()[0], before)
    train(parameters, optimizer, 1)
    assert torch.equal(parameters[0], before)


@pytest.mark.parametrize("changed", ["exact=True", "exact=False", "dtype"])
def test_what_changes_in_mid_run_is_named_and_a_loaded_state_goes_on(changed, backend, device):
    dtype = torch.float32 if changed == "dtype" else torch.bfloat16
    parameters, optimizer = make(dtype, "8bit", changed != "exact=True", [(4, 100)])
    train(parameters, optimizer, 2, bad=())
    if changed == "dtype":
        torch.nn.ParameterList(parameters).bfloat16()
    else:
        optimizer.param_groups[0]["exact"] = changed == "exact=True"
    give(parameters, 2)
    before = everything(parameters, optimizer)
    said = r"exact or a parameter's dtype changed .* optimizer.load_state_dict\(optimizer.state_"
    for step in (optimizer.step, lambda: fastamp.optimizer_step(optimizer)):
        with pytest.raises(RuntimeError, match=said):
            step()
    assert everything(parameters, optimizer) == before
    optimizer.load_state_dict(optimizer.state_dict())
    train(parameters, optimizer, 1, first=2, bad=())
    assert optimizer.state[parameters[0]]["step"] == 3
    assert ("low" in optimizer.state[parameters[0]]) == (changed != "exact=False")


def test_a_moment_that_is_set_beside_its_codes_is_refused_by_name(backend, device):
    """Resetting moments by assignment, as in ReLoRA, would change nothing."""
    parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100)])
    train(parameters, optimizer, 2, bad=())
    give(parameters, 2)
    optimizer.state[parameters[0]]["exp_avg_sq"] = torch.zeros(4, 100, device=device)
    before = everything(parameters, optimizer)
    for step in (optimizer.step, lambda: fastamp.optimizer_step(optimizer)):
        with pytest.raises(RuntimeError, match=r"exp_avg_sq was set beside .* del optimizer.state"):
            step()
    assert everything(parameters, optimizer) == before
    del optimizer.state[parameters[0]]
    train(parameters, optimizer, 1, first=2, bad=())
    assert optimizer.state[parameters[0]]["step"] == 1


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor], ids="fdt")
def test_numbers_of_numpy_and_tensors_are_floats_to_it(number, compiled, device):
    """The core reads floats: these led into Python, 80 times as slow."""
    results = []
    for as_number in (number, float):
        parameter = torch.nn.Parameter(torch.ones(4, 100, device=device))
        options = {"weight_decay": as_number(0.5), "eps": as_number(0.25)}
        options["betas"] = (as_number(0.5), as_number(0.75))
        optimizer = fastamp.AdamW([parameter], lr=0.125, **options)
        parameter.grad = torch.ones_like(parameter)
        assert fastamp.optimizer_step(optimizer).way == "native"
        assert {type(optimizer.param_groups[0][name]) for name in ("eps", "weight_decay")} == {
            float
        }
        results.append(parameter.detach())
    assert torch.equal(*results)
    with pytest.raises(TypeError, match="eps: expected a number, got 'x'"):
        fastamp.AdamW([parameter], eps="x")


@pytest.mark.parametrize("name", ["exp_avg_scale", "low", "exp_avg_codes"])
def test_a_state_that_was_converted_since_it_was_saved_is_refused_by_name(name):
    """Tools that halve float32 tensors move weights by a thousand times the rate."""
    parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100)])
    train(parameters, optimizer, 2)
    before = everything(parameters, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][name] = saved["state"][0][name].half()
    with pytest.raises(ValueError, match=f"{name} of parameter 0 is torch.float16, expected"):
        optimizer.load_state_dict(saved)
    assert everything(parameters, optimizer) == before


def test_copies_and_pickles_go_on_alone():
    parameters, optimizer = make(torch.bfloat16, "8bit", True)
    train(parameters, optimizer, 2)
    others, other = copy.deepcopy((parameters, optimizer))
    train(others, other, 2, first=2)
    train(parameters, optimizer, 2, first=2)
    assert everything(parameters, optimizer) == everything(others, other)


@pytest.mark.parametrize(
    ("name", "nbytes"), [("AdamW", (8, 6 + 4, 4 + 12)), ("SGD", (7, 8, 12)), ("Lion", (7, 8, 12))]
)
def test_bytes_of_gpt_2_are_half(name, nbytes):
    shapes = [(50257, 768), (1024, 768)]
    layer = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
    layer += [(768,)] * 4
    shapes += layer * 12 + [(768,)] * 2
    for moments, expected in zip(("8bit", "bfloat16", "float32"), nbytes, strict=True):
        dtype = torch.float32 if moments == "float32" else torch.bfloat16
        with torch.device("meta"):
            parameters = [torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            options = OPTIONS[name][0]
            optimizer = getattr(fastamp, name)(parameters, **options, moments=moments)
            optimizer.make_states()
        held = [t for p in parameters for t in (p, p.grad, *optimizer.state[p].values())]
        elements = sum(p.numel() for p in parameters)
        found = sum(t.untyped_storage().nbytes() for t in held) / elements
        assert expected - 0.01 <= found <= expected + 0.1


def test_wrong_arguments_are_named():
    weight = torch.nn.Parameter(torch.zeros(4, 64))
    for options, said in [
        (
            {"moments": "4bit"},
            "moments: expected one of ('float32', 'bfloat16', '8bit'), got '4bit'",
        ),
        ({"moments": "8bit", "eps": 0.0}, "eps: expected at least 1e-12 with moments='8bit'"),
        (
            {"amsgrad": True},
            "amsgrad=True: fastamp.AdamW does not support it; torch.optim.AdamW does",
        ),
        ({"differentiable": True}, "differentiable=True"),
        ({"lr": -1.0}, "lr: expected at least 0, got -1.0"),
        ({"lr": torch.tensor(-1.0)}, "lr: expected at least 0, got -1.0"),
        ({"lr": torch.ones(2)}, "lr: expected a number or a tensor of one, got 2"),
        ({"betas": (0.9, 1.0)}, "betas: expected two numbers"),
        ({"betas": (0.9,)}, "betas: expected two numbers"),
        ({"seed": -1}, "seed: expected an integer"),
    ]:
        with pytest.raises(ValueError, match=r"\w") as error:
            fastamp.AdamW([weight], **options)
        assert said in str(error.value)
    for options, said in [
        ({"dampening": 0.5}, "dampening=0.5: fastamp.SGD does not support it; torch.optim.SGD"),
        ({"nesterov": True}, "nesterov=True: expected a momentum above 0"),
        ({"momentum": -1}, "momentum: expected at least 0, got -1.0"),
    ]:
        with pytest.raises(ValueError, match=said):
            fastamp.SGD([weight], **options)
    fastamp.AdamW([weight], fused=False, foreach=True, capturable=True)  # without effect
    with pytest.raises(TypeError, match=r"param_groups\[0\]\['params'\]\[1\] is torch.float16"):
        fastamp.AdamW([weight, torch.nn.Parameter(torch.zeros(3).half())])
    optimizer = fastamp.AdamW([weight])
    weight.grad = torch.zeros(4, 64).to_sparse()
    with pytest.raises(RuntimeError, match="cannot make this step: a gradient's dtype, layout"):
        optimizer.step()


def test_frozen_parameters_may_have_any_dtype(backend):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64).half().requires_grad_(False))
    model.append(torch.nn.Linear(64, 4))
    optimizer = fastamp.AdamW(model.parameters(), moments="8bit")
    give([*model[1].parameters()], 0)
    fastamp.optimizer_step(optimizer, max_norm=1.0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.state) == 2
    model.requires_grad_(True)
    give([*model.parameters()], 1)
    with pytest.raises(RuntimeError, match=r"a parameter is (torch\.)?float16"):
        optimizer.step()


def test_a_wrong_state_leaves_the_optimizer_as_it_was():
    parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100), (9,)])
    train(parameters, optimizer, 2)
    before = everything(parameters, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["exp_avg"] = torch.zeros(8)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 1 has the shape \(8,\)"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["eps"] = 0.0
    with pytest.raises(ValueError, match="eps: expected at least"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["eps"] = 1e-8
    del saved["state"][1]["exp_avg"]
    with pytest.raises(ValueError, match="parameter 1 has no exp_avg"):
        optimizer.load_state_dict(saved)
    saved["param_groups"] = saved["param_groups"][:0]
    with pytest.raises(ValueError, match="groups of"):
        optimizer.load_state_dict(saved)
    assert everything(parameters, optimizer) == before


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_shards_step_as_the_whole_and_move_to_other_numbers_of_ranks():
    with ranks.start(3) as started:
        for case in (("AdamW", True), ("AdamW", False), ("SGD", False), ("Lion", True)):
            (alone,) = started.run(1, lean.sharded_run, 1, None, 4, 0, *case)
            state, first = None, 0
            for count in (2, 3):
                found = started.run(count, lean.sharded_run, count, state, 2, first, *case)
                state, first = found[0], first + 2
            for ours, theirs in zip(state, alone, strict=True):
                lean.assert_same(ours, theirs)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_8_bits_refuse_tensor_parallel_shards_when_they_are_made():
    with ranks.start(2) as started:
        for said in started.run(2, lean.tensor_parallel_refusal):
            assert "['params'][0] is a DTensor that is not sharded by its first dimension" in said


def test_8_bits_of_flat_parameters_warn_by_name():
    flat = torch.nn.Parameter(torch.zeros(100_000))
    with pytest.warns(UserWarning, match=r"saves nothing for param_groups\[0\]\['params'\]\[1\]"):
        fastamp.SGD([torch.nn.Parameter(torch.zeros(4, 100)), flat], momentum=0.9, moments="8bit")


@pytest.mark.parametrize("exact", [True, False])
def test_master_weights_can_be_loaded(exact, backend, device):
    parameters, optimizer = make(torch.bfloat16, "8bit", exact, [(4, 100), (9,)])
    weights = [torch.randn(p.shape) for p in parameters]
    optimizer.load_master_weights(weights)
    for got, new, p in zip(optimizer.master_weights(), weights, parameters, strict=True):
        assert torch.equal(got.cpu(), new if exact else new.bfloat16().float())
        assert (p.cpu().float() - new).abs().max() <= new.abs().max() * 2**-8
    with pytest.raises(
        ValueError, match=r"weights: expected tensors of the shapes .* got \[\(9,\)\]"
    ):
        optimizer.load_master_weights(weights[1:])


def test_without_compiled_code_the_way_is_fallback_and_there_is_one_warning():
    reason = choose.Reason("nothing was built", "pip install fastamp")
    choose._warn_of.cache_clear()
    with (
        mock.patch.object(choose, "_only", None),
        mock.patch.object(choose, "_core", return_value=reason),
        mock.patch.object(choose, "_tables", return_value={}),
        mock.patch.object(choose, "_handles", choose._Handles()) as handles,
        mock.patch.object(_ops, "backend_for", handles.__getitem__),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100)])
        assert train(parameters, optimizer, 2, bad=()) == [("fallback", False)] * 2
        optimizer.step()
    (warning,) = seen
    assert "lean optimizers on cpu get the slower" in str(warning.message)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_shards_step_in_torchs_operators():
    with ranks.start(2) as started:
        (alone,) = started.run(1, lean.sharded_run, 1, None, 2, 0)
        found = started.run(2, lean.sharded_run_of_fallback, 2)
    lean.assert_same(found[0], alone)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
@pytest.mark.parametrize("run", [lean.sharded_checkpoint_run, lean.channels_last_checkpoint_run])
def test_a_checkpoint_of_ranks_resumes_to_the_bit(run, tmp_path):
    with ranks.start(2) as started:
        assert started.run(2, run, str(tmp_path)) == [True, True]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_no_bit(default, backend, device):
    found = []
    for dtype in (torch.float32, default):
        theirs, torchs = make(torch.float32, "float32", True, [(4, 100)])
        train(theirs, torchs, 1)
        parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100)])
        with default_dtype(dtype):
            optimizer.load_state_dict(fastamp.to_torch(torchs.state_dict()))
        for step in range(2):
            give(parameters, step)
            with default_dtype(dtype):
                fastamp.optimizer_step(optimizer, max_norm=1.0)
        found.append(everything(parameters, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_reports_are_float32_whatever_the_default_dtype(default, max_norm, backend, device):
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    parameter.grad = None if max_norm is None else torch.ones_like(parameter)
    with default_dtype(default):
        optimizer = torch.optim.RMSprop([parameter])
        report = fastamp.optimizer_step(optimizer, max_norm=max_norm)
    values = report.norm, report.found_inf, report.clip_coef, report.scale
    assert {value.dtype for value in values} == {torch.float32}


@pytest.mark.parametrize("fused", [None, True])
def test_the_count_of_steps_has_torchs_dtype(fused, backend, device):
    dtypes = []
    with default_dtype(torch.float64):
        for step in (torch.optim.Adam.step, fastamp.optimizer_step):
            values = torch.ones(3, dtype=torch.float32, device=device)
            parameter = torch.nn.Parameter(values)
            optimizer = torch.optim.Adam([parameter], fused=fused)
            for _ in range(2):
                parameter.grad = torch.ones_like(parameter)
                step(optimizer)
            dtypes.append(optimizer.state[parameter]["step"].dtype)
    assert dtypes[0] == dtypes[1]
