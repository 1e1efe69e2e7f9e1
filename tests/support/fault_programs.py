"""Programs for faults to strike: they report their progress, and resume when they run again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from support.faults import report
from support.trainable import Loop, loud, outcome, run

from fastamp.bench import __main__ as bench
from fastamp.bench import selftest
from fastamp.bench.record import Report
from fastamp.train import CheckpointError
from fastamp.train.checkpoint import Checkpoints
from fastamp.train.ranks import Ranks

TRAINING = {"max_steps": 12, "checkpoint_every": 2}
ACCUMULATE = 2


class Reporting:
    """Reports what `fine_tune` has loaded and saved, and the steps that it begins."""

    def __init__(self) -> None:
        self.calls, self.start = 0, 0

    def patch(self) -> None:
        save, load = Checkpoints.save, Checkpoints.load

        def save_and_report(checkpoints, step, *args):
            save(checkpoints, step, *args)
            report("saved", step)

        def load_and_report(checkpoints, *args):
            state = load(checkpoints, *args)
            self.start = state["step"] if state else 0
            report("resumed", self.start)
            return state

        Checkpoints.save, Checkpoints.load = save_and_report, load_and_report

    def loss(self, output, target):
        if torch.is_grad_enabled():
            self.calls += 1
            if self.calls % ACCUMULATE == 1:
                report("begun", self.start + self.calls // ACCUMULATE + 1)
        return loud(output, target)


def train(folder: Path) -> None:
    """Train, from the newest checkpoint if there is one, and report the outcome."""
    logging.disable()
    reporting = Reporting()
    reporting.patch()
    found = outcome(*run(folder, loss_fn=reporting.loss, accumulate=ACCUMULATE, **TRAINING))
    report("outcome", hashlib.sha256(pickle.dumps(found)).hexdigest())


def look_and_train(folder: Path) -> None:
    """Report which checkpoints are damaged, then train."""
    look(folder)
    train(folder)


def look_and_loop(folder: Path, in_thread: bool = False) -> None:  # noqa: FBT001, FBT002
    """Report which checkpoints are damaged, then train in a loop of one's own."""
    logging.disable()
    look(folder)
    Reporting().patch()
    begin = functools.partial(report, "begun")
    found = Loop(folder, in_thread=in_thread).run(steps=12, every=2, at_step=begin)
    report("outcome", hashlib.sha256(pickle.dumps(found)).hexdigest())


def look(folder: Path) -> None:
    if not torch.distributed.is_initialized():
        checkpoints = Checkpoints(folder, keep=3, ranks=Ranks())
        for path in checkpoints._list():
            with report_damage():
                checkpoints._read(path, lambda _: None)


@contextlib.contextmanager
def report_damage():
    try:
        yield
    except CheckpointError as error:
        report("damaged", str(error))


def measure(folder: Path) -> int:
    """Write a bench's record and page over older ones."""

    def prepare(args):
        return {}, lambda: Report(table=[{"arm": "x"}])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "prepare", prepare)
        options = ["--json", str(folder / "record"), "--report", str(folder / "page")]
        status = bench.main(["selftest", *options])
    if status:
        sys.exit(status)


def write_carelessly(folder: Path) -> None:
    """Replace a file without syncing it, as nobody should."""
    (folder / "new").write_text("x" * 10_000)
    (folder / "new").replace(folder / "record")
    (folder / "page").unlink()
