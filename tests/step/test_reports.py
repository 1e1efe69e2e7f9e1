"""Reports of steps: what they keep, and for how long."""

import copy
import math
import pickle

import pytest
import torch
from support.gradients import parameters_with

import fastamp


@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=["native", "torch's"])
def test_a_report_keeps_its_values_when_the_next_steps_are_made(options, backend, device):
    [weight] = parameters_with(torch.zeros(2, device=device))
    optimizer = torch.optim.AdamW([weight], **options)
    reports = []
    for factor in (1.0, 2.0, math.inf):
        weight.grad = torch.tensor([3.0, 4.0], device=device) * factor
        reports.append(fastamp.optimizer_step(optimizer, max_norm=5.0))
    weight.grad = None
    assert [report.norm.item() for report in reports] == [5.0, 10.0, math.inf]
    assert [report.skipped for report in reports] == [False, False, True]
    assert [round(report.clip_coef.item(), 4) for report in reports[:2]] == [1.0, 0.5]


def test_a_report_can_be_printed_copied_and_pickled(backend, device):
    [weight] = parameters_with(torch.ones(100_000, device=device))
    report = fastamp.optimizer_step(torch.optim.SGD([weight]), max_norm=1.0)
    whole = pickle.dumps(report)
    assert len(whole) < 4_000  # without what the read needed for each 8,192 elements
    for other in (copy.deepcopy(report), pickle.loads(whole)):
        assert repr(other) == repr(report)
    names = ("norm", "clip_coef", "found_inf", "scale", "way")
    assert repr(report) == (
        f"StepReport({', '.join(f'{name}={getattr(report, name)!r}' for name in names)})"
    )


def test_what_is_no_module_is_refused_by_name():
    for find in (fastamp.nonfinite_parameters, fastamp.GradScaler("cpu").nonfinite_parameters):
        with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module, got int"):
            find(3)


def test_naming_bad_values_waits_once_for_all_finite_gradients(monkeypatch):
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(5)])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    waits = []
    for name in ("item", "__bool__", "tolist"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *given, read=read: waits.append(0) or read(*given)
        )
    assert fastamp.nonfinite_parameters(model) == []
    assert len(waits) == 1
