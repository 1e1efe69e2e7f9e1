"""The state of an optimizer that fastamp steps is torch's: it is saved, loaded and copied alike.

The options are those of torch's own tests, with the implementation left open and fused. What is
compared has taken the same steps by torch.
"""

import copy
import io
import pickle

import pytest
import torch
from support.bits import assert_close
from support.devices import device_in_use
from support.updates import everything, give, scaler_of
from torch.optim import SGD, Adam, AdamW

import fastamp

SIZES = [(10, 5), (5,), (0, 3), (600,)]
ADAM = [{}, {"weight_decay": 0.1, "maximize": True}, {"weight_decay": 0.1, "amsgrad": True}]
INPUTS = {
    Adam: ADAM,
    AdamW: ADAM,
    SGD: [
        {"lr": torch.tensor(0.001)},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
}
each_case = pytest.mark.parametrize("cls", INPUTS)


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def made(cls, count=0):
    """Make an optimizer of every kind, and one that is the same, for steps by torch.

    Both have made `count` steps.
    """
    for options in (given | fused for given in INPUTS[cls] for fused in ({}, {"fused": True})):
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
    elif seed % 2:
        scaler = scaler_of(init_scale=scale)
        scaler.step(optimizer)
        assert scaler.last_step.way == "native"
    else:
        assert fastamp.optimizer_step(optimizer, max_norm=1e9).way == "native"


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
    states = [[(k, n, v) for k, s in each["state"].items() for n, v in s.items()] for each in found]
    layouts = [
        [(k, n, v if v is None else (v.dtype, v.shape, v.stride())) for k, n, v in each]
        for each in states
    ]
    assert layouts[0] == layouts[1]
    for (_, _, p), (_, _, q) in zip(*states, strict=True):
        assert p is q is None or assert_close(p, q, **tolerance) is None


def assert_as_torch(pair, seeds=()):
    """Compare two optimizers after some more steps."""
    steps(pair, seeds)
    assert_same(*pair, rtol=1e-5, atol=1e-6)


def fresh(cls, optimizer, **options):
    """Make an optimizer of the same parameters' values, with options that a state has to bring."""
    copies = [copy.deepcopy(group["params"]) for group in optimizer.param_groups]
    for parameter in (p for group in copies for p in group):
        parameter.grad = None
    return cls([{"params": params} for params in copies], lr=0.5, **options)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each_case
@pytest.mark.parametrize("save", [copy.deepcopy, through_a_file])
def test_a_state_loads_into_a_new_optimizer(cls, save, compiled, device):
    for pair in made(cls, 3):
        assert_as_torch(pair)
        saved = save(pair[0].state_dict())
        other = fresh(cls, pair[0], foreach=True)
        other.load_state_dict(saved)
        assert_same(pair[0], other, rtol=0, atol=0)
        steps(pair, (11, 12))
        for seed in (11, 12):
            step(other, seed)
        assert_same(pair[0], other, rtol=0, atol=0)
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


@each_case
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_has_all_attributes_and_goes_on_alike(cls, copied, compiled, device):
    for pair in made(cls, 2):
        other = copied(pair[0])
        assert {*vars(pair[0])} == {*vars(pair[1])}
        names = [[n for n in dir(each) if not n.startswith("_")] for each in (*pair, other)]
        assert names[0] == names[1] == names[2]
        assert str(other) == str(pair[0]) == str(pair[1])
        held = [each.__getstate__()["state"] for each in pair]  # in a pickle
        assert [[*state] for state in held[0].values()] == [[*s] for s in held[1].values()]
        for seed in (11, 12):
            step(pair[0], seed)
            step(other, seed)
        assert_same(pair[0], other, rtol=0, atol=0)


@each_case
@pytest.mark.parametrize("kind", ["none", "zeros", "zeros of some"])
def test_steps_with_gradients_of_zero_or_none_are_torchs(cls, kind, compiled, device):
    for pair in made(cls, 2):
        for each in pair:
            each.zero_grad()
            for p in parameters_of(each)[: {"none": 0, "zeros": None}.get(kind, 2)]:
                p.grad = torch.zeros_like(p)
        before = everything(parameters_of(pair[0]), pair[0])
        fastamp.optimizer_step(pair[0], max_norm=1e9)
        pair[1].step()
        assert (everything(parameters_of(pair[0]), pair[0]) == before) >= (kind == "none")
        assert_as_torch(pair)
