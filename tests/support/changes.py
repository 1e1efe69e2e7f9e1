"""What may change of an optimizer's parameters, states and groups between two steps."""

import copy
from collections import defaultdict

import torch

SIZES = [(3,), (70, 5), (16, 16), (1025,), (64,)]
CHANGED = range(2, 4)
"""The steps before which something changes; some changes are undone before the second."""


def full(like, shape, value):
    """Return a tensor on the device of other ones."""
    return torch.full(shape, float(value), device=like[0].device)


def is_first(step):
    """Say whether a change is made for the first time."""
    return step == CHANGED[0]


def add_a_group(parameters, optimizer, step):
    parameters.append(torch.nn.Parameter(full(parameters, (7,), 1)))
    optimizer.add_param_group({"params": parameters[-1:], "lr": 0.5})


def add_to_a_group(parameters, optimizer, step):
    parameters.append(torch.nn.Parameter(full(parameters, (7,), 1)))
    optimizer.param_groups[0]["params"].append(parameters[-1])


def take_from_a_group(parameters, optimizer, step):
    optimizer.param_groups[1]["params"].pop()


def take_out_the_first(parameters, optimizer, step):
    del optimizer.param_groups[0]["params"][0]


def move_to_another_group(parameters, optimizer, step):
    first, second = optimizer.param_groups
    second["params"].insert(1, first["params"].pop())


def change_the_order(parameters, optimizer, step):
    optimizer.param_groups[1]["params"].reverse()


def replace_in_a_group(parameters, optimizer, step):
    parameters[1] = torch.nn.Parameter(full(parameters, (70, 5), step))
    optimizer.param_groups[0]["params"][1] = parameters[1]


def replace_a_list_of_parameters(parameters, optimizer, step):
    optimizer.param_groups[1]["params"] = parameters[3:4]


def replace_a_group(parameters, optimizer, step):
    optimizer.param_groups[1] = {**optimizer.param_groups[1], "lr": 0.1 * step}


def replace_all_groups(parameters, optimizer, step):
    optimizer.param_groups = [dict(g, lr=0.1 * step) for g in optimizer.param_groups[::-1]]


def empty_a_group(parameters, optimizer, step):
    optimizer.param_groups[0]["params"] = []


def remove_a_group(parameters, optimizer, step):
    if is_first(step):
        del optimizer.param_groups[0]


def remove_all_groups(parameters, optimizer, step):
    optimizer.param_groups.clear()


def replace_data(parameters, optimizer, step):
    parameters[1].data = parameters[1].data.clone() + 1


def exchange_data(parameters, optimizer, step):
    one, other = parameters[3].data, parameters[3].data.clone() + 1
    parameters[3].data = other
    one.zero_()


def replace_data_by_a_part(parameters, optimizer, step):  # at the same address
    parameters[3].data = parameters[3].data[: 1000 - step]
    optimizer.state.pop(parameters[3])


def change_the_shape(parameters, optimizer, step):
    view = parameters[1].data.view(10, 35) if is_first(step) else full(parameters, (4,), 1)
    parameters[1].data = view
    optimizer.state.pop(parameters[1])


def transpose_data(parameters, optimizer, step):  # a square: neither address nor shape changes
    parameters[2].data = parameters[2].data.t()


def change_the_dtype(parameters, optimizer, step):
    parameters[1].grad = None
    parameters[1].data = parameters[1].to(torch.bfloat16 if is_first(step) else torch.float32).data
    optimizer.state.pop(parameters[1])


def read_as_another_dtype(parameters, optimizer, step):  # at the same address
    if is_first(step):
        zeros = parameters[3].data.zero_().view(torch.bfloat16)
        parameters[3].grad = None
        parameters[3].data = zeros[:1025]
        optimizer.state.pop(parameters[3])


def halve_the_module(parameters, optimizer, step):
    if is_first(step):
        module = torch.nn.ParameterList(parameters)
        module.bfloat16()
        assert module[0] is parameters[0]
        optimizer.state.clear()


def swap_tensors(parameters, optimizer, step):
    parameters[1].grad = None
    other = torch.nn.Parameter(full(parameters, (70, 5), step))
    torch.utils.swap_tensors(parameters[1], other)


def swap_states(parameters, optimizer, step):
    exp_avg = optimizer.state[parameters[1]]["exp_avg"]
    torch.utils.swap_tensors(exp_avg, full(parameters, (70, 5), step))


def set_to_other_memory(parameters, optimizer, step):
    with torch.no_grad():
        parameters[1].set_(full(parameters, (70, 5), step))


def resize_the_storage(parameters, optimizer, step):
    values = parameters[1].detach().clone()
    parameters[1].untyped_storage().resize_(0)
    parameters[1].untyped_storage().resize_(2 * values.nbytes)
    with torch.no_grad():
        parameters[1].copy_(values)


def share_the_memory(parameters, optimizer, step):
    parameters[1].share_memory_()  # moves the values: the tensor, its storage stay


def load_state(parameters, optimizer, step):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


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


def replace_a_states_data(parameters, optimizer, step):
    exp_avg = optimizer.state[parameters[1]]["exp_avg"]
    exp_avg.data = exp_avg.data.clone() * 2


def replace_a_parameters_states(parameters, optimizer, step):
    state = optimizer.state[parameters[1]]
    optimizer.state[parameters[1]] = {k: v + 1 for k, v in state.items()}


def exchange_states(parameters, optimizer, step):
    state = optimizer.state[parameters[1]]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


def lose_a_state(parameters, optimizer, step):
    del optimizer.state[parameters[0]]


def clear_all_states(parameters, optimizer, step):
    optimizer.state.clear()


def clear_a_parameters_states(parameters, optimizer, step):
    optimizer.state[parameters[1]].clear()


def replace_all_states(parameters, optimizer, step):
    states = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    optimizer.state = defaultdict(dict, states)
    optimizer.state[parameters[1]]["exp_avg"].zero_()


def move_states(parameters, optimizer, step):  # to the end of the dict
    optimizer.state[parameters[0]] = optimizer.state.pop(parameters[0])


def count_anew(parameters, optimizer, step):
    optimizer.state[parameters[1]]["step"] = torch.tensor(100.0 * step)


def count_in_place(parameters, optimizer, step):
    optimizer.state[parameters[1]]["step"].fill_(50)


def share_a_count(parameters, optimizer, step):
    if is_first(step):
        ours, other = (optimizer.state[p] for p in parameters[3:])
        ours["step"].data = other["step"].data.clone()


def change_numbers(parameters, optimizer, step):
    options = {"lr": 0.1 * step, "betas": (0.5, 0.6), "weight_decay": 0.1 * step, "eps": 1e-3}
    optimizer.param_groups[1].update(options)


def change_the_learning_rate_in_place(parameters, optimizer, step):
    if is_first(step):
        optimizer.param_groups[1]["lr"] = torch.tensor(0.1)
    else:
        optimizer.param_groups[1]["lr"].fill_(0.5)


def change_maximize(parameters, optimizer, step):
    optimizer.param_groups[1]["maximize"] = is_first(step)


def change_the_kind_of_decay(parameters, optimizer, step):
    for group in optimizer.param_groups:
        if "decoupled_weight_decay" in group:  # torch 2.7
            group["decoupled_weight_decay"] = not is_first(step)


def begin_amsgrad(parameters, optimizer, step):
    optimizer.param_groups[1]["amsgrad"] = is_first(step)
    for parameter in optimizer.param_groups[1]["params"]:
        del optimizer.state[parameter]


def freeze(parameters, optimizer, step):
    parameters[1].requires_grad_(not is_first(step))


NOTICED = [
    add_a_group,
    add_to_a_group,
    take_from_a_group,
    take_out_the_first,
    move_to_another_group,
    change_the_order,
    replace_in_a_group,
    replace_a_list_of_parameters,
    replace_a_group,
    replace_all_groups,
    empty_a_group,
    remove_a_group,
    remove_all_groups,
    replace_data,
    exchange_data,
    replace_data_by_a_part,
    change_the_shape,
    transpose_data,
    change_the_dtype,
    read_as_another_dtype,
    halve_the_module,
    swap_tensors,
    swap_states,
    set_to_other_memory,
    resize_the_storage,
    share_the_memory,
    load_state,
    load_a_state_of_before,
    replace_a_state,
    replace_a_states_data,
    replace_a_parameters_states,
    exchange_states,
    lose_a_state,
    clear_all_states,
    clear_a_parameters_states,
    replace_all_states,
    move_states,
    count_anew,
    count_in_place,
    share_a_count,
    change_numbers,
    change_the_learning_rate_in_place,
    change_maximize,
    change_the_kind_of_decay,
    begin_amsgrad,
    freeze,
]
