"""Parameters and gradients for the tests of lean optimizers, and what their ranks run."""

from __future__ import annotations

import torch
from support.bits import bits
from support.devices import device_in_use
from torch.distributed.fsdp import fully_shard

import fastamp
from fastamp import _ops

SIZES = [(3,), (70, 5), (0,), (1025,), (7, 300), (33, 64), (2, 70_000), (5, 256), (4, 3, 5, 7)]
FORMATS = [
    (torch.float32, "float32", True),
    (torch.float32, "bfloat16", True),
    (torch.float32, "8bit", True),
    (torch.bfloat16, "float32", True),
    (torch.bfloat16, "bfloat16", False),
    (torch.bfloat16, "8bit", True),
    (torch.bfloat16, "8bit", False),
]


FAMILY = [("AdamW", *each) for each in FORMATS]
FAMILY += [(name, *each) for name in ("SGD", "Lion") for each in FORMATS if each[1] != "float32"]
OPTIONS = {
    "AdamW": ({"lr": 1e-2}, {"lr": 3e-3, "betas": (0.3, 0.99)}),
    "SGD": ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {"nesterov": True, "lr": 0.3}),
    "Lion": ({"lr": 1e-3, "weight_decay": 0.1}, {"lr": 3e-3, "betas": (0.3, 0.9)}),
}
"""Of an optimizer, and of its second group."""


def make(dtype, moments, exact, sizes=SIZES, name="AdamW", **options):
    """Return parameters, the same each time, and their optimizer with two groups."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(size, generator=generator).bfloat16() for size in sizes]
    made = [torch.nn.Parameter(each.to(device_in_use(), dtype)) for each in values]
    own, of_second = OPTIONS[name]
    groups = [{"params": made[:4]}, {"params": made[4:], **of_second}]
    options = {**own, "moments": moments, "exact": exact, **options}
    return made, getattr(fastamp, name)([g for g in groups if g["params"]], **options)


def give(parameters, step, *, bad=False):
    """Give parameters random gradients that bfloat16 can hold; a bad one has an infinity."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        parameter.grad = torch.empty_like(parameter).copy_((0.1 * grad).bfloat16())
    if bad:
        next(p for p in parameters if p.numel()).grad.view(-1)[0] = torch.inf


def copies_of(parameters):
    """Return parameters of the same values."""
    return [torch.nn.Parameter(each.detach().clone()) for each in parameters]


def same_bits(one, other):
    """Say whether two tensors have the same bits."""
    return bits(one.detach()).tobytes() == bits(other.detach()).tobytes()


def everything(parameters, optimizer):
    """Return the bits of parameters, gradients and states."""
    states = [v for p in parameters for v in optimizer.state.get(p, {}).values()]
    grads = [p.grad for p in parameters if p.grad is not None]
    return [bits(t.detach()).tobytes() for t in [*parameters, *grads, *states]]


def train(parameters, optimizer, steps, first=0, bad=(2,)):
    """Make clipped steps, some of them skipped, and return what they said."""
    said = []
    for step in range(first, first + steps):
        give(parameters, step, bad=step in bad)
        report = fastamp.optimizer_step(optimizer, max_norm=1.0)
        said.append((report.way, report.skipped))
    return said


def model_of(dtype=torch.bfloat16):
    """Return a network whose layers have 64 to 300 elements a row, and 5 rows or more."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 70), torch.nn.Tanh(), torch.nn.Linear(70, 300), torch.nn.Tanh()
    return torch.nn.Sequential(*layers, torch.nn.Linear(300, 5)).to(dtype)


def spread_model(count, name="AdamW", *, exact=True):
    """Return the network, under FSDP2 if there are several ranks, and its optimizer in 8 bits."""
    model = model_of()
    if count > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    options = {**OPTIONS[name][0], "moments": "8bit", "exact": exact}
    return model, getattr(fastamp, name)(model.parameters(), **options)


def checkpointed_run(folder, count, steps):
    """Train from the newest checkpoint of a folder on, on all ranks or alone; save at the end."""
    from torch.distributed.checkpoint import state_dict as states

    model, optimizer = spread_model(count)
    checkpointer = fastamp.Checkpointer(folder, model=model, optimizer=optimizer)
    first = checkpointer.restore() or 0
    step_all(model, optimizer, range(first, first + steps))
    checkpointer.save(first + steps)
    whole = states.StateDictOptions(full_state_dict=True)
    weights = states.get_model_state_dict(model, options=whole)
    return weights, states.get_optimizer_state_dict(model, optimizer, options=whole)


def sharded_run(count, state, steps, first, name="AdamW", exact=True):  # noqa: FBT002
    """Train a model under FSDP2 on all ranks, or alone; return whole weights and a whole state."""
    from torch.distributed.checkpoint import state_dict as states

    model, optimizer = spread_model(count, name, exact=exact)
    whole = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    if state is not None:
        weights, own = state
        states.set_model_state_dict(model, weights, options=whole)
        states.set_optimizer_state_dict(model, optimizer, own, options=whole)
    step_all(model, optimizer, range(first, first + steps))
    weights = states.get_model_state_dict(model, options=whole)
    own = states.get_optimizer_state_dict(model, optimizer, options=whole)
    return weights, own


def step_all(model, optimizer, steps):
    """Step with gradients that all ranks know."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator).bfloat16() * 0.1
            parameter.grad = _like(grad, parameter)
        fastamp.optimizer_step(optimizer, max_norm=1e9, zero_grad=True)


def assert_same(ours, theirs):
    """Compare trees of tensors bit for bit."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name])
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, list | tuple):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def sharded_run_of_fallback(count):
    """Make the same steps in torch's operators."""
    with _ops.use_only("fallback"):
        return sharded_run(count, None, 2, 0)


def _like(grad, parameter):
    if not hasattr(parameter, "placements"):
        return grad
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(grad, parameter.device_mesh, parameter.placements)


def tensor_parallel_refusal():
    """Return what 8 bits say of a parameter that is sharded by its second dimension."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4, 128), mesh, [Shard(1)]))
    try:
        fastamp.AdamW([parameter], moments="8bit")
    except ValueError as error:
        return str(error)
    return ""
