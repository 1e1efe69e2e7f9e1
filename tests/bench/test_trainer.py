"""The bench's one training loop: what a step computes, and how a model is scored."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import fastamp
from fastamp.bench import measure, tasks, text, trainer
from fastamp.bench.gpt import GPT, Shape
from fastamp.bench.jobs import language
from fastamp.bench.trainer import Config, Trainer

SHAPE = Shape(layers=2, heads=2, width=32, block_size=16)
JOB = measure.Job(device="cpu", precision="bf16", seed=0, steps=8, make=None, memory_make=None)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)) * 50)
    return text.load_corpus(str(tmp_path), block_size=SHAPE.block_size)


def draw_batches(corpus):
    """Yield batches of 4 windows."""
    return iter(DataLoader(fastamp.TokenDataset(corpus.train, 16), 4))


@pytest.fixture
def training(corpus):
    make = partial(language.make_gpt, shape=SHAPE, batch_size=4, corpus=corpus)
    return tasks.make_training(make, "cpu", 0)


def begin(training, **config):
    """Return a trainer over a copy of the model."""
    return Trainer(Config(name="", **config), tasks.with_copy(training), "cpu")


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
    for arm in JOB.list_arms():
        run = begin(training, precision=arm.precision)
        run.model.norm.register_forward_hook(lambda _module, args, _out: seen.append(args[0].dtype))
        with run.autocast():
            run.model(tokens)
    assert seen == [torch.float32, *[torch.bfloat16] * 3]


def test_the_fp32_arm_is_a_plain_loop_to_the_last_bit(corpus, training):
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
def test_every_step_ends_at_the_same_weights_and_frees_the_gradients(corpus, training, precision):
    torch.nn.init.normal_(training.model.head.weight, std=0.3)  # steep enough for the clip to act
    batch = next(draw_batches(corpus))
    ends = {}
    for step in trainer.STEPS:
        run = begin(training, step=step, precision=precision)
        steps = 2 if precision == "fp32" else 1  # Adam magnifies the rounding of tiny gradients
        run.train([batch] * steps)
        assert run.scaler.is_enabled() == (precision == "fp16")
        assert isinstance(run.scaler, fastamp.GradScaler) == (step == "fastamp")
        assert not run.has_skipped()
        assert all((p.grad is None) == (step == "fastamp") for p in run.parameters)
        ends[step] = torch.cat([p.detach().flatten() for p in run.parameters])
    for step in ("naive", "fastamp"):
        torch.testing.assert_close(ends[step], ends["stock"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("step", trainer.STEPS)
def test_every_step_clips_what_the_optimizer_holds_and_no_other_parameter(step, precision):
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
        step=step,
        precision=precision,
    )
    run.scaler = type(run.scaler)("cpu", init_scale=2.0, enabled=precision == "fp16")
    run.train([(rows, torch.zeros(16, 1))])
    assert run.model[0].weight.grad.norm() > 1
    pairs = zip(run.model[1].parameters(), head.parameters(), strict=True)
    moved = torch.cat([(new - old).detach().flatten() for new, old in pairs])
    assert moved.norm().item() == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("step", ["stock", "fastamp"])
def test_a_step_with_an_overflow_is_counted_as_skipped_once(corpus, training, step):
    run = begin(training, step=step, precision="fp16")
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


@pytest.mark.parametrize(("precision", "is_on"), trainer.TF32.items())
def test_tf32_is_switched_in_matmuls_and_in_cudnn_and_back(training, precision, is_on):
    seen = []

    def look():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def loss(output, target):
        seen.append(look())
        return functional.mse_loss(output, target)

    before = look()
    rows = torch.randn(4, 3)
    task = replace(training, model=nn.Linear(3, 3), loss=loss, optimizer=None, evaluate=lambda _: 1)
    run = begin(task, precision=precision)
    run.train([(rows, rows)])
    run.evaluate()
    assert seen == [("high" if is_on else "highest", is_on)]
    with pytest.raises(tasks.BrokenTask):
        run.train([(rows, "no tensor")])
    assert look() == before


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


def test_the_last_arm_and_lean_step_with_fastamp_and_fp32_on_a_gpu_is_strict_and_with_tf32():
    full = [("fp32", "stock")]
    mixed = [("lean", "fastamp"), ("bf16", "stock"), ("bf16", "fastamp")]
    assert [(arm.precision, arm.step) for arm in JOB.list_arms()] == full + mixed
    full = [("fp32-strict", "stock"), ("fp32-tf32", "stock")]
    on_gpu = replace(JOB, device="cuda").list_arms()
    assert [(arm.precision, arm.step) for arm in on_gpu] == full + mixed
    assert [arm.name for arm in on_gpu] == [
        "fp32-strict",
        "fp32-tf32",
        "lean",
        "amp",
        "amp+fastamp",
    ]


def test_lean_keeps_half_of_the_memory_and_takes_and_returns_float32():
    def make(model):
        return torch.optim.AdamW([{"params": [*model.parameters()], "lr": 0.01}], eps=1e-6)

    torch.manual_seed(0)
    rows, targets = torch.randn(16, 256), torch.zeros(16, 64)
    run = begin(
        tasks.Training(
            model=nn.Linear(256, 64),
            data=[],
            loss=functional.mse_loss,
            optimizer=make,
            evaluate=lambda model: model(rows).dtype == torch.float32,
        ),
        precision="lean",
        step="fastamp",
    )
    run.train([(rows, targets)] * 3)
    assert run.losses[0].dtype == torch.float32
    assert run.losses[2] < run.losses[0]
    (group,) = run.optimizers[0].param_groups
    assert isinstance(run.optimizers[0], fastamp.AdamW)
    assert (group["lr"], group["eps"], group["moments"]) == (0.01, 1e-6, "8bit")
    assert run.evaluate()[0].accuracy == 1.0
    sizes, found = 256 * 64 + 64, measure._count_nbytes(run)
    assert (found["weights"], found["gradients"]) == (2 * sizes, 2 * sizes)
    assert 4 * sizes < found["optimizer"] < 4.2 * sizes
