"""Checkpoints of torch's ways: what torch restores, Checkpointer restores."""

from __future__ import annotations

import pytest
import torch
from support.trainable import make_model

import fastamp


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR"])
def test_the_schedule_may_be_made_after_the_restore(name, tmp_path):
    """As torch has it with `last_epoch=`; a schedule puts options into the groups."""
    model, make = make_model(), getattr(torch.optim.lr_scheduler, name)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for _ in range(2)]
    make(optimizers[0], 3, **{"total_steps": 9} if name == "OneCycleLR" else {})
    fastamp.Checkpointer(tmp_path, model=model, optimizer=optimizers[0]).save(1)
    assert fastamp.Checkpointer(tmp_path, model=model, optimizer=optimizers[1]).restore() == 1
    assert optimizers[0].param_groups[0].keys() == optimizers[1].param_groups[0].keys()


@pytest.mark.parametrize("kind", [fastamp.GradScaler, torch.amp.GradScaler])
def test_a_loss_scale_beyond_64_bits_is_restored(kind, tmp_path):
    """As after 94,000 steps in bf16, which overflows as late as float32."""
    model, scaler, other = make_model(), kind("cpu", init_scale=2.0**120), kind("cpu")
    fastamp.Checkpointer(tmp_path, model=model, scaler=scaler).save(1)
    assert fastamp.Checkpointer(tmp_path, model=model, scaler=other).restore() == 1
    assert other.state_dict() == scaler.state_dict()


class Counted(torch.nn.Linear):
    """Keeps a plain number in its state."""

    count = 0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "count"] = self.count

    def _load_from_state_dict(self, state, prefix, *args):
        self.count = state.pop(prefix + "count")
        super()._load_from_state_dict(state, prefix, *args)


def test_a_number_in_the_state_of_a_model_is_restored(tmp_path):
    model, other = Counted(2, 1), Counted(2, 1)
    model.count = -5
    fastamp.Checkpointer(tmp_path, model=model).save(1)
    assert fastamp.Checkpointer(tmp_path, model=other).restore() == 1
    assert other.count == -5


def test_a_module_without_shapes_yet_takes_those_of_its_checkpoint(tmp_path):
    model, other = torch.nn.LazyLinear(3), torch.nn.LazyLinear(3)
    model(torch.ones(2, 4))
    fastamp.Checkpointer(tmp_path, model=model).save(1)
    assert fastamp.Checkpointer(tmp_path, model=other).restore() == 1
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(fastamp.CheckpointError, match=r"unexpected keys: bias"):
        fastamp.Checkpointer(tmp_path, model=torch.nn.LazyLinear(3, bias=False)).restore()


def step_sparsely(model, optimizer):
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_sparse_momentum_is_restored(tmp_path):
    model, other = (torch.nn.Embedding(10, 4, sparse=True) for _ in range(2))
    pairs = [(m, torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)) for m in (model, other)]
    step_sparsely(*pairs[0])
    fastamp.Checkpointer(tmp_path, model=model, optimizer=pairs[0][1]).save(1)
    assert fastamp.Checkpointer(tmp_path, model=other, optimizer=pairs[1][1]).restore() == 1
    for pair in pairs:
        step_sparsely(*pair)
    assert torch.equal(model.weight, other.weight)


class Drifting(torch.optim.SGD):
    """An optimizer whose options are its own business."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0] |= {"drift": 0.0, "best": None}


def test_an_optimizer_of_ones_own_may_keep_any_options(tmp_path):
    model = make_model()
    optimizer, other = Drifting(model.parameters()), Drifting(model.parameters())
    optimizer.param_groups[0] |= {"drift": -0.5, "best": 3, "more": [-1]}
    fastamp.Checkpointer(tmp_path, model=model, optimizer=optimizer).save(1)
    assert fastamp.Checkpointer(tmp_path, model=model, optimizer=other).restore() == 1
    options = other.param_groups[0]
    assert (options["drift"], options["best"], options["more"]) == (-0.5, 3, [-1])
