"""The bench's one training loop: its text, what a step computes, and how a model is scored."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import fastamp
from fastamp.bench import gpt, tasks
from fastamp.bench.gpt import GPT, Shape
from fastamp.bench.trainer import Arm, Trainer

SHAPE = Shape(layers=2, heads=2, width=32, block_size=16)


@pytest.fixture
def corpus(tmp_path):
    """Return a text whose validation part holds bytes of its own."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)) * 90 + bytes(range(100, 200)) * 10)
    return gpt.load_corpus([path])


@pytest.fixture
def made(corpus):
    """Return a small GPT as a task, in batches of 4 windows."""
    return gpt.make_model(0, SHAPE, 4, corpus)


def draw_batches(corpus):
    """Yield batches of 4 windows."""
    return iter(DataLoader(fastamp.TokenDataset(corpus[0], 16), 4))


def begin(made, **arm):
    """Return a trainer over a copy of the model."""
    own = copy.deepcopy(made[0]), *made[1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "find_make", lambda _: lambda *_: own)
        return Trainer(Arm(name="", task="", **arm))


# The text and the model


def test_the_standard_library_is_read_without_third_party_code_and_tests(tmp_path, monkeypatch):
    for name in ("os.py", "json/scanner.py", "site-packages/torch.py", "test/test_os.py", "os.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name[:1].encode() * 100)
    monkeypatch.setattr(gpt.sysconfig, "get_path", lambda _: str(tmp_path))
    train, validation = gpt.read_library.__wrapped__()
    assert bytes(train) == b"j" * 100 + b"o" * 80
    assert bytes(validation) == b"o" * 20


def test_no_validation_byte_is_ever_trained_on_and_all_windows_are_scored_once(made):
    model, data, _, options = made
    assert torch.cat([torch.cat(data[window]) for window in range(len(data))]).max() == 99
    held = []
    model.register_forward_hook(lambda _model, args, _out: held.append(args[0]))
    with torch.no_grad():
        scored = options["evaluate"](model)
    assert torch.cat(held).min() == 100
    assert sum(map(len, held)) == len(scored["accuracy"]) == 62  # of 1,000 bytes, at most 64


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


def test_autocast_reaches_the_residual_stream(made, corpus):
    seen = []
    for precision in ("fp32", "bf16"):
        run = begin(made, precision=precision)
        run.model.norm.register_forward_hook(lambda _module, args, _out: seen.append(args[0].dtype))
        run.train_step(next(draw_batches(corpus)))
    assert seen == [torch.float32, torch.bfloat16]


# The step


def test_torchs_arm_is_a_plain_loop_to_the_last_bit(corpus, made):
    model = made[0]
    torch.nn.init.normal_(model.head.weight)  # steep enough for the clip to act
    run = begin(made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * 256 / 32, fused=True)
    for tokens, targets in itertools.islice(draw_batches(corpus), 3):
        run.train_step((tokens, targets))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        optimizer.step()
    for ours, plain in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_both_steps_end_at_the_same_weights_and_fastamps_frees_gradients(corpus, made, precision):
    torch.nn.init.normal_(made[0].head.weight, std=0.3)  # steep enough for the clip to act
    batch = next(draw_batches(corpus))
    ends = {}
    for is_ours in (False, True):
        run = begin(made, is_ours=is_ours, precision=precision)
        # Adam magnifies the rounding of tiny gradients
        for _ in range(2 if precision == "fp32" else 1):
            run.train_step(batch)
        assert run.scaler.is_enabled() == (precision == "fp16")
        assert isinstance(run.scaler, fastamp.GradScaler) == is_ours
        assert not run.has_skipped()
        assert all((p.grad is None) == is_ours for p in run.parameters)
        ends[is_ours] = torch.cat([p.detach().flatten() for p in run.parameters])
    torch.testing.assert_close(ends[True], ends[False], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chosen", [[1], [0, 1]], ids=["one of two layers", "two optimizers"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("is_ours", [False, True])
def test_every_step_clips_to_one_norm_what_the_optimizers_hold_and_no_other_parameter(
    is_ours, precision, chosen
):
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)), 100 * torch.randn(16, 8)
    options = {
        "optimizer": lambda m: [torch.optim.SGD(m[i].parameters(), lr=1.0) for i in chosen],
        "max_norm": 0.1,
    }
    data = torch.utils.data.TensorDataset(rows, torch.zeros(16, 1))
    made = model, data, functional.mse_loss, options
    run = begin(made, is_ours=is_ours, precision=precision)
    run.scaler = type(run.scaler)("cpu", init_scale=2.0, enabled=precision == "fp16")
    run.train_step(data[:])
    pairs = zip(run.model.parameters(), model.parameters(), strict=True)
    moved = torch.cat([(new - old).detach().flatten() for new, old in pairs])
    assert moved.norm().item() == pytest.approx(0.1, rel=1e-3)
    if chosen == [1]:
        assert run.model[0].weight.grad.norm() > 1


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_step_with_an_overflow_is_counted_as_skipped_once(corpus, made, is_ours):
    run = begin(made, is_ours=is_ours, precision="fp16")
    batches = draw_batches(corpus)
    run.train_step(next(batches))
    assert not run.has_skipped()
    hook = run.parameters[0].register_hook(lambda grad: grad * math.inf)
    run.train_step(next(batches))
    hook.remove()
    assert run.has_skipped()
    run.train_step(next(batches))
    assert not run.has_skipped()
    assert len(run.losses) == 3


def test_a_score_is_computed_in_float32_outside_autocast(made, monkeypatch):
    seen = []
    cross_entropy = functional.cross_entropy

    def spy(logits, targets, **options):
        seen.append((logits.dtype, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return cross_entropy(logits, targets, **options)

    monkeypatch.setattr(gpt.functional, "cross_entropy", spy)
    score = begin(made, precision="bf16").evaluate()
    assert seen == [(torch.float32, False, False)] * 16
    assert score.accuracy == pytest.approx(sum(score.accuracies) / 62)
    assert score.loss == pytest.approx(math.log(256), rel=0.2)  # nothing is learnt yet
