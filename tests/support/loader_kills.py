"""Loops over a loader that are killed at random moments and resumed with other workers.

`python tests/support/loader_kills.py 30` kills each kind 30 times; the suite does so once. Each
batch's digest and the loader's state after it are written to files, as a training loop writes
checkpoints; what all runs together have written has to be what one undisturbed run writes.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset

import fastamp

BATCHES = 40  # of a run, over two epochs or more


class Drawn(Dataset):
    """Rows that draw from the sample's generators, and now and then wait."""

    def __len__(self):
        return 90

    def __getitem__(self, index):
        rng = fastamp.sample_rng()
        time.sleep(1e-3 * rng.python.random())
        noise = torch.rand(1500, generator=rng.torch) + float(rng.numpy.random())
        return {"row": noise + index, "index": index}


class Stream(IterableDataset):
    """A stream that knows where it is."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 40:
            self.place += 1
            yield torch.full((5,), 1.0 * self.place)
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


TOKENS = np.split(np.arange(2001, dtype=np.uint32), [333, 1500])
ANY = (0, 1, 2, 4)  # how many workers a run may have
# What is loaded, its options, and the workers that a run may have.
KINDS = {
    "threads": (Drawn, {"worker": "thread"}, ANY),
    "stream": (Stream, {"shuffle": False}, (0,)),
    "tokens": (lambda: fastamp.TokenDataset(TOKENS, 20, random_offsets=True), {}, (0,)),
}


def run(kind: str, workers: int, state: Path, log: Path, pause_s: float) -> None:
    """Resume the loop from the state, and run it until it has had all batches."""
    warnings.simplefilter("ignore")  # more workers than cores
    make, options, _ = KINDS[kind]
    loader = fastamp.DataLoader(
        make(), 4, num_workers=workers, **{"shuffle": True, "seed": 3, **options}
    )
    done = 0
    if state.exists():
        found = pickle.loads(state.read_bytes())
        done = found["done"]
        loader.load_state_dict(found["loader"])
    while done < BATCHES:  # a run may be killed after its last one
        for batch in loader:
            digest = hashlib.sha256()
            for leaf in tree_leaves(batch):
                digest.update(leaf.numpy().tobytes())
            done += 1
            with log.open("a") as file:
                file.write(json.dumps([done, digest.hexdigest()]) + "\n")
            new = state.with_suffix(".new")
            new.write_bytes(pickle.dumps({"done": done, "loader": loader.state_dict()}))
            new.replace(state)
            if done == BATCHES:
                return
            time.sleep(pause_s)


def count_lines(log: Path) -> int:
    """Return how many batches are in a log."""
    return log.read_bytes().count(b"\n") if log.exists() else 0


def try_kind(kind: str, kills: int, seed: int) -> list[str]:
    """Kill a loop so many times, let it end, and return what differs from an undisturbed one."""
    draw = random.Random(f"{kind} {seed}")
    workers = KINDS[kind][2]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as made:
        whole, parts, state = (Path(made, name) for name in ("whole", "parts", "state"))
        process = context.Process(target=run, args=(kind, workers[0], state, whole, 0.0))
        process.start()
        process.join()
        state.unlink()
        killed = 0
        while True:
            args = (kind, draw.choice(workers), state, parts, 0.004)
            process = context.Process(target=run, args=args)
            process.start()
            # Kill it after some batches and a moment; counted, as a busy machine is slow.
            goal, moment_s = count_lines(parts) + draw.randrange(12), draw.uniform(0, 0.01)
            while killed < kills and process.is_alive() and count_lines(parts) < goal:
                time.sleep(0.001)
            process.join(moment_s if killed < kills else None)
            if process.exitcode is None:
                process.kill()
                killed += 1
                process.join()
            elif process.exitcode:
                return [f"{kind}: a run ended with {process.exitcode}"]
            else:
                state.unlink(missing_ok=True)  # the run is complete: the next one begins anew
                if killed >= kills:
                    break
        expected = dict(json.loads(line) for line in whole.read_text().splitlines())
        lines = [json.loads(line) for line in parts.read_text().splitlines()]
    problems = [f"{kind}: batch {n} is another" for n, digest in lines if expected[n] != digest]
    if {n for n, _ in lines} != set(expected):
        problems.append(f"{kind}: batches are missing")
    return problems


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for name in KINDS:
        print(name, *try_kind(name, int(sys.argv[1]), 0)[:20], sep="\n", flush=True)
