"""What a step keeps of an optimizer: nothing that others share, that lives on, or that is stale."""

import copy
import gc
import weakref

import pytest
import torch
from support.updates import RULES, give, make

import fastamp

SIZES = [(3,), (70, 5), (1025,)]
FAR = 1e9
"""A norm that no gradients have: nothing is clipped."""


def native_step(optimizer):
    assert fastamp.optimizer_step(optimizer, FAR).way.startswith("native")


def torchs_step(optimizer):
    optimizer.step()


def as_by_torch(train):
    """Make a test of a training: steps that fastamp makes come to what torch's do."""

    def test(compiled, device):
        ours, expected = ([p.detach() for p in train(s)] for s in (native_step, torchs_step))
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)

    return test


def stepped(count=2):
    """Return parameters after native steps, and their optimizer."""
    parameters, optimizer = make("adamw", sizes=SIZES)
    for seed in range(count):
        give(parameters, seed=seed)
        native_step(optimizer)
    return parameters, optimizer


def assert_dead(references):
    gc.collect()
    assert [reference for reference in references if reference() is not None] == []


@as_by_torch
def test_optimizers_that_follow_each_other_are_not_mistaken(step):
    parameters, _ = make("sgd", sizes=[(5,), (700,)])
    for i in range(20):  # one may lie where the one before it did
        own, _ = make("sgd", sizes=[(10 + i,)])
        optimizer = torch.optim.SGD([*own, *parameters[i % 2 :]], lr=0.01 * i, momentum=0.9)
        for seed in (i, i + 1):
            give([*own, *parameters], seed=seed)
            step(optimizer)
        del own, optimizer
    return parameters


@pytest.mark.parametrize("name", RULES)
def test_an_optimizer_dies_with_all_that_it_has(name, compiled, device):
    parameters, optimizer = make(name, sizes=SIZES)
    for seed in range(3):
        give(parameters, seed=seed)
        fastamp.optimizer_step(optimizer, FAR)
    states = [v for state in optimizer.state.values() for v in state.values() if v is not None]
    found = [weakref.ref(each) for each in (optimizer, *parameters, *states)]
    del optimizer, parameters, states
    assert_dead(found)


def test_what_was_taken_out_of_an_optimizer_dies(compiled, device):
    parameters, optimizer = stepped(count=3)
    parameter = optimizer.param_groups[1]["params"].pop()
    assert parameter is parameters.pop()
    found = [parameter, *optimizer.state.pop(parameter).values(), parameter.grad]
    found += [optimizer.state[parameters[0]].pop("exp_avg")]
    optimizer.state[parameters[0]]["exp_avg"] = torch.zeros_like(parameters[0])
    found = [weakref.ref(each) for each in found]
    del parameter
    give(parameters)
    native_step(optimizer)  # what it kept is read anew
    assert_dead(found)


def test_memory_that_was_let_go_is_not_written(compiled, device):
    parameters, optimizer = stepped()
    before = [p.data for p in parameters]
    moments = [optimizer.state[p]["exp_avg"].data for p in parameters]
    for p in parameters:
        p.data = p.data.clone()
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()
    expected = copy.deepcopy([before, moments])
    give(parameters)
    native_step(optimizer)
    assert str([before, moments]) == str(expected)
    torch.testing.assert_close([before, moments], expected, rtol=0, atol=0)
    assert not any(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


def test_tensors_can_be_swapped_after_a_step(compiled, device):
    # It needs the only reference to a tensor, and none that is weak: modules are moved so.
    parameters, optimizer = stepped()
    for p in parameters:
        p.grad = None
        torch.utils.swap_tensors(p, torch.nn.Parameter(torch.ones_like(p)))
        state = optimizer.state[p]
        for name in state:
            torch.utils.swap_tensors(state[name], torch.ones_like(state[name]))
    give(parameters)
    native_step(optimizer)
    assert {s["step"].item() for s in optimizer.state.values()} == {2.0}


def test_memory_can_be_resized_after_a_step(compiled, device):
    # A storage that somebody else looks into cannot be.
    parameters, optimizer = stepped()
    for p in parameters:
        state = optimizer.state[p]
        for tensor in (p, state["exp_avg"], state["exp_avg_sq"]):
            tensor.untyped_storage().resize_(0)
            assert tensor.untyped_storage().nbytes() == 0
