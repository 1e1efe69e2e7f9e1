"""A soak: all of fastamp in one process for as long as wanted; its memory has to stay flat.

    nox -s soak -- --minutes 60

Rounds of jobs at random (`support.soak_jobs`), while SIGALRM and SIGUSR1 come every few
milliseconds. At even intervals, when threads and processes have ended and garbage is collected,
memory, threads, descriptors and processes are counted. After a warm-up of a sixth of the time the
last quarter of these samples must not be above the first one; the exit status is 1 where it is.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import logging
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from support import soak_jobs

import fastamp

Job = Callable[[random.Random, Path], None]

HANG_S = 300  # for one round, after which every thread's stack is printed
SETTLE_S = 20  # the longest time to wait for what is about to end
MEMORY_MIB = 6.0
"""How far memory may move: malloc and Python's arenas keep some MiB more or less."""


class Sample(NamedTuple):
    memory_mib: float
    threads: int
    descriptors: int
    processes: int
    objects: int


# How far the last quarter's median may be above the first one's.
BOUNDS = Sample(MEMORY_MIB, 0, 0, 0, 1000)


def take_sample() -> Sample:
    """Count what this process has, once all that is about to end has ended."""
    while soak_jobs.dropped:
        soak_jobs.dropped.pop().join(SETTLE_S)
    gc.collect()
    counts, deadline_s = count(), time.monotonic() + SETTLE_S
    steady_s = time.monotonic() + 0.2
    while time.monotonic() < min(steady_s, deadline_s):
        time.sleep(0.02)
        now = count()
        if now != counts:
            counts, steady_s = now, time.monotonic() + 0.2
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return Sample(memory_mib(), *count(), len(gc.get_objects()))


def count() -> tuple[int, int, int]:
    """Return the numbers of threads, descriptors and living or unwaited descendants."""
    threads = len([*Path("/proc/self/task").iterdir()])
    return threads, len(targets()), len(descendants())


def targets() -> list[str]:
    """Return the targets of the descriptors: a path, a socket, a pipe.

    Where a worker was killed, torch opens ten temporary files, to learn whether there are too many,
    and its handler of SIGCHLD may raise in the midst of one: that file stays open, and is torch's.
    """
    found = []
    probe = re.compile(re.escape(os.path.join(tempfile.gettempdir(), "tmp")) + r"\w{8}")  # noqa: PTH118
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one of this listing
            target = path.readlink()
            if not (probe.fullmatch(str(target)) and target.is_file()):
                found.append(f"{path.name} {target}")
    return sorted(found)


def descendants() -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, size = {os.getpid()}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def memory_mib() -> float:
    """Return the memory of this process alone: pages of files come and go."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


class Soak:
    """Rounds of jobs at random."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._rng, self._folder = random.Random(seed), folder
        self.done: Counter[str] = Counter()
        self.signals: Counter[str] = Counter()

    def run(self, length_s: float, interval_s: float) -> list[Sample]:
        """Run rounds for a time, and return the samples, of which the first is the start."""
        for number in (signal.SIGALRM, signal.SIGUSR1):
            signal.signal(number, self._hear)
        threading.excepthook = self._report
        soak_jobs.shared()
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.037)
        samples: list[Sample] = []
        recent: list[str] = []  # jobs since the last sample
        try:
            for job in (*soak_jobs.PEACEFUL, *soak_jobs.ALONE):  # allocate what each one keeps
                self._round([job])
            start_s = time.monotonic()
            while (elapsed_s := time.monotonic() - start_s) < length_s:
                jobs = [self._rng.choice(soak_jobs.ALONE)]
                if self._rng.random() < 0.6:
                    jobs = self._rng.choices(soak_jobs.PEACEFUL, k=self._rng.randrange(1, 4))
                recent += [job.__name__ for job in jobs]
                self._round(jobs)
                if elapsed_s >= len(samples) * interval_s:
                    samples.append(take_sample())
                    figures = " ".join(f"{figure:9.6g}" for figure in samples[-1])
                    print(f"{elapsed_s:7.0f} s {figures}", flush=True)
                    if samples[-1].descriptors > samples[-2:][0].descriptors:
                        print("  " + "\n  ".join([*targets(), *recent]), flush=True)
                    recent.clear()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        return samples

    def _round(self, jobs: list[Job]) -> None:
        """Do one job in the main thread, or several in threads of their own."""
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if jobs[0] in soak_jobs.ALONE:
            self._do(jobs[0], self._rng, self._folder)
        else:
            self._side_by_side(jobs)

    def _side_by_side(self, jobs: list[Job]) -> None:
        with ThreadPoolExecutor(len(jobs)) as executor:
            calls = []
            for place, job in enumerate(jobs):
                own = self._folder / str(place)
                own.mkdir()
                rng = random.Random(self._rng.random())
                calls.append(executor.submit(self._do, job, rng, own))
            if self._rng.random() < 0.5:
                os.kill(os.getpid(), signal.SIGUSR1)
            for call in calls:
                call.result()

    def _do(self, job: Job, rng: random.Random, folder: Path) -> None:
        job(rng, folder)
        self.done[job.__name__] += 1

    def _hear(self, number: int, _frame: object) -> None:
        self.signals[signal.Signals(number).name] += 1

    def _report(self, args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, soak_jobs.BrokenError):
            sys.__excepthook__(args.exc_type, args.exc_value, args.exc_traceback)
            self.done["a thread failed"] += 1


def judge(samples: list[Sample], memory: float) -> list[tuple[str, float, float, float, bool]]:
    """Return for each figure its first and last quarter's medians, its bound and whether it holds.

    The warm-up, a sixth of the samples, is left out.
    """
    rest = samples[len(samples) // 6 :]
    quarter = max(1, len(rest) // 4)
    rows = []
    for name, bound in BOUNDS._replace(memory_mib=memory)._asdict().items():
        values = [getattr(sample, name) for sample in rest]
        first, last = (statistics.median(part) for part in (values[:quarter], values[-quarter:]))
        rows.append((name, first, last, bound, last - first <= bound))
    return rows


def main() -> int:
    """Soak, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--samples", type=int, default=120, help="spread over the time")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--memory-mib", type=float, default=BOUNDS.memory_mib)
    args = parser.parse_args()
    faulthandler.enable()
    logging.disable()  # of sinks that fail
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    torch.set_num_threads(2)  # a team of its own for each thread
    length_s = args.minutes * 60
    print(f"fastamp {fastamp.__file__}, {fastamp.backends()}, seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(args.seed, Path(folder))
        samples = soak.run(length_s, length_s / args.samples)
    rows = judge(samples, args.memory_mib)
    print(f"\n{sum(soak.done.values())} jobs in {args.minutes:g} minutes, {len(samples)} samples")
    print(", ".join(f"{n} {name}" for name, n in (soak.done + soak.signals).most_common()))
    print(f"{'':12} {'start':>9} {'first quarter':>14} {'last quarter':>13} {'bound':>7}")
    for (name, first, last, bound, holds), start in zip(rows, samples[0], strict=True):
        verdict = "flat" if holds else "NOT FLAT"
        print(f"{name:12} {start:9.1f} {first:14.1f} {last:13.1f} {bound:+7.0f}  {verdict}")
        if name == "descriptors" and not holds:
            print("  " + "\n  ".join(targets()))
    return 0 if all(row[-1] for row in rows) and not soak.done["a thread failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
