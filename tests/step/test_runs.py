"""Whole training runs: the same parameters, state, scale and schedule as stock code."""

import functools

import pytest
import torch
from support.training import (
    MODELS,
    OPTIMIZERS,
    OVERFLOWS,
    assert_same_bits,
    make_scaler,
    mlp,
    our_step,
    stock_step,
    tensors_in,
    train,
)

import fastamp


@functools.cache
def run(cls, step, device, kind, name, max_norm):
    """Train a model; a run of stock is the same beside each backend."""
    model, data = MODELS[kind](device)
    return train(model, data, OPTIMIZERS[name], make_scaler(cls, device), step(max_norm))


@pytest.mark.pairwise
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_whole_runs_equal_the_stock_sequence(backend, device, kind, name, max_norm):
    stock = run(torch.amp.GradScaler, stock_step, device, kind, name, max_norm)
    ours = run.__wrapped__(fastamp.GradScaler, our_step, device, kind, name, max_norm)
    assert ours["skipped"] == stock["skipped"] == list(OVERFLOWS)
    assert ours["scales"] == stock["scales"]
    assert ours["lr"] == stock["lr"]
    # One multiply or divide instead of two multiplies, and an exact norm: up to 2 ulps (2.4e-7) in
    # a gradient at each step, which 50 steps add up to less than 1e-5. The models have no biases
    # whose true gradient is 0: Adam would blow their rounding noise up to whole steps.
    for a, b in zip(ours["parameters"], stock["parameters"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(tensors_in(ours["state"]), tensors_in(stock["state"]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, check_device=False)  # of counts


@pytest.mark.parametrize("name", ["adamw foreach", "own"])  # other updates are fastamp's own
def test_without_clipping_a_power_of_two_leaves_no_difference_at_all(backend, device, name):
    results = []
    for cls, step in ((torch.amp.GradScaler, stock_step), (fastamp.GradScaler, our_step)):
        model, data = mlp(device)
        scaler = make_scaler(cls, device)
        results.append(train(model, data, OPTIMIZERS[name], scaler, step(None)))
    assert_same_bits(results[0]["parameters"], results[1]["parameters"])
    assert_same_bits(results[0]["state"], results[1]["state"])
