"""What `AmpCallback` logs, in Lightning's Trainer."""

from __future__ import annotations

import math
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from support.trainers import (
    LOSS,
    MARKS,
    Recorder,
    batches,
    fit,
    logged,
    make_module,
    make_plugin,
    pl,
)

pytest.importorskip("lightning.pytorch")

from fastamp.integrations import lightning_callbacks
from fastamp.integrations.lightning import AmpCallback

__all__ = ["batches", "pl"]  # fixtures
pytestmark = MARKS


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_the_callback_logs_scale_changes_overflows_norms_and_throughput(pl, batches, precision):
    recorder, plugin = Recorder(pl), make_plugin(precision)
    norms, calls, step = [], [], plugin.scaler.step

    def recording_step(*args, **kwargs):
        step(*args, **kwargs)
        norms.append(plugin.scaler.last_step.norm.item())

    plugin.scaler.step = recording_step
    hook = {"on_train_batch_end": lambda *_: calls.append(len(recorder.rows))}
    options = {"logger": recorder, "callbacks": AmpCallback(), "log_every_n_steps": 4}
    fit(pl, make_module(pl, **hook), batches, plugins=[plugin], **options)
    scales = [(0, 1024.0), (3, 2048.0), (4, 1024.0), (7, 2048.0), (8, 1024.0), (11, 2048.0)]
    assert logged(recorder, "train/loss_scale") == (scales if precision == "16-mixed" else [])
    assert logged(recorder, "train/gradient_overflow") == [(3, 1.0), (7, 1.0)]
    assert logged(recorder, "train/skipped_steps") == [(3, 1.0), (7, 2.0)]
    assert logged(recorder, "train/grad_norm") == [(i, norms[i]) for i in (2, 6, 11)]
    assert all(math.isfinite(value) for _, row in recorder.rows for value in row.values())
    rates = [logged(recorder, f"train/{name}_per_s") for name in ("samples", "batches")]
    assert [n for _, n in rates[0]] == [pytest.approx(8 * n) for _, n in rates[1]]
    assert [s for s, _ in rates[1]] == [3, 7, 11]
    assert calls[:3] == [0] * 3 != calls[3:6]  # the loggers are called only so often
    assert calls[3] == calls[6] < calls[7]
    assert plugin.scaler._observers == []


def test_samples_are_counted_in_a_tokenizers_batches(pl, batches):
    def training_step(self, batch, _batch_idx):
        return LOSS(self.model(batch["x"]), batch["y"])

    recorder = Recorder(pl)
    options = {"logger": recorder, "callbacks": AmpCallback(), "log_every_n_steps": 6}
    encoded = [UserDict(note="a", scale=torch.tensor(1.0), x=x, y=y) for x, y in batches]
    module = make_module(pl, training_step=training_step)
    fit(pl, module, encoded, plugins=[make_plugin()], **options)
    rates = [logged(recorder, f"train/{name}_per_s") for name in ("samples", "batches")]
    assert [n for _, n in rates[0]] == [pytest.approx(8 * n) for _, n in rates[1]] != []


def test_validation_does_not_count_for_the_throughput(pl, batches, monkeypatch):
    now_s = [0.0]  # a batch takes a second, a validation 100
    clock = SimpleNamespace(perf_counter=lambda: now_s[0])
    monkeypatch.setattr(lightning_callbacks, "time", clock)
    pass_s = {
        "on_train_batch_start": lambda *_: now_s.__setitem__(0, now_s[0] + 1.0),
        "validation_step": lambda *_: now_s.__setitem__(0, now_s[0] + 100.0),
    }
    recorder = Recorder(pl)
    options = {"val_check_interval": 2, "callbacks": AmpCallback(), "log_every_n_steps": 6}
    module = make_module(pl, **pass_s)
    fit(pl, module, batches[:6], val=batches[:1], logger=recorder, **options)
    assert logged(recorder, "train/batches_per_s") == [(5, 1.0)]


def test_an_exception_leaves_what_was_logged(pl, batches):
    recorder, plugin = Recorder(pl), make_plugin()

    def stop(_self, _batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError

    module = make_module(pl, on_train_batch_start=stop)
    options = {"logger": recorder, "callbacks": [AmpCallback()], "log_every_n_steps": 12}
    with pytest.raises(RuntimeError):
        fit(pl, module, batches, plugins=[plugin], **options)
    assert logged(recorder, "train/loss_scale") == [(0, 1024.0)]
    assert plugin.scaler._observers == []
