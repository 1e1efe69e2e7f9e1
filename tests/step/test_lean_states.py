"""States of lean optimizers: what may be in them, loaded, copied, converted to torch's and back."""

import copy
import pickle

import pytest
import torch
from support.devices import HAS_CORE, needs_core
from support.lean import FAMILY, copies_of, everything, give, make, same_bits, train

import fastamp

MOMENTS = ("float32", "bfloat16", "8bit")


def leave_gaps(optimizer, parameter):
    parameter.data = torch.ones(4, 200, device=parameter.device)[:, ::2]
    optimizer.state.clear()


def change_the_order(optimizer, parameter):
    for tensor in (parameter, parameter.grad):
        tensor.data = tensor.data.t().contiguous().t()


def change_the_shape(optimizer, parameter):
    parameter.grad = None
    parameter.data = torch.ones(4, 10, 10, dtype=torch.bfloat16, device=parameter.device)
    parameter.grad = torch.ones_like(parameter)


def change_exact(optimizer, parameter):
    optimizer.param_groups[0]["exact"] = not optimizer.param_groups[0]["exact"]


def change_dtype(optimizer, parameter):  # by `module.float()` or `module.bfloat16()`
    is_short, parameter.grad = parameter.dtype == torch.bfloat16, None
    parameter.data = parameter.data.to(torch.float32 if is_short else torch.bfloat16)
    parameter.grad = torch.ones_like(parameter)


def reset_a_moment(optimizer, parameter):  # by assignment, as in ReLoRA: it would change nothing
    optimizer.state[parameter]["exp_avg_sq"] = torch.zeros(4, 100, device=parameter.device)


SHORT = r"\['params'\]\[0\] is torch.\w*, .* for bfloat16 with exact=True: .*load_state_dict"
WIDE = r"\['params'\]\[0\] is torch.bfloat16, .* for float32 or exact=False: .*load_state_dict"


@pytest.mark.parametrize(
    ("change", "moments", "dtype", "exact", "said"),
    [
        (leave_gaps, "8bit", torch.bfloat16, True, r"\['params'\]\[0\]: .*contiguous"),
        (change_the_order, "8bit", torch.bfloat16, True, r"\['params'\]\[0\]: .*load_state_dict"),
        (change_the_shape, "8bit", torch.bfloat16, True, r"\[0\]: \w*: its shape"),
        (change_exact, "8bit", torch.bfloat16, True, SHORT),
        (change_exact, "8bit", torch.bfloat16, False, WIDE),
        *((change_dtype, each, torch.bfloat16, True, SHORT) for each in MOMENTS),
        (change_dtype, "8bit", torch.float32, True, WIDE),
        (reset_a_moment, "8bit", torch.bfloat16, True, "exp_avg_sq was .* del optimizer.state"),
    ],
)
def test_what_cannot_be_in_mid_run_is_refused_by_name_and_changes_nothing(
    change, moments, dtype, exact, said, backend, device
):
    (parameter,), optimizer = make(dtype, moments, exact, [(4, 100)])
    train([parameter], optimizer, 2, bad=())
    give([parameter], 2)
    change(optimizer, parameter)
    before = everything([parameter], optimizer)
    for step in (optimizer.step, lambda: fastamp.optimizer_step(optimizer)):
        with pytest.raises(RuntimeError, match=said):
            step()
    assert everything([parameter], optimizer) == before
    if change is reset_a_moment:
        del optimizer.state[parameter]
    elif "load_state_dict" in said:
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        return
    optimizer.step()
    has_low = optimizer.param_groups[0]["exact"] and parameter.dtype == torch.bfloat16
    assert ("low" in optimizer.state[parameter]) == has_low


def by_state(parameters, optimizer):
    formats_of = [optimizer.param_groups[0][name] for name in ("moments", "exact")]
    others, other = make(parameters[0].dtype, *formats_of, name=type(optimizer).__name__)
    for theirs, ours in zip(others, parameters, strict=True):
        theirs.data.copy_(ours)
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    return others, other


@pytest.mark.parametrize("copied", [by_state, lambda *both: copy.deepcopy(both)], ids=["s", "c"])
@pytest.mark.parametrize(("name", "dtype", "moments", "exact"), FAMILY)
def test_a_loaded_state_and_a_copy_resume_to_the_bit(name, dtype, moments, exact, copied):
    parameters, optimizer = make(dtype, moments, exact, name=name, seed=7)
    train(parameters, optimizer, 3)
    others, other = copied(parameters, optimizer)
    assert other.param_groups[0]["seed"] == 7
    train(parameters, optimizer, 3, first=3)
    train(others, other, 3, first=3)
    assert everything(parameters, optimizer) == everything(others, other)


def test_moments_of_channels_last_are_loaded_in_their_order_of_memory():
    found, saved = [], None
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = torch.nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        optimizer = fastamp.AdamW(model.parameters(), lr=1e-2, moments="8bit")
        if saved:
            optimizer.load_state_dict(pickle.loads(pickle.dumps(saved)))
        else:
            model.weight.grad = torch.randn_like(model.weight)
            optimizer.step()
            saved = optimizer.state_dict()
        found.append(optimizer.state[model.weight])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert found[1]["exp_avg"].stride() == model.weight.stride()


@pytest.mark.parametrize("moments", MOMENTS)
def test_torchs_adamw_goes_on_here_and_back(moments):
    theirs, _ = make(torch.float32, "float32", True)
    torchs = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    train(theirs, torchs, 3)
    ours = copies_of(theirs)
    optimizer = fastamp.AdamW(ours, lr=1.0, moments=moments)
    optimizer.load_state_dict(torchs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-2
    back = torch.optim.AdamW(copies_of(theirs))
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


def test_to_torch_takes_the_states_that_torch_has():
    optimizer = fastamp.Lion([torch.nn.Parameter(torch.zeros(4))])
    with pytest.raises(TypeError, match=r"state_dict: expected what .* got .*Lion"):
        fastamp.to_torch(optimizer)
    with pytest.raises(ValueError, match="state_dict: torch has no optimizer for it"):
        fastamp.to_torch(optimizer.state_dict())


@needs_core  # for torch's bits
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_torchs_sgd_goes_on_here_and_back(momentum):
    theirs, _ = make(torch.float32, "float32", True, [(4, 100), (9,)])
    torchs = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=0.1)
    train(theirs, torchs, 2, bad=())
    ours = copies_of(theirs)
    optimizer = fastamp.SGD(ours, lr=1.0)
    optimizer.load_state_dict(torchs.state_dict())
    back = torch.optim.SGD(theirs, lr=1.0)
    back.load_state_dict(fastamp.to_torch(optimizer.state_dict()))
    train(ours, optimizer, 2, first=2, bad=())
    train(theirs, back, 2, first=2, bad=())
    assert all(same_bits(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_state_in_other_formats_is_converted():
    parameters, optimizer = make(torch.bfloat16, "8bit", True)
    train(parameters, optimizer, 3)
    _, wide = make(torch.bfloat16, "float32", False)
    wide.load_state_dict(optimizer.state_dict())
    assert [wide.param_groups[0][name] for name in ("moments", "exact")] == ["float32", False]
    _, again = make(torch.bfloat16, "8bit", True)
    again.load_state_dict(wide.state_dict())
    for one, other in zip(optimizer.state.values(), again.state.values(), strict=True):
        for name in one.keys() - {"low"}:
            torch.testing.assert_close(one[name], other[name], rtol=2e-7, atol=0)
        assert not other["low"].any()


def test_a_state_of_an_older_torch_is_loaded(backend):
    parameters, optimizer = make(torch.float32, "float32", True, [(4, 100)])
    saved = torch.optim.AdamW(parameters).state_dict()
    saved["state"][0] = {"step": 3, "exp_avg": torch.ones(4, 100), "exp_avg_sq": torch.ones(4, 100)}
    for name in ("maximize", "foreach", "capturable", "differentiable", "fused"):
        del saved["param_groups"][0][name]
    optimizer.load_state_dict(saved)
    train(parameters, optimizer, 1)
    assert optimizer.state[parameters[0]]["step"] == 4


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("exp_avg_scale", torch.Tensor.half, " of parameter 0 is torch.float16 .* expected float"),
        ("low", torch.Tensor.half, " of parameter 0 is torch.float16 .* expected uint8"),
        ("exp_avg", lambda _: torch.zeros(8), r" of parameter 1 is torch.float32 of shape \(8,\)"),
        ("exp_avg", None, "exp_avg of parameter 1 is missing"),
        ("eps", None, "eps: expected at least"),
        ("groups", None, "groups of"),
        ("class", None, r"one of fastamp.AdamW, with groups of \[\(2, 'betas', 'eps'\)\] .*mom"),
    ],
)
def test_a_wrong_state_is_refused_by_name_and_changes_nothing(name, spoil, said):
    """Tools that halve float32 tensors move weights by a thousand times the rate."""
    parameters, optimizer = make(torch.bfloat16, "8bit", True, [(4, 100), (9,)])
    train(parameters, optimizer, 2)
    before = everything(parameters, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    if name == "eps":
        saved["param_groups"][0]["eps"] = 0.0
    elif name == "groups":
        saved["param_groups"] = saved["param_groups"][:0]
    elif name == "class":
        saved = fastamp.SGD(parameters).state_dict()
    else:
        state = next(state for state in saved["state"].values() if name in state)
        old = state.pop(name)
        state.update({name: spoil(old)} if spoil else {})
    with pytest.raises(ValueError, match=name + said if spoil else said):
        optimizer.load_state_dict(saved)
    assert everything(parameters, optimizer) == before
