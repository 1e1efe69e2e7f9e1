"""The bench's one training loop: what a step computes, and how a model is scored."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import fastamp
from fastamp.bench import tasks, text
from fastamp.bench.arms import Arm
from fastamp.bench.gpt import GPT, Shape
from fastamp.bench.jobs import language
from fastamp.bench.trainer import Trainer

SHAPE = Shape(layers=2, heads=2, width=32, block_size=16)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)) * 50)
    return text.load_corpus(str(tmp_path), block_size=SHAPE.block_size)


def draw_batches(corpus):
    """Yield batches of 4 windows."""
    return iter(DataLoader(fastamp.TokenDataset(corpus.train, 16), 4))


@pytest.fixture
def training(corpus):
    make = lambda _, seed: language.make_model(seed, SHAPE, 4, corpus)  # noqa: E731
    return tasks.make_training(make, "cpu", 0)


def begin(training, **arm):
    """Return a trainer over a copy of the model."""
    own = replace(training, model=copy.deepcopy(training.model))
    return Trainer(Arm(name="", task="", **arm), own, "cpu")


def test_a_byte_changes_no_prediction_before_it():
    torch.manual_seed(0)
    model = GPT(SHAPE)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=2).all()


def test_autocast_reaches_the_residual_stream(training):
    seen = []
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    for precision in ("fp32", "bf16"):
        run = begin(training, precision=precision)
        run.model.norm.register_forward_hook(lambda _module, args, _out: seen.append(args[0].dtype))
        with run.autocast():
            run.model(tokens)
    assert seen == [torch.float32, torch.bfloat16]


def test_torchs_arm_is_a_plain_loop_to_the_last_bit(corpus, training):
    model = training.model
    torch.nn.init.normal_(model.head.weight)  # steep enough for the clip to act
    run = begin(training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * 256 / 32, fused=True)
    batches = draw_batches(corpus)
    for tokens, targets in itertools.islice(batches, 3):
        run.train([(tokens, targets)])
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        optimizer.step()
    for ours, plain in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_both_steps_end_at_the_same_weights_and_fastamps_frees_gradients(
    corpus, training, precision
):
    torch.nn.init.normal_(training.model.head.weight, std=0.3)  # steep enough for the clip to act
    batch = next(draw_batches(corpus))
    ends = {}
    for is_ours in (False, True):
        run = begin(training, is_ours=is_ours, precision=precision)
        steps = 2 if precision == "fp32" else 1  # Adam magnifies the rounding of tiny gradients
        run.train([batch] * steps)
        assert run.scaler.is_enabled() == (precision == "fp16")
        assert isinstance(run.scaler, fastamp.GradScaler) == is_ours
        assert not run.has_skipped()
        assert all((p.grad is None) == is_ours for p in run.parameters)
        ends[is_ours] = torch.cat([p.detach().flatten() for p in run.parameters])
    torch.testing.assert_close(ends[True], ends[False], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("is_ours", [False, True])
def test_every_step_clips_what_the_optimizer_holds_and_no_other_parameter(is_ours, precision):
    torch.manual_seed(0)
    body, head = nn.Linear(8, 4), nn.Linear(4, 1)
    model, rows = nn.Sequential(body, head), 100 * torch.randn(16, 8)
    run = begin(
        tasks.Training(
            model=model,
            data=[],
            loss=functional.mse_loss,
            optimizer=lambda model: torch.optim.SGD(model[1].parameters(), lr=1.0),
            max_norm=0.1,
        ),
        is_ours=is_ours,
        precision=precision,
    )
    run.scaler = type(run.scaler)("cpu", init_scale=2.0, enabled=precision == "fp16")
    run.train([(rows, torch.zeros(16, 1))])
    assert run.model[0].weight.grad.norm() > 1
    pairs = zip(run.model[1].parameters(), head.parameters(), strict=True)
    moved = torch.cat([(new - old).detach().flatten() for new, old in pairs])
    assert moved.norm().item() == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("is_ours", [False, True])
def test_several_optimizers_are_clipped_to_one_norm(is_ours):
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)), 100 * torch.randn(16, 8)
    make = lambda model: [torch.optim.SGD(each.parameters(), lr=1.0) for each in model]  # noqa: E731
    whole = {"loss": functional.mse_loss, "optimizer": make, "max_norm": 0.1}
    run = begin(tasks.Training(model=model, data=[], **whole), is_ours=is_ours)
    run.train([(rows, torch.zeros(16, 1))])
    pairs = zip(run.model.parameters(), model.parameters(), strict=True)
    moved = torch.cat([(new - old).detach().flatten() for new, old in pairs])
    assert moved.norm().item() == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_step_with_an_overflow_is_counted_as_skipped_once(corpus, training, is_ours):
    run = begin(training, is_ours=is_ours, precision="fp16")
    batches = draw_batches(corpus)
    run.train([next(batches)])
    assert not run.has_skipped()
    hook = run.parameters[0].register_hook(lambda grad: grad * math.inf)
    run.train([next(batches)])
    hook.remove()
    assert run.has_skipped()
    run.train([next(batches)])
    assert not run.has_skipped()
    assert len(run.losses) == 3


def test_a_score_is_computed_in_float32_outside_autocast(training, monkeypatch):
    seen = []
    cross_entropy = functional.cross_entropy

    def spy(logits, targets, **options):
        seen.append((logits.dtype, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return cross_entropy(logits, targets, **options)

    monkeypatch.setattr(language.functional, "cross_entropy", spy)
    (score,) = begin(training, precision="bf16").evaluate()
    assert seen == [(torch.float32, False, False)] * 16
    assert len(score.window_accuracies) == 62  # of 1,000 bytes
    assert score.accuracy == pytest.approx(sum(score.window_accuracies) / 62)
    assert score.loss == pytest.approx(math.log(256), rel=0.2)  # nothing is learnt yet
