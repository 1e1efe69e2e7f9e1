"""Accelerate with fastamp's step, on a CPU, which has a real scaler for it."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from support.accelerate_cases import accelerate, forget, fresh_state, use_fp16
from support.devices import HAS_CORE, NATIVE
from support.trainers import LOSS, batches, make_model, train_by_hand
from support.training import assert_same_bits, assert_same_but_for_rounding

import fastamp
from fastamp._ops import Grads
from fastamp.integrations.accelerate import prepare

__all__ = ["batches", "fresh_state"]  # fixtures
pytestmark = pytest.mark.usefixtures("fresh_state")
OPTIMIZERS = {
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, foreach=True),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": None}


def make_accelerator(precision="no", accumulate=1):
    forget()  # the one before
    mixed = "no" if precision == "fp16" else precision
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=mixed, gradient_accumulation_steps=accumulate
    )
    return use_fp16(accelerator) if precision == "fp16" else accelerator


def make_weight(value=1.0):
    return torch.nn.Parameter(torch.full((3,), value))


def train(accelerator, batches, make_optimizer):
    """Train as Accelerate's documentation has it; return all that can be seen."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = prepare(accelerator)
    assert prepare(accelerator) is scaler
    assert accelerator.scaler in (scaler, None)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    seen = []
    for x, y in batches:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = LOSS(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if accelerator.sync_gradients:
                seen.append((str(norm.item()), accelerator.optimizer_step_was_skipped))
            schedule.step()
            optimizer.zero_grad()
    return model, scaler, schedule, seen


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("name", "accumulate"), [("fused", 1), ("foreach", 2)])
def test_clip_and_step_are_fastamps_one_step(batches, precision, name, accumulate):
    make_optimizer, dtype = OPTIMIZERS[name], DTYPES[precision]
    expected, stock, rates, norms = train_by_hand(batches, dtype, make_optimizer, accumulate)
    accelerator = make_accelerator(precision, accumulate)
    model, scaler, schedule, seen = train(accelerator, batches, make_optimizer)
    assert seen == [(str(norm), not math.isfinite(norm)) for norm in norms]
    assert_same_bits(model.state_dict(), expected.state_dict())
    assert scaler.state_dict() == stock.state_dict()
    assert scaler.skipped_steps == sum(skipped for _, skipped in seen) > 0
    assert schedule.get_last_lr() == rates.get_last_lr()
    way = "torch's: foreach=True" if name == "foreach" and HAS_CORE else NATIVE
    assert scaler.last_step.way == way


def clip_values_too(accelerator, model, optimizer, _):
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    accelerator.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()


def halve_the_gradients(accelerator, model, optimizer, i):
    """Change what was clipped: in place, and by other tensors."""
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        if i % 2:
            parameter.grad.data.mul_(0.5)
        else:
            parameter.grad = parameter.grad * 0.5
    optimizer.step()


def give_up_a_batch(accelerator, model, optimizer, i):
    """Clear the gradients in place of a step."""
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    if i == 1:
        optimizer.zero_grad(set_to_none=False)
    else:
        optimizer.step()


def clip_twice(accelerator, model, optimizer, _):
    """Ask for the norm, then clip."""
    norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm


def clip_a_part(accelerator, model, optimizer, i):
    norm = accelerator.clip_grad_norm_([*model.parameters()][: 1 + i], 0.01)
    optimizer.step()
    return norm


def clip_by_another_norm(accelerator, model, optimizer, _):
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, 1.0)
    optimizer.step()
    return norm


def step_with_a_closure(accelerator, model, optimizer, _):
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step(lambda: None)


def step_without_a_clip(accelerator, model, optimizer, i):
    if i % 2:
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def overflow(accelerator, model, optimizer, i):
    if i == 1:
        model[0].weight.grad[0, 0] = math.inf
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return torch.tensor([accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()])


BOTH, NO, FP16 = ("no", "fp16"), ("no",), ("fp16",)  # in which Accelerate itself runs a program
PROGRAMS = {clip_values_too: NO, halve_the_gradients: BOTH, give_up_a_batch: NO, clip_twice: NO}
PROGRAMS |= {clip_a_part: BOTH, clip_by_another_norm: BOTH, step_with_a_closure: BOTH}
PROGRAMS |= {step_without_a_clip: BOTH, overflow: FP16}
CASES = [(program, kind, 1) for program, kinds in PROGRAMS.items() for kind in kinds]


@pytest.mark.parametrize(("program", "precision", "accumulate"), [*CASES, (clip_twice, "no", 2)])
def test_what_a_program_does_between_clip_and_step_means_what_it_meant(
    program, precision, accumulate
):
    found = []
    for change in (prepare, lambda _: None):
        accelerator = make_accelerator(precision, accumulate)
        change(accelerator)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        torch.manual_seed(5)
        seen = []
        for i in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(LOSS(model(torch.randn(8, 16)), torch.randint(4, (8,))))
                seen.append(program(accelerator, model, optimizer, i))
                if program is not overflow:
                    seen += [parameter.grad.clone() for parameter in model.parameters()]
                optimizer.zero_grad()
        found.append([*(each for each in seen if each is not None), *model.state_dict().values()])
    assert_same_but_for_rounding(*found)


@pytest.mark.parametrize("precision", ["fp16", "no"])
def test_the_step_after_a_clip_skips_without_a_second_read(precision, monkeypatch):
    accelerator = make_accelerator(precision)
    scaler, parameter = prepare(accelerator), make_weight()
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    reads = []
    measure = Grads.measure
    monkeypatch.setattr(Grads, "measure", lambda *args: reads.append(0) or measure(*args))
    for factor in (math.inf, 1.0):
        accelerator.backward(factor * parameter.sum())
        norm = accelerator.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
        assert scaler.last_step.norm.item() == norm.item()
        assert scaler.last_step.skipped == optimizer.step_was_skipped == (factor == math.inf)
        optimizer.zero_grad()
    assert len(reads) == 2
    assert scaler.skipped_steps == 1
    assert parameter.tolist() == pytest.approx([1 - 3**-0.5] * 3)


@pytest.mark.parametrize("together", [True, False])
def test_several_optimizers_are_clipped_together_or_one_by_one(together):
    accelerator, parameters = make_accelerator("fp16"), [make_weight(), make_weight()]
    prepare(accelerator)
    optimizers = accelerator.prepare(*(torch.optim.SGD([p], lr=0.0) for p in parameters))
    for factor in (1.0, math.inf, 2.0):
        accelerator.backward((factor * parameters[0]).sum() + 2 * parameters[1].sum())
        if together:
            norm = accelerator.clip_grad_norm_(parameters, 0.5)
            assert norm.item() == pytest.approx(math.hypot(factor, 2) * 3**0.5)
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            if not together:
                accelerator.clip_grad_norm_([parameter], 0.5)
            optimizer.step()
        norms = [p.grad.norm().item() for p in parameters]
        skipped = [each.step_was_skipped for each in optimizers]
        if factor == math.inf:
            assert skipped == [True, together]
        else:
            whole = math.hypot(factor, 2)
            expected = [factor / whole / 2, 1 / whole] if together else [0.5] * 2
            assert (norms, skipped) == (pytest.approx(expected), [False, False])
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_a_loop_resumes_to_the_bit_in_the_middle_of_an_epoch(tmp_path):
    data = fastamp.ArrayDataset(torch.randn(80, 16, generator=torch.Generator().manual_seed(2)))

    def run(start, stop):
        accelerator = make_accelerator("fp16", accumulate=2)
        prepare(accelerator)
        optimizer = torch.optim.AdamW((model := make_model()).parameters(), lr=1e-2)
        loader = fastamp.DataLoader(data, 8, shuffle=True, seed=3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
        if start:
            accelerator.load_state(tmp_path)
        for step, (x,) in enumerate(loader, start):
            with accelerator.accumulate(model), accelerator.autocast():
                accelerator.backward(model(x).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step + 1 == stop:
                accelerator.save_state(tmp_path)
        rates = torch.tensor([accelerator.scaler.get_scale(), *schedule.get_last_lr()])
        return [rates, *model.state_dict().values()]

    expected = run(0, 4)  # it goes on after the state was saved
    assert_same_bits(run(4, 0), expected)


def test_a_program_may_hold_a_schedule_as_accelerates_own_tests_do():
    accelerator = make_accelerator()
    prepare(accelerator)
    optimizer = accelerator.prepare(torch.optim.SGD([make_weight()], lr=1.0))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    optimizer._is_overflow = True
    schedule.step()
    assert schedule.get_last_lr() == [1.0]


def test_a_prepared_accelerator_is_pickled_and_copied():
    accelerator = make_accelerator("fp16")
    prepare(accelerator)
    accelerator.prepare(torch.optim.SGD([make_weight(2.0)], lr=1.0))
    for again in (pickle.loads(pickle.dumps(accelerator)), copy.deepcopy(accelerator)):
        (optimizer,) = again._optimizers
        (parameter,) = optimizer.param_groups[0]["params"]
        again.backward((parameter * parameter).sum() / 2)
        assert again.clip_grad_norm_([parameter], 12**0.5 / 2).item() == pytest.approx(12**0.5)
        optimizer.step()
        assert parameter.tolist() == pytest.approx([1, 1, 1])


def test_the_scalers_state_is_taken_over():
    accelerator = make_accelerator("fp16")
    stock = accelerator.scaler
    stock.load_state_dict({**stock.state_dict(), "scale": 8.0, "_growth_tracker": 2})
    scaler = prepare(accelerator)
    assert scaler.state_dict() == stock.state_dict()
    assert prepare(accelerator) is scaler is accelerator.scaler


def test_what_cannot_be_prepared_is_refused_before_anything_is_touched():
    for kind, more in (("FSDP", "FSDP2 does not"), ("DEEPSPEED", ""), ("MEGATRON_LM", "")):
        text = f"its distributed_type {kind} clips and steps by itself.*{more}"
        with pytest.raises(ValueError, match=text):
            prepare(SimpleNamespace(distributed_type=SimpleNamespace(value=kind)))
    accelerator = make_accelerator()
    optimizer = accelerator.prepare(torch.optim.SGD([make_weight()], lr=1.0))
    with pytest.raises(RuntimeError, match="it has prepared an optimizer; call prepare"):
        prepare(accelerator)
    assert type(accelerator) is accelerate.Accelerator
    assert type(optimizer) is accelerate.optimizer.AcceleratedOptimizer


def test_wrong_calls_are_refused():
    accelerator, weight = make_accelerator("fp16"), make_weight()
    prepare(accelerator)
    accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    accelerator.backward(weight.sum())
    accelerator.clip_grad_norm_([weight], 1.0)
    with pytest.raises(RuntimeError, match="already been called on this optimizer since"):
        accelerator.clip_grad_norm_([weight], 1.0)  # as by Accelerate alone
    use_fp16(accelerator)
    with pytest.raises(RuntimeError, match="scaler: it was set after prepare"):
        accelerator.backward(weight.sum())
