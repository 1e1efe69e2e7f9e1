"""Other people's loops over the jobs: the same steps as the stock loop's, and what does not run."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastamp.bench import job_loops, job_peers, job_table
from fastamp.bench.__main__ import main
from fastamp.bench.jobs import JOBS, JobRow
from fastamp.bench.race import Plan
from fastamp.bench.tasks import make_training

MODULES = {"Accelerate": "accelerate", "Lightning": "lightning.pytorch"}
MODULES |= {"torchdata": "torchdata.nodes", "SPDL": "spdl.dataloader"}


def make_rows(_device, _seed):
    """Return a network of 64 rows."""
    rows = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    return model, data, nn.functional.mse_loss, {"batch_size": 4, "max_norm": 0.5}


def make_loop(precision):
    training = make_training(make_rows, "cpu", 0)
    stock = job_loops.list_loops("stock", precision)[0]
    return job_loops.make_loop(stock, training, "cpu", steps=3, seed=0)


@pytest.mark.parametrize("name", job_peers.PEERS)
def test_a_peer_takes_the_steps_of_the_stock_loop(name):
    reason = None if name in {"Accelerate", "Lightning"} else "no extra installs it"
    pytest.importorskip(MODULES[name], reason=reason)
    before = threading.active_count()
    for precision in ("fp32", "bf16"):
        expected, loop = make_loop(precision), make_loop(precision)
        torch.manual_seed(3)  # of dropout
        for _ in range(3):
            expected.visit()
        torch.manual_seed(3)
        with ExitStack() as closing:
            epoch = job_peers.begin_peer(name, "rows", loop, closing, {})
            assert len(loop.losses) == 3
            epoch()
            epoch()
        # Lightning does not clip for a fused optimizer under autocast.
        rtol = 1e-2 if name == "Lightning" and precision == "bf16" else 0.0
        for ours, theirs in (
            (loop.losses, expected.losses),
            (loop.parameters, expected.parameters),
        ):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)
    assert threading.active_count() <= before


def test_a_peer_that_does_not_run_is_named_and_left_out(monkeypatch, capsys, tmp_path):
    closed = []

    def break_down(_loop, closing):
        closing.callback(closed.append, "broken")

        def epoch():
            msg = "no such thing\nas this"
            raise RuntimeError(msg)

        return epoch

    def cannot_begin(*_):
        msg = "libfoo"
        raise ImportError(msg)

    peers = {"again": lambda loop, _: loop.visit, "broken": break_down, "missing": cannot_begin}
    monkeypatch.setattr(job_peers, "PEERS", peers)
    monkeypatch.setattr(job_table, "PEERS", job_peers.PEERS)
    monkeypatch.setattr(job_table, "list_peers", lambda: list(job_peers.PEERS))
    monkeypatch.setitem(JOBS, "rows", JobRow(make_rows))
    for plan in ("MAIN", "REPAIRS", "PEER_PLAN"):
        monkeypatch.setattr(job_table, plan, Plan(rounds=8, warmup=2))
    monkeypatch.setattr(job_table, "VISIT_S", 0.001)
    path = tmp_path / "found.json"
    assert main(["jobs", "rows", "--device", "cpu", "--json", str(path)]) == 0
    said = capsys.readouterr().err
    assert "rows: broken is not raced: no such thing\n" in said
    assert closed == ["broken"]
    assert "rows: missing is not raced: libfoo\n" in said
    found = json.loads(path.read_text())
    names = [each["name"] for each in found["measurements"]]
    assert "speedup/rows/again" in names
    assert [row["job"] for row in found["table"]][-1] == "rows: again"
    assert found["table"][-1]["over stock"]
    assert not [key for key in names if "broken" in key or "missing" in key]


def test_only_installed_peers_are_listed(monkeypatch):
    monkeypatch.setattr(job_peers, "find_spec", lambda name: name == "lightning" or None)
    assert job_peers.list_peers() == ["Lightning"]
