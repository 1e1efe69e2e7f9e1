"""Between two steps nothing is kept that can be stale, that others share, or that lives on."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.python_update import python_step
from support.updates import everything, give, make

import fastamp
from fastamp import _ops

SIZES = [(3,), (70, 5), (16, 16), (1025,), (16, 16)]
STEPS = 6
CHANGED = range(2, 4)
"""The steps before which something changes; some changes are undone before the second."""
FAR = 1e9
"""A norm that no gradients have: nothing is clipped."""


def is_first(step):
    """Say whether a change is made for the first time."""
    return step == CHANGED[0]


def full(like, value):
    return torch.full_like(like, float(value)).detach()


def add_a_group(parameters, optimizer, step):
    parameters.append(torch.nn.Parameter(full(parameters[0], 1)))
    optimizer.add_param_group({"params": parameters[-1:], "lr": 0.5})


def replace_in_a_group(parameters, optimizer, step):
    parameters[1] = torch.nn.Parameter(full(parameters[1], step))
    optimizer.param_groups[0]["params"][1] = parameters[1]


def transpose_data(parameters, optimizer, step):  # a square: neither address nor shape changes
    parameters[2].data = parameters[2].data.t()


def change_the_dtype(parameters, optimizer, step):
    parameters[1].grad = None
    parameters[1].data = parameters[1].to(torch.bfloat16 if is_first(step) else torch.float32).data
    optimizer.state.pop(parameters[1])


def set_to_other_memory(parameters, optimizer, step):
    with torch.no_grad():
        parameters[1].set_(full(parameters[1], step))


def lose_a_state(parameters, optimizer, step):
    del optimizer.state[parameters[0]]


def change_the_learning_rate_in_place(parameters, optimizer, step):
    if is_first(step):
        optimizer.param_groups[1]["lr"] = torch.tensor(0.1)
    else:
        optimizer.param_groups[1]["lr"].fill_(0.5)


def hook_a_step(parameters, optimizer, step):
    if is_first(step):
        optimizer.handle = optimizer.register_step_post_hook(lambda *_: None)
    else:
        optimizer.handle.remove()


def give_none_to_some(parameters, step):
    for p in parameters[step % 3 :: 2]:
        p.grad = None


def give_a_strided_one(parameters, step):
    parameters[1].grad = parameters[1].grad.t().contiguous().t()


def give_the_parameters_own_memory(parameters, step):
    parameters[3].grad = parameters[3].detach()


BETWEEN = [
    add_a_group,
    replace_in_a_group,
    transpose_data,
    change_the_dtype,
    set_to_other_memory,
    lose_a_state,
    change_the_learning_rate_in_place,
    hook_a_step,
]
OF_GRADIENTS = [
    give_none_to_some,
    give_a_strided_one,
    give_the_parameters_own_memory,
]
TORCHS = {
    transpose_data: CHANGED[:1],  # the states lie in another order than the parameter
    hook_a_step: CHANGED[:1],
    give_a_strided_one: CHANGED,
    give_the_parameters_own_memory: CHANGED,
}
"""The steps that are torch's."""


def torchs_step(optimizer, _max_norm=FAR):
    optimizer.step()


def run(change, make_step, device):
    """Train with changes; return the values and the bits of the results, and the ways."""
    parameters, optimizer = make("adamw", sizes=SIZES, device=device)
    ways = []
    for step in range(STEPS):
        if step in CHANGED and change in BETWEEN:
            change(parameters, optimizer, step)
        give(parameters, seed=step)
        if step in CHANGED and change in OF_GRADIENTS:
            change(parameters, step)
        is_torchs = step in TORCHS.get(change, ())
        chosen = fastamp.optimizer_step if is_torchs and make_step is python_step else make_step
        ways.append(getattr(chosen(optimizer, FAR), "way", ""))
    states = [sorted(optimizer.state[p].items()) for p in parameters if p in optimizer.state]
    values = [*parameters, *(v for state in states for _, v in state)]
    return [v.detach().float() for v in values], everything(parameters, optimizer), ways


@pytest.mark.parametrize("change", [*BETWEEN, *OF_GRADIENTS], ids=lambda change: change.__name__)
def test_every_change_between_steps_is_noticed(change, compiled, device):
    values, bits, ways = run(change, fastamp.optimizer_step, device)
    expected, *_ = run(change, torchs_step, device)
    # torch's loop rounds a 16-bit parameter after each operation.
    near = {"rtol": 1e-5, "atol": 2e-2 if change is change_the_dtype else 1e-6}
    torch.testing.assert_close(values, expected, **near, check_device=False)  # of torch's counts
    native = [way.startswith("native") for way in ways]
    assert native == [step not in TORCHS.get(change, ()) for step in range(STEPS)]
    if change in TORCHS and device == "cuda":
        return  # torch's own steps on a GPU have other bits than on a CPU
    assert run(change, python_step, "cpu")[1] == bits


@pytest.mark.parametrize(
    "change",
    [
        lambda group, _: group.update(lr="fast"),
        lambda group, _: group.update(betas=0.9),
        lambda group, _: group.update(amsgrad=True),
        lambda _, state: state.pop("exp_avg_sq"),
        lambda _, state: state.pop("step"),
        lambda _, state: state.update(exp_avg=state["exp_avg"].bfloat16()),
    ],
    ids=["lr", "betas", "amsgrad", "state", "step", "dtype"],
)
def test_an_error_of_torchs_in_mid_run_is_the_same_and_the_next_step_is_right(change, compiled):
    results = []
    for step in (fastamp.optimizer_step, torch.optim.AdamW.step):
        parameters, optimizer = make("adamw", sizes=SIZES)
        for seed in range(2):
            give(parameters, seed=seed)
            fastamp.optimizer_step(optimizer)
        give(parameters, seed=2)
        change(optimizer.param_groups[0], optimizer.state[parameters[0]])
        with pytest.raises((KeyError, TypeError, RuntimeError)) as caught:
            step(optimizer)
        results.append([type(caught.value), str(caught.value), everything(parameters, optimizer)])
        optimizer.param_groups[0].update(lr=0.1, betas=(0.9, 0.99), amsgrad=False)
        optimizer.state.clear()
        fastamp.optimizer_step(optimizer)
        results[-1].append(everything(parameters, optimizer))
    assert results[0] == results[1]


def test_other_threads_backends_and_optimizers_may_step_in_between(compiled, device):
    found = []
    for is_ours in (True, False):
        parameters, one = make("adamw", sizes=[*SIZES, (100_000,)])
        own, _ = make("sgd", sizes=[(5,), (700,)])
        other = torch.optim.SGD(own, lr=0.1, momentum=0.9)
        third = torch.optim.SGD(parameters[::-1], lr=0.1, momentum=0.9)
        step = fastamp.optimizer_step if is_ours else torchs_step
        for i in range(12):
            give([*parameters, *own], seed=i)
            torch.set_num_threads(1 + i % 2)
            if i % 6 == 1:
                with ThreadPoolExecutor(1) as pool:  # another thread each time
                    pool.submit(step, one, FAR).result()
            elif i % 6 == 2 and is_ours:
                step([one, other], FAR)
            elif i % 6 == 2:
                step(one), step(other)
            elif i % 6 == 3:
                step(third, FAR)
            elif i % 6 == 4:
                with _ops.use_only("fallback"):
                    step(one, FAR)
            else:
                step(one, FAR)
        found.append([p.detach() for p in (*parameters, *own)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def stepped(name):
    """Return parameters after native steps, and their optimizer."""
    parameters, optimizer = make(name, sizes=SIZES)
    for seed in range(2):
        give(parameters, seed=seed)
        assert fastamp.optimizer_step(optimizer, FAR).way == "native"
    return parameters, optimizer


@pytest.mark.parametrize("name", ["adam, maximize", "sgd, nesterov"])
def test_an_optimizer_dies_with_all_that_it_has(name, compiled, device):
    parameters, optimizer = stepped(name)
    states = [v for state in optimizer.state.values() for v in state.values()]
    references = [weakref.ref(each) for each in (optimizer, *parameters, *states)]
    del optimizer, parameters, states
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_tensors_can_be_swapped_and_their_memory_freed_after_a_step(compiled, device):
    # A swap needs the only reference to a tensor, and none that is weak: modules are moved so.
    # A storage that somebody else looks into cannot be resized.
    parameters, optimizer = stepped("adamw")
    for p in parameters:
        p.grad = None
        state = optimizer.state[p]
        for name in state:
            torch.utils.swap_tensors(state[name], torch.ones_like(state[name]))
        old = torch.nn.Parameter(torch.ones_like(p))
        torch.utils.swap_tensors(p, old)
        old.untyped_storage().resize_(0)
    give(parameters)
    assert fastamp.optimizer_step(optimizer, FAR).way == "native"
    assert {s["step"].item() for s in optimizer.state.values()} == {2.0}
