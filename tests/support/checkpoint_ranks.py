"""What ranks do with a Checkpointer, for the tests of train/."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from support import lean
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastamp
from fastamp.train import ranks

N = 12


def make_model(kind, seed):
    """Return a network whose rows no number of ranks divides; its layers share a weight."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(*shape) for shape in ((5, 7), (7, 7), (7, 7), (7, 3))]
    model = torch.nn.Sequential(*layers).bfloat16()
    model[2].weight = model[1].weight
    if kind == "fsdp":
        return fully_shard(model)
    return DistributedDataParallel(model) if kind == "ddp" else model


def train(folder, kind, steps):
    """Train from the newest checkpoint on with gradients that all ranks know; save at the end.

    Return the whole weights, those of a module that is another part, and the optimizer's state.
    """
    seed = dist.get_rank() if dist.is_initialized() else 0
    model, twin = make_model(kind, seed), make_model(kind, seed + 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "twin": twin}
    checkpointer = fastamp.Checkpointer(folder, **parts)
    first = checkpointer.restore()
    if first is None:
        first = 0
        for module, own_seed in ((model, 0), (twin, 1)):
            whole = states.StateDictOptions(full_state_dict=True)
            weights = make_model(None, own_seed).state_dict()
            states.set_model_state_dict(module, weights, options=whole)
    lean.step_all(model, optimizer, range(first, first + steps))
    checkpointer.save(first + steps)
    whole = states.StateDictOptions(full_state_dict=True)
    found = [states.get_model_state_dict(each, options=whole) for each in (model, twin)]
    return [*found, states.get_optimizer_state_dict(model, optimizer, options=whole)]


def draw_and_load(folder, steps):
    """Take batches from the newest checkpoint on; return them, and what is drawn beside them."""
    torch.manual_seed(dist.get_rank())
    loader = fastamp.DataLoader(torch.arange(N), 2, shuffle=True, seed=3, shard=True)
    model = make_model("ddp", 0)
    checkpointer = fastamp.Checkpointer(folder, model=model, loader=loader)
    step, found = checkpointer.restore() or 0, []
    for batch in loader:
        found.append((batch.tolist(), torch.rand(1).item()))
        step += 1
        if len(found) == steps:
            break
        checkpointer.save(step)
    return found


def save_on_some(folder, who):
    """Return the error of a save that only some ranks call."""
    checkpointer = fastamp.Checkpointer(folder, model=make_model("ddp", 0))
    dist.barrier()
    if dist.get_rank() not in who:
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "WAIT_S", 1.0)
        return error_of(checkpointer.save, 1)


def save_on_a_full_disk(folder, kind):
    """Return the error of a save that the first rank's disk refuses, after one that it takes."""
    checkpointer = fastamp.Checkpointer(folder, model=make_model(kind, 0))
    checkpointer.save(1)
    with pytest.MonkeyPatch.context() as patch:
        save = torch.save

        def save_in_full(state, file, **options):  # torch.distributed's has options
            with open("/dev/full", "wb") as full:  # noqa: PTH123
                save(state, file if options else full, **options)

        patch.setattr(torch, "save", save_in_full)
        found = error_of(checkpointer.save, 2)
    checkpointer.save(3)
    return found


class OwnError(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self):
        super().__init__("of the user's own")
        self.lock = threading.Lock()


class Refusing:
    """A part whose state is refused, or not to be had."""

    def __init__(self, problem):
        self.problem = problem

    def state_dict(self):
        if isinstance(self.problem, type):
            raise self.problem
        return {"value": {"a function": lambda: 0}.get(self.problem)}

    def load_state_dict(self, state):
        pass


def save_what_is_refused(folder, name, problem, who):
    """Return the error of a save where some ranks have a part that cannot be saved."""
    part = Refusing(problem if dist.get_rank() in who else None)
    checkpointer = fastamp.Checkpointer(folder, model=torch.nn.Linear(2, 1), **{name: part})
    found = error_of(checkpointer.save, 1)
    part.problem = None
    checkpointer.save(2)
    return found


def restore_with_warnings(folder, kind):
    """Return the step that is restored, and the warnings of this rank."""
    checkpointer = fastamp.Checkpointer(folder, model=make_model(kind, 0))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = checkpointer.restore()
    return step, [str(one.message) for one in warned if one.category is UserWarning]


def error_of(function, *args):
    """Return the kind and the text of the error that a function raises."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error)
    return None
