"""Whole training runs: the same parameters, state, scale and schedule as stock code."""

import functools
import math
import pickle
import warnings

import pytest
import torch
from support.gradients import random
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


@pytest.mark.parametrize("first", [torch.amp.GradScaler, fastamp.GradScaler])
def test_a_state_continues_in_the_other_scaler(backend, device, first):
    second = fastamp.GradScaler if first is torch.amp.GradScaler else torch.amp.GradScaler
    runs = []
    for handed_over in (False, True):
        model, data = mlp(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        scaler = make_scaler(first, device)
        for i, batch in enumerate(data[:20]):
            if handed_over and i == 10:
                state = scaler.state_dict()
                scaler = second(device)
                scaler.load_state_dict(pickle.loads(pickle.dumps(state)))
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            if i in OVERFLOWS or i == 12:
                next(model.parameters()).grad.view(-1)[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
        runs.append([scaler.state_dict(), [p.detach() for p in model.parameters()]])
    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[0][1], runs[1][1])


def test_the_gradient_penalty_recipe(backend, device):
    results = []
    for cls in (torch.amp.GradScaler, fastamp.GradScaler):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        scaler = make_scaler(cls, device)
        for i in range(4):
            optimizer.zero_grad()
            loss = model(random((3, 4), torch.float32, device, seed=i)).square().mean()
            scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            penalty = sum((g / scaler.get_scale()).square().sum() for g in scaled)
            scaler.scale(loss + penalty).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach() for p in model.parameters()])
    assert_same_bits(*results)


def test_a_compiled_training_step_gives_the_same_result(backend, device, small):
    if small:
        pytest.skip("torch.compile takes seconds, and the kernels are behind one operator")
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scaler = make_scaler(fastamp.GradScaler, device)

        def step(batch, model=model, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer, max_norm=0.1)
            scaler.update()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo's own, about what it leaves out of the graph
            run = torch.compile(step, backend="eager") if compiled else step
            for i in range(3):
                run(random((4, 8), torch.float32, device, seed=i))
        results.append([p.detach() for p in model.parameters()])
    assert_same_bits(*results)
