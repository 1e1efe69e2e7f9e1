"""Whatever changes between two steps, the next one sees: each reads everything anew."""

from collections import defaultdict

import pytest
import torch
from support.python_update import python_step
from support.updates import everything, give, make

import fastamp

SIZES = [(3,), (70, 5), (16, 16), (1025,), (64,)]
STEPS = 7
CHANGED = range(2, 4)
"""The steps before which something changes; some changes are undone before the second."""
FAR = 1e9
"""A norm that no gradients have: nothing is clipped."""


def full(like, shape, value):
    """Return a tensor on the device of other ones."""
    return torch.full(shape, float(value), device=like[0].device)


def is_first(step):
    """Say whether a change is made for the first time."""
    return step == CHANGED[0]


def add_a_group(parameters, optimizer, step):
    parameters.append(torch.nn.Parameter(full(parameters, (7,), 1)))
    optimizer.add_param_group({"params": parameters[-1:], "lr": 0.5})


def take_from_a_group(parameters, optimizer, step):
    optimizer.param_groups[1]["params"].pop()


def change_the_order(parameters, optimizer, step):
    optimizer.param_groups[1]["params"].reverse()


def replace_in_a_group(parameters, optimizer, step):
    parameters[1] = torch.nn.Parameter(full(parameters, (70, 5), step))
    optimizer.param_groups[0]["params"][1] = parameters[1]


def remove_all_groups(parameters, optimizer, step):
    optimizer.param_groups.clear()


def replace_data(parameters, optimizer, step):
    parameters[1].data = parameters[1].data.clone() + 1


def transpose_data(parameters, optimizer, step):  # a square: neither address nor shape changes
    parameters[2].data = parameters[2].data.t()


def change_the_dtype(parameters, optimizer, step):
    parameters[1].grad = None
    parameters[1].data = parameters[1].to(torch.bfloat16 if is_first(step) else torch.float32).data
    optimizer.state.pop(parameters[1])


def set_to_other_memory(parameters, optimizer, step):
    with torch.no_grad():
        parameters[1].set_(full(parameters, (70, 5), step))


def swap_tensors(parameters, optimizer, step):
    parameters[1].grad = None
    other = torch.nn.Parameter(full(parameters, (70, 5), step))
    torch.utils.swap_tensors(parameters[1], other)


def load_a_state_of_before(parameters, optimizer, step):
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"] * 3
        state["step"] = state["step"] + 10
    for group in saved["param_groups"]:
        group["lr"] *= 2
    optimizer.load_state_dict(saved)


def replace_a_state(parameters, optimizer, step):
    state = optimizer.state[parameters[1]]
    state["exp_avg"] = state["exp_avg"].clone() * 2


def lose_a_state(parameters, optimizer, step):
    del optimizer.state[parameters[0]]


def replace_all_states(parameters, optimizer, step):
    states = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    optimizer.state = defaultdict(dict, states)
    optimizer.state[parameters[1]]["exp_avg"].zero_()


def count_in_place(parameters, optimizer, step):
    optimizer.state[parameters[1]]["step"].fill_(50)


def change_numbers(parameters, optimizer, step):
    options = {"lr": 0.1 * step, "betas": (0.5, 0.6), "weight_decay": 0.1 * step, "eps": 1e-3}
    optimizer.param_groups[1].update(options)


def change_the_learning_rate_in_place(parameters, optimizer, step):
    if is_first(step):
        optimizer.param_groups[1]["lr"] = torch.tensor(0.1)
    else:
        optimizer.param_groups[1]["lr"].fill_(0.5)


NOTICED = [
    add_a_group,
    take_from_a_group,
    change_the_order,
    replace_in_a_group,
    remove_all_groups,
    replace_data,
    transpose_data,
    change_the_dtype,
    set_to_other_memory,
    swap_tensors,
    load_a_state_of_before,
    replace_a_state,
    lose_a_state,
    replace_all_states,
    count_in_place,
    change_numbers,
    change_the_learning_rate_in_place,
]
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
    # torch's loop rounds a 16-bit parameter after each operation.
    near = {"rtol": 1e-5, "atol": 2e-2 if change is change_the_dtype else 1e-6}
    torch.testing.assert_close(values, expected, **near, check_device=False)  # of torch's counts
    native = [way.startswith("native") for way in ways]
    assert native == [step not in REFUSED.get(change, ()) for step in range(STEPS)]
    if change in REFUSED and device == "cuda":
        return  # torch's own steps on a GPU have other bits than on a CPU
    assert run(change, python_step, "cpu")[1] == bits
