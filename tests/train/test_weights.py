"""Models whose state_dict leaves tensors out, as LoRA's: frozen ones may be missing, no others."""

from __future__ import annotations

import pytest
import torch
from support.trainable import CrashError, act_at, crash, make_model, names, outcome, run

import fastamp
from fastamp.train import CheckpointError


class Adapted(torch.nn.Module):
    """A frozen model with an adapter, of which the state holds only the adapter."""

    def __init__(self, seed=0):
        super().__init__()
        self.base = make_model().requires_grad_(False)
        torch.manual_seed(seed)
        self.adapter = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


class Overriding(Adapted):
    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in state.items() if "adapter" in name}


class Hooked(Adapted):
    def __init__(self, seed=0):
        super().__init__(seed)
        self._register_state_dict_hook(self._drop)

    @staticmethod
    def _drop(_module, state, _prefix, _metadata):
        for name in [name for name in state if "adapter" not in name]:
            del state[name]


KINDS = pytest.mark.parametrize("kind", [Overriding, Hooked])


@KINDS
def test_a_run_whose_checkpoints_leave_out_frozen_weights_resumes_to_the_bit(kind, tmp_path):
    fields = {"max_steps": 8, "checkpoint_every": 3}

    def train(folder, **more):
        return outcome(*run(folder, model=kind(), **fields | more))

    expected = train(None)
    with pytest.raises(CrashError):
        train(tmp_path, loss_fn=act_at(5, crash))
    state = torch.load(tmp_path / "step-00000003.pt", weights_only=True)
    assert sorted(state["model"]) == ["adapter.bias", "adapter.weight"]
    assert train(tmp_path) == expected


@KINDS
def test_frozen_weights_stay_as_they_are(kind, tmp_path):
    fastamp.Checkpointer(tmp_path, model=kind()).save(1)
    model = kind(seed=1)
    model.base[0].weight.zero_()
    assert fastamp.Checkpointer(tmp_path, model=model).restore() == 1
    assert torch.equal(model.adapter.weight, kind().adapter.weight)
    assert not model.base[0].weight.any()


@KINDS
@pytest.mark.parametrize("change", ["a trained parameter", "a buffer"])
def test_what_training_changes_may_not_be_missing(kind, change, tmp_path):
    model = kind()
    checkpointer = fastamp.Checkpointer(tmp_path, model=model)
    checkpointer.save(1)
    if change == "a buffer":
        model.base.append(torch.nn.BatchNorm1d(2, affine=False))
        model.base[3].register_buffer("constant", torch.ones(1), persistent=False)
    else:
        model.base[0].requires_grad_(True)
    gone = r"'base\.3\.\w+' and 2 more" if change == "a buffer" else r"'base\.0\.\w+' and 1 more"
    text = rf"nothing is saved: its model leaves out {gone}: model\.state_dict\(\) must"
    with pytest.raises(CheckpointError, match=text):
        checkpointer.save(2)
    assert names(tmp_path) == ["step-00000001.pt"]


def test_a_tensor_under_another_name_is_not_missing(tmp_path):
    class Renaming(torch.nn.Linear):
        def state_dict(self, *args, **kwargs):
            return {f"my.{k}": v for k, v in super().state_dict(*args, **kwargs).items()}

        def load_state_dict(self, state, strict=True):  # noqa: FBT002
            return super().load_state_dict({k[3:]: v for k, v in state.items()}, strict)

    fastamp.Checkpointer(tmp_path, model=Renaming(2, 1)).save(1)
    model = Renaming(2, 1)
    assert fastamp.Checkpointer(tmp_path, model=model).restore() == 1
