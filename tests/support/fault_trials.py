"""Trials: a program is struck by faults at random and run again, and must have lost nothing.

    nox -s faults -- --kills 500 --signals 200 --failures 200 --loops 100

What must hold is stated once, in the functions of `PROPERTIES`; each program is a `Subject`. A
trial that fails is repeated by `--only`, with the seed and the name that the report gives it.
"""

from __future__ import annotations

import argparse
import errno
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from support.fault_programs import NEW
from support.faults import Fault, Ran, Server

import fastamp

if TYPE_CHECKING:
    from collections.abc import Callable

PRELOADED = ("torch._dynamo", "support.fault_programs")  # in the process that forks the programs
SENT = (signal.SIGTERM, signal.SIGINT)
HEARD = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}
REFUSALS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES)


@dataclass
class History:
    """The runs of a program in one folder: struck by faults, and at the end without one."""

    folder: Path
    expected: Ran
    """Of the program in another folder, without faults."""
    faults: list[Fault] = field(default_factory=list)
    rans: list[Ran] = field(default_factory=list)

    @property
    def last(self) -> Ran:
        """The last run so far."""
        return self.rans[-1]

    @property
    def is_over(self) -> bool:
        """Whether the last run had no fault."""
        return self.faults[-1].kind == "none"

    def before(self) -> Ran | None:
        """Return the run before the last one."""
        return self.rans[-2] if len(self.rans) > 1 else None

    def said(self, word: str) -> list:
        """Return what all runs have reported under a word."""
        return [value for ran in self.rans for value in ran.said(word)]


# The properties. Each is called after every run, and returns a problem or None.


def saved_can_be_restored(history: History) -> str | None:
    """What was reported as saved can be restored."""
    resumed = history.last.said("resumed")
    known = max((step for ran in history.rans[:-1] for step in ran.said("saved")), default=0)
    if resumed and min(resumed) < known:
        return f"step {known} was saved, and {resumed} is restored"
    return None


def begun_steps_are_saved(history: History) -> str | None:
    """A signal lets the running step end, and saves it."""
    before, resumed = history.before(), history.last.said("resumed")
    if before is None or not set(before.codes) <= HEARD or not resumed:
        return None
    begun = max(before.said("begun"), default=0)
    return f"step {begun} had begun, and {resumed} is restored" if min(resumed) < begun else None


def signals_are_heard(history: History) -> str | None:
    """A signal ends the program in the end, with the status of a signal."""
    fault, codes = history.faults[-1], history.last.codes
    if fault.kind == "signal" and history.last.struck and codes[fault.rank] not in HEARD:
        return f"signal {fault.number} came, and the program ended with {codes}"
    return None


def files_are_whole(history: History) -> str | None:
    """A file with a checkpoint's name is a whole checkpoint."""
    damaged = history.last.said("damaged")
    return f"damaged: {damaged[0]}" if damaged else None


def ends_the_same(history: History) -> str | None:
    """A run that resumes ends with the same parameters, to the bit."""
    ours, theirs = (set(ran.said("outcome")) for ran in (history.last, history.expected))
    if not history.is_over or ours == theirs:
        return None
    return f"the outcome differs: {history.last.codes} {history.last.err[-1500:]}"


def errors_are_named(history: History) -> str | None:
    """An error of the disk does no harm, or is raised with the folder."""
    codes, err = history.last.codes, history.last.err
    if history.faults[-1].kind not in {"fail", "full"} or not any(codes):
        return None
    line = err.strip().splitlines()[-1]
    named = f"{history.folder}: " in line
    return None if named else f"{codes}: {err[-1500:]}"


def nothing_is_left_behind(history: History) -> str | None:
    """A run that saves leaves nothing but its newest checkpoints in the folder."""
    names = sorted(path.name for path in history.folder.iterdir())
    is_tidy = len(names) == 3 and names[0].startswith("step-")
    saves = history.is_over and history.last.said("saved")
    return f"left behind: {names}" if saves and not is_tidy else None


def old_or_new(history: History) -> str | None:
    """A file is either the old one or the new one, whole."""
    text = (history.folder / "record").read_text()
    was_written = any(0 in ran.codes for ran in history.rans)
    is_whole = text == NEW or (text == FILES["record"] and not was_written)
    return None if is_whole else f"record is neither the old one nor the new one: {text[-100:]!r}"


@dataclass(frozen=True)
class Subject:
    """A program that ends if it is run often enough, and the properties that must hold."""

    program: str
    args: tuple = ()
    ranks: int = 0
    properties: tuple[Callable[[History], str | None], ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """The texts of files that are in the folder at first."""

    def run(self, server: Server, folder: Path, fault: Fault) -> Ran:
        """Run it once; make the folder if it is missing."""
        if not folder.exists():
            folder.mkdir()
            for name, text in self.files.items():
                (folder / name).write_text(text)
        program = f"support.fault_programs:{self.program}"
        return server.run(program, folder, *self.args, fault=fault, ranks=self.ranks)


FILES = {"record": "an older record", "page": "an older page"}
TRAINING = (
    saved_can_be_restored,
    begun_steps_are_saved,
    signals_are_heard,
    files_are_whole,
    ends_the_same,
    errors_are_named,
    nothing_is_left_behind,
)
SUBJECTS = {
    "fine_tune": Subject("look_and_train", properties=TRAINING),
    "fine_tune, 2 ranks": Subject("look_and_train", ranks=2, properties=TRAINING),
    "loop": Subject("look_and_loop", properties=TRAINING),
    "file": Subject("write_a_file", properties=(old_or_new,), files=FILES),
}
# How often each subject is struck by each kind of fault.
KILLS = {
    ("fine_tune", "kill"): 9,
    ("fine_tune", "power"): 6,
    ("fine_tune, 2 ranks", "kill"): 1,
    ("fine_tune, 2 ranks", "power"): 1,
    ("file", "kill"): 1,
    ("file", "power"): 1,
}
SIGNALS = {
    ("fine_tune", "signal"): 6,
    ("fine_tune", "delay"): 3,
    ("fine_tune, 2 ranks", "signal"): 1,
}
FAILURES = {
    ("fine_tune", "fail"): 5,
    ("fine_tune", "full"): 2,
    ("fine_tune, 2 ranks", "fail"): 1,
    ("file", "full"): 1,
    ("file", "fail"): 1,
}
OFTEN = {"kill": 3, "power": 3, "signal": 2, "delay": 1, "full": 2, "fail": 1}
LOOPS = ("loop",)
OWN_LOOPS = {(name, kind): often for name in LOOPS for kind, often in OFTEN.items()}
GROUPS = {"kills": KILLS, "signals": SIGNALS, "failures": FAILURES, "loops": OWN_LOOPS}


class Trials:
    """Trials on one server."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server, self._seed = server, seed
        self._expected: dict[str, Ran] = {}

    def run_until(self, group: str, wanted: int) -> list[str]:
        """Do trials until so many faults have struck; return the problems."""
        index, struck, problems = 0, 0, []
        while struck < wanted:
            n_struck, found = self.run(group, index)
            index, struck, problems = index + 1, struck + n_struck, problems + found
        print(f"{group}: {index} trials, {struck} faults struck, {len(problems)} problems")
        return problems

    def run(self, group: str, index: int) -> tuple[int, list[str]]:
        """Do a trial; return how many faults struck, and the problems."""
        rng = random.Random(f"{self._seed} {group} {index}")
        name, kind = rng.choices(list(GROUPS[group]), GROUPS[group].values())[0]
        subject, expected, problems, n_struck = SUBJECTS[name], self._run_in_peace(name), [], 0
        with tempfile.TemporaryDirectory() as made:
            history = History(Path(made, "run"), expected)
            n_faults = rng.randint(1, 2)
            for number in range(n_faults + 1):
                is_last = number == n_faults
                fault = Fault() if is_last else _draw(rng, kind, subject, expected, number)
                history.faults.append(fault)
                history.rans.append(subject.run(self._server, history.folder, fault))
                n_struck += _has_struck(history)
                found = filter(None, (holds(history) for holds in subject.properties))
                problems += [f"{group}/{index}, {name}: {history.faults}: {each}" for each in found]
        print(*problems, sep="\n", end="\n" * bool(problems), flush=True)
        return n_struck, problems

    def _run_in_peace(self, name: str) -> Ran:
        if name not in self._expected:
            with tempfile.TemporaryDirectory() as made:
                ran = SUBJECTS[name].run(self._server, Path(made, "run"), Fault())
            assert not any(ran.codes), ran.err
            self._expected[name] = ran
        return self._expected[name]


def _has_struck(history: History) -> bool:
    ran = history.last
    return bool(ran.struck) or (history.faults[-1].kind == "delay" and any(ran.codes))


def _draw(rng: random.Random, kind: str, subject: Subject, expected: Ran, number: int) -> Fault:
    """Draw a fault that a run of this length may meet; later runs are shorter."""
    rank = rng.randrange(subject.ranks or 1)
    signals = {"signal", "delay"}
    return Fault(
        kind,
        at=rng.randint(1, max(expected.calls_of(rank) // (number + 1), 1)),
        number=rng.choice(SENT if kind in signals else REFUSALS if kind == "fail" else [0]),
        length=rng.choice([1, 4, 10**9]) if kind in {"fail", "full"} else 1,
        cut=rng.random() < 0.5,
        delay_s=rng.random() * expected.elapsed_s,
        rank=rank,
    )


def main() -> int:
    """Do the trials, print each problem and what struck, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for group, count in {"kills": 500, "signals": 200, "failures": 200, "loops": 100}.items():
        parser.add_argument(f"--{group}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", metavar="GROUP/INDEX", help="one trial of this seed")
    args = parser.parse_args()
    print(f"fastamp {fastamp.__file__}, seed {args.seed}")
    with Server(*PRELOADED) as server:
        trials = Trials(server, args.seed)
        if args.only:
            group, index = args.only.split("/")
            problems = trials.run(group, int(index))[1]
        else:
            problems = [p for name in GROUPS for p in trials.run_until(name, getattr(args, name))]
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
