"""torch's own tests of its optimizers' state, with steps by fastamp in between.

The options are those of torch's tests (`optim_db` of `torch.testing._internal.common_optimizers`),
with the implementation left open and fused. What is compared has taken the same steps by torch.
"""

import copy
import io
import math
import pickle
from functools import partial

import pytest
import torch
from support.bits import assert_close
from support.devices import device_in_use
from support.updates import everything, give, scaler_of
from torch.optim import SGD, Adam, AdamW

import fastamp

SIZES = [(10, 5), (5,), (0, 3), (600,)]
ADAM = [
    {},
    {"lr": 0.01},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
]
INPUTS = {
    Adam: ADAM,
    AdamW: ADAM,
    SGD: [
        {},
        {"lr": 0.01},
        {"lr": torch.tensor(0.001)},
        {"weight_decay": 0.5},
        {"momentum": 0.9},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
}
CASES = [
    (cls, options | fused)
    for cls in INPUTS
    for options in INPUTS[cls]
    for fused in ({}, {"fused": True})
]
each_case = pytest.mark.parametrize("cls", INPUTS)


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def options_of(cls):
    """Return the options of each case of a class."""
    return [options for case, options in CASES if case is cls]


def made(cls, count=0):
    """Make an optimizer of every kind, and one that is the same, for steps by torch.

    Both have made `count` steps.
    """
    for options in options_of(cls):
        pair = []
        for _ in range(2):
            generator = torch.Generator().manual_seed(0)
            values = [torch.randn(size, generator=generator) for size in SIZES]
            parameters = [torch.nn.Parameter(value.to(device_in_use())) for value in values]
            groups = [{"params": parameters[:1], "lr": 1e-3}, {"params": parameters[1:]}]
            pair.append(cls(groups, **{"lr": 1e-2, **options}))
        steps(pair, range(count))
        yield pair


def step(optimizer, seed, *, ours=True):
    """Make a step by fastamp, with a scaler and without one in turn, or by torch."""
    scale = 1024.0 if ours and seed % 2 else 1.0
    give(parameters_of(optimizer), scale, seed=seed)
    if not ours:
        optimizer.step()
        return
    if seed % 2:
        scaler = scaler_of(init_scale=scale)
        scaler.step(optimizer)
        way = scaler.last_step.way
    else:
        way = fastamp.optimizer_step(optimizer, max_norm=1e9).way
    assert way.startswith("native")


def steps(pair, seeds):
    for seed in seeds:
        step(pair[0], seed)
        step(pair[1], seed, ours=False)


def assert_same(one, other, **tolerance):
    """Compare parameters, options and states: their order, layout and values."""
    for p, q in zip(parameters_of(one), parameters_of(other), strict=True):
        assert_close(p, q, **tolerance)
    found = [optimizer.state_dict() for optimizer in (one, other)]
    assert str(found[0]["param_groups"]) == str(found[1]["param_groups"])
    states = [[(k, list(s.items())) for k, s in each["state"].items()] for each in found]
    layouts = [
        [(k, n, v if v is None else (v.dtype, v.shape, v.stride())) for k, s in each for n, v in s]
        for each in states
    ]
    assert layouts[0] == layouts[1]
    values = [[v for _, s in each for _, v in s if v is not None] for each in states]
    for p, q in zip(*values, strict=True):
        assert_close(p, q, **tolerance)


def assert_as_torch(pair, seeds=()):
    """Compare two optimizers after some more steps."""
    steps(pair, seeds)
    assert_same(*pair, rtol=1e-5, atol=1e-6)


def assert_goes_on_alike(optimizer, other):
    """Make steps by fastamp with each; there is no difference."""
    for seed in (11, 12):
        step(optimizer, seed)
        step(other, seed)
    assert_same(optimizer, other, rtol=0, atol=0)


def fresh(cls, optimizer, **options):
    """Make an optimizer of the same parameters' values, with options that a state has to bring."""
    copies = [copy.deepcopy(group["params"]) for group in optimizer.param_groups]
    for parameter in (p for group in copies for p in group):
        parameter.grad = None
    return cls([{"params": params} for params in copies], lr=0.5, **options)


@each_case
def test_the_state_has_torchs_names_order_and_layout(cls, compiled, device):
    for pair in made(cls):
        for seed in range(3):
            assert_as_torch(pair, [seed])


def through_a_file(state, *, weights_only):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


SAVES = [copy.deepcopy, *(partial(through_a_file, weights_only=only) for only in (True, False))]


@each_case
@pytest.mark.parametrize("save", SAVES, ids=["copied", "weights only", "pickled"])
def test_a_state_loads_into_a_new_optimizer(cls, save, compiled, device):
    for pair in made(cls, 3):
        saved = save(pair[0].state_dict())
        for options in ({}, {"foreach": True}):
            other = fresh(cls, pair[0], **options)
            other.load_state_dict(saved)
            assert_same(pair[0], other, rtol=0, atol=0)
        assert_goes_on_alike(pair[0], other)
        step(pair[1], 11, ours=False)
        step(pair[1], 12, ours=False)
        assert_as_torch(pair)


def without_later_options(saved):
    names = ["maximize", "foreach", "differentiable", "capturable", "amsgrad", "nesterov"]
    names += ["decoupled_weight_decay"]
    names += ["fused"] * ("momentum" not in saved["param_groups"][0])  # torch takes False there
    for group in saved["param_groups"]:
        for name in names:
            group.pop(name, None)


def with_counts_as_numbers(saved):
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = state["step"].item()


@each_case
@pytest.mark.parametrize("change", [without_later_options, with_counts_as_numbers])
@pytest.mark.parametrize("first_by_torch", [True, False])
def test_states_as_torch_has_saved_them_load(cls, change, first_by_torch, compiled, device):
    for pair in made(cls, 2):
        loaded = [fresh(cls, each) for each in pair]
        for each, other in zip(pair, loaded, strict=True):
            saved = copy.deepcopy(each.state_dict())
            change(saved)
            other.load_state_dict(saved)
            if first_by_torch:
                step(other, 5, ours=False)
        assert_as_torch(loaded, (6, 7))


def pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@each_case
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
def test_a_copy_has_all_attributes_and_goes_on_alike(cls, copied, compiled, device):
    for pair in made(cls):
        names = [sorted(vars(pair[0]))]
        steps(pair, range(2))
        other = copied(pair[0])
        names += [sorted(vars(each)) for each in (pair[0], pair[1])]
        assert names[0] == names[1] == names[2]
        public = [[n for n in dir(each) if not n.startswith("_")] for each in (*pair, other)]
        assert public[0] == public[1] == public[2]
        held = [each.__getstate__() for each in pair]  # what a pickle holds
        assert held[0].keys() == held[1].keys()
        kept = [[[*state] for state in each["state"].values()] for each in held]
        assert kept[0] == kept[1]
        assert str(other) == str(pair[0]) == str(pair[1])
        if copied is copy.copy:  # of the same parameters and states
            step(other, 11)
            assert_same(pair[0], other, rtol=0, atol=0)
        else:
            assert_goes_on_alike(pair[0], other)


@each_case
def test_steps_without_gradients_change_nothing(cls, compiled, device):
    for pair in made(cls, 2):
        for each in pair:
            each.zero_grad()
        before = [everything(parameters_of(each), each) for each in pair]
        fastamp.optimizer_step(pair[0], max_norm=1.0)
        pair[1].step()
        assert [everything(parameters_of(each), each) for each in pair] == before
        assert_as_torch(pair)


@each_case
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_zero_or_none_are_torchs(cls, set_to_none, compiled, device):
    for pair in made(cls):
        for seed in range(3):
            steps(pair, [seed])
            for each in pair:
                each.zero_grad(set_to_none=set_to_none)
                for p in parameters_of(each)[:2]:
                    p.grad = torch.zeros_like(p)
            assert fastamp.optimizer_step(pair[0], max_norm=1e9).way.startswith("native")
            pair[1].step()
        assert_as_torch(pair)


def test_a_step_in_two_calls_does_not_depend_on_the_default_dtype(backend):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), fastamp.GradScaler("cpu", 2.0)
    scaler.scale(parameter.sum()).backward()
    torch.set_default_dtype(torch.float64)
    try:
        norm = scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert norm.item() == pytest.approx(math.sqrt(3))
    assert parameter.tolist() == [0.0] * 3
