"""Accelerators with a scaler on a CPU, and programs that do something between clip and step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from support.trainers import LOSS

BOTH, NO = ("no", "fp16"), ("no",)


@pytest.fixture
def fresh_state():
    """Forget the Accelerators of other tests, whose state is shared."""
    yield
    forget()


def forget():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def use_fp16(accelerator: Any) -> Any:
    """Give an Accelerator on a CPU the scaler that it has only on a GPU."""
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    return accelerator


def backward(own, model):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    own.backward(LOSS(model(x), y))


def grads(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def look(own, model, optimizer):
    """Clip the gradients, and return them before and after the step."""
    found = []
    for _ in range(3):
        backward(own, model)
        found.append(own.clip_grad_norm_(model.parameters(), 0.1))
        found += grads(model)
        optimizer.step()
        found += grads(model)
        optimizer.zero_grad()
    return found


def clip_values_too(own, model, optimizer):
    for _ in range(3):
        backward(own, model)
        own.clip_grad_norm_(model.parameters(), 0.5)
        own.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return []


def halve_the_gradients(own, model, optimizer):
    """Change what was clipped: in place, and by other tensors."""
    for i in range(4):
        backward(own, model)
        own.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            if i % 2:
                parameter.grad.data.mul_(0.5)
            else:
                parameter.grad = parameter.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()
    return []


def leave_out_a_step(own, model, optimizer):
    """Accumulate on what was clipped."""
    norms = []
    for i in range(4):
        backward(own, model)
        norms.append(own.clip_grad_norm_(model.parameters(), 0.1))
        if i != 1:
            optimizer.step()
            optimizer.zero_grad()
    return norms


def give_up_a_batch(own, model, optimizer):
    """Clear the gradients in place of a step."""
    norms = []
    for i in range(4):
        backward(own, model)
        norms.append(own.clip_grad_norm_(model.parameters(), 0.1))
        if i != 1:
            optimizer.step()
        optimizer.zero_grad(set_to_none=i < 2)
    return norms


def clip_every_micro_batch(own, model, optimizer):
    own.gradient_accumulation_steps = 2
    norms = []
    for _ in range(4):
        with own.accumulate(model):
            backward(own, model)
            norms.append(own.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def clip_twice(own, model, optimizer):
    """Ask for the norm, then clip."""
    norms = []
    for _ in range(3):
        backward(own, model)
        norms.append(own.clip_grad_norm_(model.parameters(), float("inf")))
        norms.append(own.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def clip_a_part(own, model, optimizer):
    norms = []
    for i in range(3):
        backward(own, model)
        part = [[*model.parameters()][:2], model[2].parameters(), [model[0].weight]][i]
        norms.append(own.clip_grad_norm_(part, 0.01))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def clip_by_another_norm(own, model, optimizer):
    norms = []
    for norm_type in (1.0, float("inf")):
        backward(own, model)
        norms.append(own.clip_grad_norm_(model.parameters(), 0.1, norm_type))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def watch_by_a_hook(own, model, optimizer):
    seen = []
    handle = optimizer.optimizer.register_step_pre_hook(lambda *_: seen.extend(grads(model)))
    for _ in range(2):
        backward(own, model)
        own.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return seen


def step_with_a_closure(own, model, optimizer):
    backward(own, model)
    own.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step(lambda: None)
    return grads(model)


def step_without_a_clip(own, model, optimizer):
    for i in range(4):
        backward(own, model)
        if i % 2:
            own.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return []


def clip_nothing(own, model, optimizer):
    """Clip before there is a gradient."""
    norm = own.clip_grad_norm_(model.parameters(), 0.1)
    with contextlib.suppress(AssertionError):  # in fp16: nothing was checked
        optimizer.step()
    return [norm]


def freeze_a_layer(own, model, optimizer):
    model[0].requires_grad_(requires_grad=False)
    for _ in range(2):
        backward(own, model)
        own.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return []


# A program, and the precisions in which Accelerate itself runs it.
PROGRAMS = {
    "look": (look, BOTH),
    "clip values too": (clip_values_too, NO),
    "halve the gradients": (halve_the_gradients, BOTH),
    "leave out a step": (leave_out_a_step, NO),
    "give up a batch": (give_up_a_batch, NO),
    "clip every micro-batch": (clip_every_micro_batch, NO),
    "clip twice": (clip_twice, NO),
    "clip a part": (clip_a_part, BOTH),
    "clip by another norm": (clip_by_another_norm, BOTH),
    "watch by a hook": (watch_by_a_hook, BOTH),
    "step with a closure": (step_with_a_closure, BOTH),
    "step without a clip": (step_without_a_clip, BOTH),
    "clip nothing": (clip_nothing, NO),
    "freeze a layer": (freeze_a_layer, BOTH),
}
