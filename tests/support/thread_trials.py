"""Passes over thread workers that end in every way: no thread or descriptor is left.

`python tests/support/thread_trials.py 20000`; a small part of it runs in the suite.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

import fastamp

N = 48
LARGE = 1 << 18  # floats of a row: four of them make a slot that is leased


class Rows(Dataset):
    """Rows, of which some break; large ones, where slots are looked at."""

    def __init__(self, rng):
        self.broken = rng.choice([-1, -1, rng.randrange(N)])
        self.size = LARGE if rng.random() < 0.02 else 2000
        self.wait_s = rng.choice([0, 0, 1e-4])

    def __len__(self):
        return N

    def __getitem__(self, index):
        if self.wait_s:
            time.sleep(self.wait_s)
        if index == self.broken:
            raise LookupError(index)
        return torch.full((self.size,), float(index)), index


def fail(_):
    raise LookupError


def sampler_fails():
    yield from range(9)
    raise LookupError


def make_loader(rng):
    """Return a loader at random."""
    options = {
        "batch_size": rng.choice([None, 1, 4]),
        "num_workers": rng.randrange(1, 5),
        "worker": "thread",
        "device": rng.choice([None, None, "meta"]),
    }
    failing = rng.choice([None, None, None, "worker_init_fn", "collate_fn", "sampler"])
    if failing == "sampler":
        options["sampler"] = sampler_fails()
    elif failing:
        options[failing] = fail
    return fastamp.DataLoader(Rows(rng), **options)


def run_pass(rng, loader):
    """Begin a pass and end it: at its end, in the middle, or by an error."""
    ends_after = rng.choice([0, 1, 3, 10**6])
    with contextlib.suppress(LookupError, RuntimeError):
        for count, _batch in enumerate(loader, 1):
            if count >= ends_after:
                break


def count_left():
    """Return the numbers of threads and of descriptors."""
    named = [thread for thread in threading.enumerate() if thread.name.startswith("fastamp")]
    return len(named), len([*Path("/proc/self/fd").iterdir()])


def ends(condition):
    """Wait until threads have ended; return whether they have."""
    deadline_s = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return condition()


def main(passes, seed):
    """Run so many passes; return what is left over."""
    rng = random.Random(seed)
    gc.collect()
    gc.disable()  # threads end without it
    before, done, made = count_left(), 0, 0
    while done < passes:
        loader = make_loader(rng)
        for _ in range(rng.randrange(1, 5)):
            run_pass(rng, loader)
            done += 1
        del loader
        made += 1
        if made % 50 == 0 or done >= passes:
            if not ends(lambda: count_left()[0] == before[0]):
                return f"after {done} passes: {count_left()[0]} threads are left"
            gc.collect()
            if not ends(lambda: count_left() == before):
                return f"after {done} passes: threads, descriptors {before} became {count_left()}"
    return ""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), seed=0) or 0)
