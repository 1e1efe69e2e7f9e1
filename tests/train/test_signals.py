"""Signals: a checkpoint is written first, and then they do what they do."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from support.trainable import act_at, names, newest, outcome, run

import fastamp


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_the_signals_that_are_waited_for_can_be_chosen(number, tmp_path, request):
    request.addfinalizer(partial(signal.signal, number, signal.signal(number, signal.SIG_DFL)))
    numbers = (number, signal.SIGTERM, signal.SIGINT)
    handlers = [*map(signal.getsignal, numbers)]  # nohup ignores SIGHUP
    checkpointer = fastamp.Checkpointer(tmp_path, model=torch.nn.Linear(1, 1))
    checkpointer.on_signal(signal.SIGINT, number)  # is put back by the next call
    with checkpointer.on_signal(number):
        assert [*map(signal.getsignal, numbers[1:])] == handlers[1:]
        checkpointer.save(1, every=100)
        signal.raise_signal(number)
        assert names(tmp_path) == []
        with pytest.raises(SystemExit) as raised:
            checkpointer.save(2, every=100)
    assert raised.value.code == 128 + number
    assert names(tmp_path) == ["step-00000002.pt"]
    assert [*map(signal.getsignal, numbers)] == handlers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_first_and_then_does_what_it_does(number, tmp_path):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    expected = outcome(*run(checkpoint_every=1000))
    kind = SystemExit if number == signal.SIGTERM else KeyboardInterrupt
    loss_fn = act_at(8, lambda: os.kill(os.getpid(), number))
    with pytest.raises(kind) as raised:
        run(tmp_path, checkpoint_every=1000, loss_fn=loss_fn)
    assert raised.value.args == ((143,) if number == signal.SIGTERM else ())
    assert names(tmp_path) == ["step-00000008.pt"]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert outcome(*run(tmp_path, checkpoint_every=1000)) == expected


def test_a_second_interrupt_does_not_wait(tmp_path):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, checkpoint_every=1000, loss_fn=act_at(8, twice))
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_last_checkpoint_is_not_lost(number, tmp_path, monkeypatch):
    rename = Path.replace

    def replace(path, target):
        if target.name == "step-00000040.pt":
            signal.raise_signal(number)
        return rename(path, target)

    monkeypatch.setattr("pathlib.Path.replace", replace)
    with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt):
        run(tmp_path, checkpoint_every=1000)
    assert names(tmp_path) == ["step-00000040.pt"]


def test_a_signal_is_not_lost_where_the_program_raises(tmp_path):
    def fail():
        signal.raise_signal(signal.SIGTERM)
        msg = "the program's own"
        raise LookupError(msg)

    with pytest.raises(SystemExit) as raised:
        run(tmp_path, checkpoint_every=1000, loss_fn=act_at(8, fail))
    assert isinstance(raised.value.__context__, LookupError)


def test_a_handler_of_the_programs_own_is_called_and_training_goes_on(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        send = act_at(8, lambda: signal.raise_signal(signal.SIGTERM))
        _, result = run(tmp_path, checkpoint_every=1000, loss_fn=send)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (heard, result.steps) == ([signal.SIGTERM], 40)
    assert names(tmp_path) == ["step-00000008.pt", "step-00000040.pt"]


def test_signals_are_left_alone_without_checkpoints_and_in_other_threads(tmp_path):
    seen = []
    look = act_at(2, lambda: seen.append(signal.getsignal(signal.SIGINT)))
    run(loss_fn=look)
    thread = threading.Thread(target=lambda: run(tmp_path, max_steps=4))
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
    assert newest(tmp_path) == 4
