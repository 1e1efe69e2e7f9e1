"""Accelerate and the Hugging Face Trainer with fastamp's scaler, on a CPU, which has a real one."""

from __future__ import annotations

import math

import pytest
import torch
from support.trainers import LOSS, OVERFLOWS, batches, make_model
from support.training import assert_same_but_for_rounding
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fastamp
from fastamp.integrations.accelerate import prepare_scaler

accelerate = pytest.importorskip("accelerate")
__all__ = ["batches"]  # a fixture
OPTIMIZERS = {
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2),
}


def use_fp16(accelerator):
    """Give an Accelerator on a CPU, where Accelerate scales nothing, what it has on a GPU."""
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    return accelerator


@pytest.fixture(autouse=True)
def _fresh_state():
    """Forget the Accelerators of other tests, whose state is shared."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def accelerator():
    return use_fp16(accelerate.Accelerator(cpu=True))


def train(accelerator, batches, make_optimizer, *, prepare_late=False):
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if prepare_late:
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        prepare_scaler(accelerator)
    else:
        prepare_scaler(accelerator)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skipped = []
    for x, y in batches:
        with accelerator.autocast():
            loss = LOSS(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return model, scheduler, skipped


def train_by_hand(batches, make_optimizer):
    model, scaler = make_model(), torch.amp.GradScaler("cpu", 1024.0, growth_interval=3)
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for x, y in batches:
        with torch.autocast("cpu", torch.float16):
            loss = LOSS(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if norm.isfinite():
            scheduler.step()
        optimizer.zero_grad()
    return model, scaler, scheduler


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("prepare_late", [False, True])
def test_a_loop_trains_as_torchs_scaler_does_and_sees_skips(
    accelerator, batches, name, prepare_late
):
    expected, stock, scheduler = train_by_hand(batches, OPTIMIZERS[name])
    model, ours, skipped = train(accelerator, batches, OPTIMIZERS[name], prepare_late=prepare_late)
    assert isinstance(accelerator.scaler, fastamp.GradScaler)
    assert_same_but_for_rounding(model.state_dict(), expected.state_dict())
    assert accelerator.scaler.state_dict() == stock.state_dict()
    assert [i for i, was_skipped in enumerate(skipped) if was_skipped] == list(OVERFLOWS)
    assert ours.get_last_lr() == scheduler.get_last_lr()


def test_of_two_optimizers_the_one_that_skipped_is_told(accelerator):
    prepare_scaler(accelerator)
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    first, second = (accelerator.prepare(OPTIMIZERS["fused"]([p])) for p in parameters)
    for factor, skipped in ((1.0, False), (math.inf, True), (1.0, False)):
        accelerator.backward((parameters[0] * factor).sum() + parameters[1].sum())
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        assert (first.step_was_skipped, second.step_was_skipped) == (skipped, False)


def test_the_scalers_state_is_taken_over_and_saved(accelerator, tmp_path):
    stock = accelerator.scaler
    stock.load_state_dict({**stock.state_dict(), "scale": 8.0, "_growth_tracker": 2})
    scaler = prepare_scaler(accelerator)
    assert scaler.state_dict() == stock.state_dict()
    assert prepare_scaler(accelerator) is scaler
    accelerator.save_state(tmp_path)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
    accelerator.load_state(tmp_path)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_without_a_scaler_a_warning_says_that_nothing_is_replaced(precision):
    own = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    text = f"nothing is replaced: mixed_precision='{precision}' on 'cpu' scales no losses"
    with pytest.warns(UserWarning, match=text):
        assert prepare_scaler(own) is None
    assert own.scaler is None


def test_a_foreign_scaler_is_refused(accelerator):
    accelerator.scaler = ShardedGradScaler("cpu")
    with pytest.raises(TypeError, match=r"a torch\.amp\.GradScaler, got ShardedGradScaler"):
        prepare_scaler(accelerator)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_the_hugging_face_trainer_holds_the_schedule_when_a_step_is_skipped(tmp_path, optim):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    n_backwards = iter(range(100))
    model.transformer.ln_f.weight.register_hook(
        lambda grad: grad * math.inf if next(n_backwards) in OVERFLOWS else grad
    )
    tokens = torch.arange(16) % 7
    args = transformers.TrainingArguments(
        tmp_path,
        use_cpu=True,
        max_steps=12,
        optim=optim,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    data = [{"input_ids": tokens, "labels": tokens}] * 96
    trainer = transformers.Trainer(model, args, train_dataset=data)
    use_fp16(trainer.accelerator)
    scaler = prepare_scaler(trainer.accelerator)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert [i for i, norm in enumerate(norms) if not math.isfinite(norm)] == list(OVERFLOWS)
    assert trainer.lr_scheduler.last_epoch == 12 - len(OVERFLOWS)
    assert scaler.skipped_steps == len(OVERFLOWS)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
