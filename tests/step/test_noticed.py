"""Whatever changes between two steps, the next one sees: parameters, states and groups."""

import pytest
import torch
from support.changes import (
    CHANGED,
    NOTICED,
    SIZES,
    change_the_dtype,
    halve_the_module,
    read_as_another_dtype,
    remove_all_groups,
    transpose_data,
)
from support.python_update import python_step
from support.updates import everything, give, make

import fastamp

STEPS = 7
FAR = 1e9
"""A norm that no gradients have: nothing is clipped."""
COARSE = [change_the_dtype, read_as_another_dtype, halve_the_module]
"""torch's loop rounds a 16-bit parameter after each operation."""
REFUSED = {transpose_data: CHANGED[:1], remove_all_groups: range(CHANGED[0], STEPS)}
"""Steps by torch: the states lie in another order than the parameter; there is no parameter."""


def torchs_step(optimizer, _max_norm):
    optimizer.step()


def run(change, make_step, device):
    """Train with changes; return the values and the bits of all that is left, and the ways."""
    parameters, optimizer = make("adamw", sizes=SIZES, device=device)
    ways = []
    for step in range(STEPS):
        if step in CHANGED:
            change(parameters, optimizer, step)
        give(parameters, seed=step)
        is_torchs = step in REFUSED.get(change, ())
        chosen = fastamp.optimizer_step if is_torchs and make_step is python_step else make_step
        ways.append(getattr(chosen(optimizer, FAR), "way", ""))
    states = [sorted(optimizer.state[p].items()) for p in parameters if p in optimizer.state]
    values = [*parameters, *(v for state in states for _, v in state)]
    return [v.detach().float() for v in values], everything(parameters, optimizer), ways


@pytest.mark.parametrize("change", NOTICED)
def test_every_change_between_steps_is_noticed(change, compiled, device):
    values, bits, ways = run(change, fastamp.optimizer_step, device)
    expected, *_ = run(change, torchs_step, device)
    near = {"rtol": 1e-5, "atol": 2e-2 if change in COARSE else 1e-6}
    torch.testing.assert_close(values, expected, **near, check_device=False)  # of torch's counts
    native = [way.startswith("native") for way in ways]
    assert native == [step not in REFUSED.get(change, ()) for step in range(STEPS)]
    if change in REFUSED and device == "cuda":
        return  # torch's own steps on a GPU have other bits than on a CPU
    assert run(change, python_step, "cpu")[1] == bits
