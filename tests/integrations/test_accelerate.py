"""Accelerate with fastamp's step, on a CPU, which has a real scaler for it."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from support.accelerate_loops import PROGRAMS, forget, fresh_state, use_fp16
from support.devices import HAS_CORE, NATIVE
from support.trainers import LOSS, OVERFLOWS, batches, make_model
from support.training import assert_same_bits, assert_same_but_for_rounding
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fastamp
from fastamp._ops import Grads
from fastamp.integrations.accelerate import prepare

accelerate = pytest.importorskip("accelerate")
__all__ = ["batches", "fresh_state"]  # fixtures
pytestmark = pytest.mark.usefixtures("fresh_state")
OPTIMIZERS = {
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "open": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, foreach=True),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": None}


def make_accelerator(precision="no", accumulate=1):
    forget()  # the one before
    mixed = "no" if precision == "fp16" else precision
    own = accelerate.Accelerator(
        cpu=True, mixed_precision=mixed, gradient_accumulation_steps=accumulate
    )
    return use_fp16(own) if precision == "fp16" else own


def train(accelerator, batches, make_optimizer, *, late=False):
    """Train as Accelerate's documentation has it; return all that can be seen."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = None if late else prepare(accelerator)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    scaler = scaler or prepare(accelerator)
    seen = []
    for x, y in batches:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = LOSS(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                assert isinstance(norm, torch.Tensor)
            optimizer.step()
            if accelerator.sync_gradients:
                grads = [parameter.grad.clone() for parameter in model.parameters()]
                seen.append((norm.item(), accelerator.optimizer_step_was_skipped, grads))
            scheduler.step()
            optimizer.zero_grad()
    return model, scheduler, scaler, seen


def train_by_hand(batches, make_optimizer, precision, accumulate=1):
    """Train with one call of fastamp's for each step."""
    model, dtype = make_model(), DTYPES[precision]
    scaler = fastamp.GradScaler("cpu", 1024.0, growth_interval=3, enabled=precision == "fp16")
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = []
    for i, (x, y) in enumerate(batches):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = LOSS(model(x), y) / accumulate
        scaler.scale(loss).backward()
        if (i + 1) % accumulate:
            continue
        scaler.step(optimizer, max_norm=0.1)
        scaler.update()
        report = scaler.last_step
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        seen.append((report.norm.item(), report.skipped, grads))
        if not report.skipped:
            scheduler.step()
        optimizer.zero_grad()
    return model, scheduler, scaler, seen


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clip_and_step_are_fastamps_one_step(batches, precision, name, accumulate):
    expected, schedule, stock, seen = train_by_hand(
        batches, OPTIMIZERS[name], precision, accumulate
    )
    for late in (False, True):
        own = make_accelerator(precision, accumulate)
        model, ours, scaler, found = train(own, batches, OPTIMIZERS[name], late=late)
        assert scaler is (own.scaler if precision == "fp16" else prepare(own))
        assert_same_bits(model.state_dict(), expected.state_dict())
        for (norm, skipped, grads), (norm_by_hand, skip_by_hand, by_hand) in zip(
            found, seen, strict=True
        ):
            assert (skipped, str(norm)) == (skip_by_hand, str(norm_by_hand))
            if not skipped:
                assert_same_bits(grads, by_hand)
        assert scaler.state_dict() == stock.state_dict()
        assert scaler.skipped_steps == sum(skipped for _, skipped, _ in seen) > 0
        assert ours.get_last_lr() == schedule.get_last_lr()
        way = "torch's: foreach=True" if name == "foreach" and HAS_CORE else NATIVE
        assert scaler.last_step.way == way


def test_it_trains_as_accelerate_alone(batches):
    """That fastamp's own loop agrees with torch's is shown in tests/step."""
    weights = []
    for change in (prepare, lambda _: None):
        own = make_accelerator("fp16")
        change(own)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, schedule = own.prepare(model, optimizer, schedule)
        skipped = []
        for x, y in batches:
            with own.autocast():
                loss = LOSS(model(x), y)
            own.backward(loss)
            own.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            skipped.append(own.optimizer_step_was_skipped)
        assert [i for i, was_skipped in enumerate(skipped) if was_skipped] == list(OVERFLOWS)
        weights.append((model.state_dict(), [own.scaler.get_scale(), *schedule.get_last_lr()]))
    assert_same_but_for_rounding(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


def run_program(name, precision, change):
    program, _ = PROGRAMS[name]
    own = make_accelerator(precision)
    change(own)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model, optimizer = own.prepare(model, optimizer)
    torch.manual_seed(5)
    found = program(own, model, optimizer)
    return [*found, *model.state_dict().values()]


@pytest.mark.parametrize(
    ("name", "precision"), [(name, p) for name, (_, kinds) in PROGRAMS.items() for p in kinds]
)
def test_what_a_program_does_between_clip_and_step_means_what_it_meant(name, precision):
    expected = run_program(name, precision, lambda _: None)
    found = run_program(name, precision, prepare)
    assert_same_but_for_rounding(found, expected)


@pytest.mark.parametrize("precision", ["fp16", "no"])
def test_the_step_after_a_clip_skips_without_a_second_read(precision, monkeypatch):
    own = make_accelerator(precision)
    scaler = prepare(own)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = own.prepare(torch.optim.SGD([parameter], lr=1.0))
    reads = []
    measure = Grads.measure
    monkeypatch.setattr(Grads, "measure", lambda *args: reads.append(0) or measure(*args))
    for factor in (math.inf, 1.0):
        own.backward(factor * parameter.sum())
        norm = own.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
        assert scaler.last_step.norm is norm or scaler.last_step.norm.item() == norm.item()
        assert scaler.last_step.skipped == optimizer.step_was_skipped == (factor == math.inf)
        optimizer.zero_grad()
    assert len(reads) == 2
    assert scaler.skipped_steps == 1
    assert parameter.tolist() == pytest.approx([1 - 3**-0.5] * 3)


def test_clipping_twice_is_refused_in_fp16_as_by_accelerate():
    own = make_accelerator("fp16")
    prepare(own)
    parameter = torch.nn.Parameter(torch.ones(3))
    own.prepare(torch.optim.SGD([parameter], lr=1.0))
    own.backward(parameter.sum())
    own.clip_grad_norm_([parameter], 1.0)
    with pytest.raises(RuntimeError, match="already been called on this optimizer since"):
        own.clip_grad_norm_([parameter], 1.0)


def test_of_two_optimizers_each_is_clipped_to_the_norm_of_both():
    own = make_accelerator("fp16")
    scaler = prepare(own)
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    first, second = own.prepare(*(OPTIMIZERS["fused"]([p]) for p in parameters))
    by_hand = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    expected = [OPTIMIZERS["fused"]([p]) for p in by_hand]
    hands = fastamp.GradScaler("cpu", 1024.0)
    for factor in (1.0, math.inf, 3.0):
        own.backward((parameters[0] * factor).sum() + 2 * parameters[1].sum())
        hands.scale((by_hand[0] * factor).sum() + 2 * by_hand[1].sum()).backward()
        norm = own.clip_grad_norm_(parameters, 0.5)
        hands.step(expected, max_norm=0.5)
        assert torch.equal(norm, hands.last_step.norm)
        for optimizer in (first, second):
            optimizer.step()
            assert optimizer.step_was_skipped == hands.last_step.skipped
        if factor < math.inf:
            assert_same_bits([p.grad for p in parameters], [p.grad for p in by_hand])
        for optimizer in (first, second, *expected):
            optimizer.zero_grad()
        hands.update()
        hands.update(scaler.get_scale())  # Accelerate updates after each optimizer
    assert_same_bits(parameters, by_hand)


def test_of_two_optimizers_the_one_that_skipped_is_told():
    own = make_accelerator("fp16")
    prepare(own)
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    first, second = (own.prepare(OPTIMIZERS["fused"]([p])) for p in parameters)
    for factor, skipped in ((1.0, False), (math.inf, True), (1.0, False)):
        own.backward((parameters[0] * factor).sum() + parameters[1].sum())
        for parameter, optimizer in zip(parameters, (first, second), strict=True):
            own.clip_grad_norm_([parameter], 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert (first.step_was_skipped, second.step_was_skipped) == (skipped, False)


@pytest.mark.parametrize("precision", ["fp16", "no"])
def test_a_loop_resumes_to_the_bit_in_the_middle_of_an_epoch(precision, tmp_path):
    def run(start, stop, folder=None):
        own = make_accelerator(precision, accumulate=2)
        prepare(own)
        torch.manual_seed(start)
        model = make_model()
        data = fastamp.ArrayDataset(torch.randn(80, 16, generator=torch.manual_seed(2)))
        loader = fastamp.DataLoader(data, 8, shuffle=True, seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        made = own.prepare(model, optimizer, schedule, loader)
        model, optimizer, schedule, loader = made
        own.register_for_checkpointing(loader)
        if start:
            own.load_state(tmp_path)
        seen = []
        for (x,), step in zip(loader, range(start, stop), strict=False):
            seen.append(x)
            with own.accumulate(model), own.autocast():
                own.backward(model(x).square().mean())
                if own.sync_gradients:
                    own.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step + 1 == stop and folder:
                own.save_state(folder)
        scale = own.scaler.get_scale() if own.scaler else 1.0
        return seen, [*model.state_dict().values()], [scale, *schedule.get_last_lr()]

    seen, weights, rates = run(0, 10)
    first, _, _ = run(0, 4, tmp_path)
    rest, resumed, resumed_rates = run(4, 10)
    assert_same_bits(seen, first + rest)
    assert_same_bits(weights, resumed)
    assert rates == resumed_rates


def test_a_program_may_hold_a_schedule_as_accelerates_own_tests_do():
    own = make_accelerator()
    prepare(own)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    optimizer, schedule = own.prepare(
        optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    )
    optimizer._is_overflow = True
    schedule.step()
    assert schedule.get_last_lr() == [1.0]


def test_a_prepared_accelerator_is_pickled_and_copied():
    for precision in ("fp16", "no"):
        own = make_accelerator(precision)
        prepare(own)
        own.prepare(torch.optim.SGD([torch.nn.Parameter(torch.full((4,), 2.0))], lr=1.0))
        for again in (pickle.loads(pickle.dumps(own)), copy.deepcopy(own)):
            (optimizer,) = again._optimizers
            (parameter,) = optimizer.param_groups[0]["params"]
            again.backward((parameter * parameter).sum() / 2)
            assert again.clip_grad_norm_([parameter], 2.0).item() == 4.0
            optimizer.step()
            assert parameter.tolist() == pytest.approx([1, 1, 1, 1])


def test_the_scalers_state_is_taken_over_and_saved(tmp_path):
    own = make_accelerator("fp16")
    stock = own.scaler
    stock.load_state_dict({**stock.state_dict(), "scale": 8.0, "_growth_tracker": 2})
    scaler = prepare(own)
    assert scaler.state_dict() == stock.state_dict()
    assert prepare(own) is scaler is own.scaler
    own.save_state(tmp_path)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
    own.load_state(tmp_path)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_scaler_set_after_prepare_is_refused(precision):
    own = make_accelerator(precision)
    prepare(own)
    use_fp16(own)
    weight = torch.nn.Parameter(torch.ones(1))
    own.prepare(torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(RuntimeError, match="scaler: it was set after prepare"):
        own.backward(weight.sum())


def test_what_cannot_be_prepared_is_refused_before_anything_is_touched():
    own = make_accelerator("fp16")
    own.scaler = ShardedGradScaler("cpu")
    with pytest.raises(TypeError, match=r"a torch\.amp\.GradScaler, got ShardedGradScaler"):
        prepare(own)
    for kind, more in (("FSDP", "FSDP2 does not"), ("DEEPSPEED", ""), ("MEGATRON_LM", "")):
        text = f"its distributed_type {kind} clips and steps by itself.*{more}"
        with pytest.raises(ValueError, match=text):
            prepare(SimpleNamespace(distributed_type=SimpleNamespace(value=kind)))
    own = make_accelerator()
    optimizer = own.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0))
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(RuntimeError, match="before a scheduler is made on a prepared optimizer"):
        prepare(own)
    assert type(own) is accelerate.Accelerator
    assert type(optimizer) is accelerate.optimizer.AcceleratedOptimizer
