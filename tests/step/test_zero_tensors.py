"""torch's zero tensors have elements and no memory: everything takes them as torch does."""

import pytest
import torch
from support.gradients import parameters_with
from torch.utils.data import DataLoader, TensorDataset, default_collate

import fastamp


def zeros(*shape):
    return torch._efficientzerotensor(shape)


def test_their_norm_is_zero(backend):
    assert fastamp.get_total_norm([zeros(5), torch.ones(4)]).item() == pytest.approx(2.0)


@pytest.mark.parametrize("fused", [True, False])
def test_clips_and_steps_refuse_them_in_torchs_words(backend, fused):
    parameters = parameters_with(zeros(5), torch.ones(5))
    before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, fused=fused)
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        fastamp.clip_grad_norm_(parameters, 0.5)
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        scaler.step(optimizer, max_norm=0.5)
    assert all(map(torch.equal, before, parameters))


@pytest.mark.parametrize(
    "samples",
    [
        [zeros(5), zeros(5)],
        [torch.ones(5), zeros(5)],
        [torch.ones(5), zeros(100, 5)[-1]],  # its "address" is its offset of 1,980 bytes
    ],
)
def test_samples_are_collated(backend, samples):
    assert torch.equal(fastamp.BatchCollator()(samples), default_collate(samples))


def test_loaders_load_them(backend):
    dataset = TensorDataset(zeros(6, 2), torch.arange(6))
    for ours, theirs in zip(fastamp.DataLoader(dataset, 4), DataLoader(dataset, 4), strict=True):
        assert all(map(torch.equal, ours, theirs))
