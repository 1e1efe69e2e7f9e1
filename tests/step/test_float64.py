"""Devices that have no float64, whose error is a RuntimeError; see test_mps for a TypeError."""

from __future__ import annotations

import math

import pytest
import torch
from support import played_mps
from support.played_mps import WIDE, Played, PlayMps

import fastamp
from fastamp._ops import fallback, over_ranks


class PlayDevice(PlayMps):
    """Lets tensors be made on the played device, whatever its name is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        asked = (kwargs or {}).get("device")
        is_plain = isinstance(made, torch.Tensor) and not isinstance(made, Played)
        if is_plain and asked is not None and torch.device(asked) == played_mps.MPS:
            return Played(made)
        return made


@pytest.fixture
def narrow(monkeypatch):
    """Yield the name of a device whose float64 is a RuntimeError.

    Of "xpu" and "privateuseone" torch looks for the driver, and cannot be told not to.
    """
    monkeypatch.setattr(played_mps, "MPS", torch.device("maia"))
    for module in (fallback, over_ranks):
        monkeypatch.setattr(module, "PLAIN_TYPES", (*module.PLAIN_TYPES, Played))
    make = Played.__new__

    def refuse_float64(cls, held):
        if held.dtype in WIDE:
            msg = "maia has no float64"
            raise RuntimeError(msg)
        return make(cls, held)

    monkeypatch.setattr(Played, "__new__", refuse_float64)
    with PlayDevice():
        yield "maia"


def played_parameters(*values):
    parameters = []
    for value in values:
        parameters.append(Played(torch.zeros(len(value))).requires_grad_())
        parameters[-1].grad = Played(torch.tensor(value))
    return parameters


def test_clipping_asks_for_no_float64_where_a_device_has_none(narrow):
    parameters = played_parameters([3.0, 0.0], [4.0])
    norm = fastamp.clip_grad_norm_(parameters, 1.0)
    assert (norm.device.type, norm.item()) == (narrow, 5)
    torch.testing.assert_close(parameters[0].grad.held, torch.tensor([0.6, 0.0]))


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("how", ["step", "clip, then step"])
def test_a_step_asks_for_no_float64_where_a_device_has_none(narrow, how, enabled, bad):
    factor = 4.0 if enabled else 1.0
    parameters = played_parameters([3 * factor, 0.0], [math.inf if bad else 4 * factor])
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = fastamp.GradScaler(narrow, init_scale=4.0, enabled=enabled)
    scaler.scale(Played(torch.ones(())))
    if how == "clip, then step":
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert scaler.last_step.norm.device.type == narrow
    assert scaler.last_step.skipped == bad
    expected = torch.zeros(1) if bad else torch.tensor([-0.8])
    torch.testing.assert_close(parameters[1].held, expected)
