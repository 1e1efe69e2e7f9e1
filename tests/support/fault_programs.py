"""Programs for faults to strike: they report their progress, and resume when they run again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pickle
from pathlib import Path

import torch
from support.faults import report
from support.trainable import Loop, loud, outcome_of_finished

from fastamp import _files
from fastamp.train import Checkpointer, CheckpointError
from fastamp.train.state_file import read_file

TRAINING = {"max_steps": 12, "checkpoint_every": 2}
ACCUMULATE = 2
NEW = "a new record\n" * 1000


class Reporting:
    """Reports what `fine_tune` has loaded and saved, and the steps that it begins."""

    def __init__(self) -> None:
        self.calls, self.start = 0, 0

    def patch(self) -> None:
        save, restore = Checkpointer._save, Checkpointer.restore

        def save_and_report(checkpointer, step, metric):
            save(checkpointer, step, metric)
            report("saved", step)

        def restore_and_report(checkpointer):
            step = restore(checkpointer)
            self.start = step or 0
            report("resumed", self.start)
            return step

        Checkpointer._save, Checkpointer.restore = save_and_report, restore_and_report

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
    fields = {"loss_fn": reporting.loss, "accumulate": ACCUMULATE, **TRAINING}
    found = outcome_of_finished(folder, fields)
    report("outcome", hashlib.sha256(pickle.dumps(found)).hexdigest())


def look_and_train(folder: Path) -> None:
    """Report which checkpoints are damaged, then train."""
    look(folder)
    train(folder)


def look_and_loop(folder: Path) -> None:
    """Report which checkpoints are damaged, then train in a loop of one's own."""
    logging.disable()
    look(folder)
    Reporting().patch()
    begin = functools.partial(report, "begun")
    found = Loop(folder).run(steps=12, every=2, at_step=begin)
    report("outcome", hashlib.sha256(pickle.dumps(found)).hexdigest())


def look(folder: Path) -> None:
    for path in folder.glob("step-*.pt"):
        with report_damage():
            read_file(path)


@contextlib.contextmanager
def report_damage():
    try:
        yield
    except CheckpointError as error:
        report("damaged", str(error))


def write_a_file(folder: Path) -> None:
    """Write over an older file, as records and pages are written."""
    _files.write(folder / "record", NEW.encode())


def write_carelessly(folder: Path) -> None:
    """Replace a file without syncing it, as nobody should."""
    (folder / "new").write_text("x" * 10_000)
    (folder / "new").replace(folder / "record")
    (folder / "page").unlink()
