"""A fuzzer: what a target is, and what every target promises.

Each input follows from the target's name and its number, so that a finding can be run again.
"""

from __future__ import annotations

import dis
import random
import resource
import signal
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch._dynamo  # else the first optimizer imports it, which takes longer than an input may

import fastamp

LIMIT_S = 1.0  # of the processor
STALL_S = 60.0  # of the clock, for what sleeps and never wakes
MEMORY_NBYTES = 4 << 30  # above what there is
OURS = str(Path(fastamp.__file__).parent)
RAISE = {dis.opmap["RAISE_VARARGS"]}


class Target:
    """Something that takes input from outside; a subclass says how.

    The property is the same for all: an input works, and so does the `use` of it afterwards; or
    `load` raises one of `errors`, by a `raise` statement of fastamp's, with a message, and leaves
    the subject as it was. Both within a second.
    """

    errors: tuple[type[BaseException], ...] = (ValueError,)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, rng: random.Random) -> Any:
        """Return an input."""
        raise NotImplementedError

    def fresh(self) -> Any:
        """Return what the input is to be loaded into."""

    def look(self, subject: Any) -> Any:
        """Return all of the subject that loading may change, in a form that can be compared."""

    def load(self, subject: Any, given: Any) -> Any:
        """Load the input."""
        raise NotImplementedError

    def use(self, subject: Any, given: Any, loaded: Any) -> None:
        """Do what a user does once it is loaded."""

    def is_clear(self, error: BaseException) -> bool:
        """Say whether an error was raised on purpose, with a message."""
        return is_raised_by(error, OURS) and len(str(error)) > 10

    def close(self) -> None:
        """Restore what the target has changed in the process."""


@dataclass
class Findings:
    """The findings of one target."""

    name: str
    count: int = 0
    refused: int = 0
    elapsed_s: float = 0.0
    slowest_s: float = 0.0
    found: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By kind: the number of the first input and its story."""

    def __str__(self) -> str:
        rate = self.count / max(self.elapsed_s, 1e-9)
        share = 100 * self.refused / max(self.count, 1)
        text = f"{self.name}: {self.count} inputs, {share:.0f} % refused, {rate:.0f} a second"
        stories = [f"\n--- input {n}: {kind}\n{story}" for kind, (n, story) in self.found.items()]
        return f"{text}, the slowest {self.slowest_s:.2f} s, {len(stories)} kinds of defects" + (
            "".join(stories)
        )


class SlowError(BaseException):
    """The input takes too long; no code of the product's catches it."""


def fuzz(target: Target, name: str, *, count: int, first: int = 0, limit_s: float = 1e9):
    """Run inputs of a target until their count or the time is up."""
    findings, start = Findings(name), time.monotonic()
    with bounds():
        for number in range(first, first + count):
            if findings.elapsed_s > limit_s:
                break
            before_s = time.process_time()
            outcome = run_one(target, random.Random(f"{name} {number}"))
            if isinstance(outcome, tuple) and SlowError.__name__ in outcome[0]:
                # Again, without what is imported at the first use.
                outcome = run_one(target, random.Random(f"{name} {number}"))
            findings.slowest_s = max(findings.slowest_s, time.process_time() - before_s)
            findings.count += 1
            findings.elapsed_s = time.monotonic() - start
            findings.refused += outcome == REFUSED
            if isinstance(outcome, tuple):
                findings.found.setdefault(outcome[0], (number, outcome[1]))
    return findings


REFUSED = "refused"


def run_one(target: Target, rng: random.Random) -> str | tuple[str, str]:
    """Run one input; return "works", REFUSED, or the kind of the defect and its story."""
    given = target.make(rng)
    subject = target.fresh()
    before = target.look(subject)
    stage = "load"
    try:
        with alarm():
            try:
                loaded = target.load(subject, given)
            except target.errors as error:
                if not target.is_clear(error):
                    return _tell("raw", error, given)
                if not same(before, target.look(subject)):
                    return _tell("changed by what was refused", error, given)
                return REFUSED
            stage = "use"
            target.use(subject, given, loaded)
    except (Exception, SlowError, SystemExit) as error:  # noqa: BLE001 - all are findings
        return _tell(stage, error, given)
    return "works"


def _tell(what: str, error: BaseException, given: Any) -> tuple[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(OURS)] or frames[-1:]
    kind = f"{what}: {type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
    story = "".join(traceback.format_exception(error, limit=-8))
    return kind, f"{story[-3000:]}given: {shorten(given)}"


def is_raised_by(error: BaseException, *folders: str) -> bool:
    """Say whether a `raise` statement in one of these folders raised an error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    return code.co_code[last.tb_lasti] in RAISE and code.co_filename.startswith(folders)


@contextmanager
def alarm():
    """Raise SlowError after a second of the processor, or a minute of the clock."""

    def stop(number: int, _frame: object) -> None:
        raise SlowError(signal.Signals(number).name)

    before = {kind: signal.signal(kind, stop) for kind in (signal.SIGVTALRM, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, STALL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def bounds():
    """Bound the process's memory, so that what asks for too much of it is found here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_NBYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def same(a: Any, b: Any) -> bool:
    """Compare trees to the bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.is_meta or a.layout is not torch.strided:
            return repr(a) == repr(b)
        a, b = (each.detach().resolve_conj().numpy() for each in (a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or repr(a) == repr(b)


def shorten(value: Any, most: int = 1500) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a story is told in any case
        text = f"{type(value).__name__} whose repr raises {error!r}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"
