"""The main job's model and arms: what a step computes, and how a model is scored."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional

import fastamp
from fastamp.bench import arms as arms_
from fastamp.bench import tasks, text
from fastamp.bench.gpt import GPT, Shape
from fastamp.bench.jobs import language

SHAPE = Shape(layers=2, heads=2, width=32, block_size=16)
JOB = arms_.Job(device="cpu", precision="bf16", seed=0, steps=8, make=None, memory_make=None)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)) * 50)
    return text.load_corpus(str(tmp_path), block_size=SHAPE.block_size)


@pytest.fixture
def training(corpus):
    make = partial(language.make_gpt, shape=SHAPE, batch_size=4, corpus=corpus)
    return tasks.make_training(make, "cpu", 0)


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
    model = training.model
    seen = []
    model.norm.register_forward_hook(lambda _module, args, _out: seen.append(args[0].dtype))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    for arm in arms_.make_arms(JOB):
        with arms_.Run(arm, "cpu", training).autocast():
            model(tokens)
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_the_fp32_arm_is_a_plain_loop_to_the_last_bit(corpus, training):
    model = training.model
    torch.nn.init.normal_(model.head.weight)  # steep enough for the clip to act
    run = arms_.Run(arms_.make_arms(JOB)[0], "cpu", copy.deepcopy(training))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * 256 / 32, fused=True)
    batches = text.training_batches(corpus.train, 16, 4)
    for tokens, targets in itertools.islice(batches, 3):
        run.train_step((tokens, targets))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        optimizer.step()
    for ours, plain in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_step_clips_the_same_gradients_and_ends_at_the_same_weights(
    corpus, training, precision
):
    job = replace(JOB, precision=precision)
    torch.nn.init.normal_(training.model.head.weight, std=0.3)  # steep enough for the clip to act
    tokens, targets = next(text.training_batches(corpus.train, 16, 4))
    ends = {}
    for step in arms_.STEPS:
        arm = arms_.Arm(name=step, dtype=job.dtype, step=step)
        run = arms_.Run(arm, "cpu", copy.deepcopy(training))
        run.train_step((tokens, targets))
        assert run.scaler.is_enabled() == (precision == "fp16")
        assert isinstance(run.scaler, fastamp.GradScaler) == (step == "fastamp")
        norm = torch.nn.utils.get_total_norm([p.grad for p in run.parameters])
        assert norm.item() == pytest.approx(1.0, abs=1e-5)
        assert not run.skipped()
        ends[step] = torch.cat([p.detach().flatten() for p in run.parameters])
    torch.testing.assert_close(ends["fastamp"], ends["stock"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_step_clips_what_the_optimizer_holds_and_no_other_parameter(precision):
    torch.manual_seed(0)
    body, head = torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)
    model, rows = torch.nn.Sequential(body, head), 100 * torch.randn(16, 8)
    training = tasks.Training(
        model=model,
        data=[],
        loss=functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model[1].parameters(), lr=1.0),
        max_norm=0.1,
    )
    dtype = replace(JOB, precision=precision).dtype
    for step in arms_.STEPS:
        arm = arms_.Arm(name=step, dtype=dtype, step=step)
        run = arms_.Run(arm, "cpu", copy.deepcopy(training))
        run.scaler = type(run.scaler)("cpu", init_scale=2.0, enabled=precision == "fp16")
        run.train_step((rows, torch.zeros(16, 1)))
        assert run.model[0].weight.grad.norm() > 1
        pairs = zip(run.model[1].parameters(), head.parameters(), strict=True)
        moved = torch.cat([(new - old).detach().flatten() for new, old in pairs])
        assert moved.norm().item() == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("step", arms_.STEPS)
def test_a_step_with_an_overflow_is_counted_as_skipped_once(corpus, training, step):
    run = arms_.Run(arms_.Arm(name=step, dtype=torch.float16, step=step), "cpu", training)
    batches = text.training_batches(corpus.train, 16, 4)
    run.train_step(next(batches))
    assert not run.skipped()
    hook = run.parameters[0].register_hook(lambda grad: grad * math.inf)
    run.train_step(next(batches))
    hook.remove()
    assert run.skipped()
    run.train_step(next(batches))
    assert not run.skipped()
    assert len(run.losses) == 3


def test_a_score_is_computed_in_float32_outside_autocast(training, monkeypatch):
    seen = []
    cross_entropy = functional.cross_entropy

    def spy(logits, targets, **options):
        seen.append((logits.dtype, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return cross_entropy(logits, targets, **options)

    monkeypatch.setattr(language.functional, "cross_entropy", spy)
    score = arms_.evaluate(arms_.Run(arms_.make_arms(JOB)[1], "cpu", training))
    assert seen == [(torch.float32, False, False)] * 16
    assert len(score.window_accuracies) == 64
    assert score.accuracy == pytest.approx(sum(score.window_accuracies) / 64)
    assert score.loss == pytest.approx(math.log(256), rel=0.2)  # nothing is learnt yet


def test_only_the_last_arm_steps_with_fastamp():
    assert [(arm.name, arm.step) for arm in arms_.make_arms(JOB)] == [
        *((name, "stock") for name in ("fp32", "amp")),
        ("amp+fastamp", "fastamp"),
    ]


def test_fp32_on_a_gpu_is_measured_strict_and_with_tf32():
    arms = arms_.make_arms(replace(JOB, device="cuda"))
    assert [(arm.name, arm.tf32) for arm in arms[:2]] == [
        ("fp32-strict", False),
        ("fp32-tf32", True),
    ]
