"""Peak memory of a dataset that is a list of bytes, with one process, torch's workers and threads.

`python benchmarks/worker_memory.py --gigabytes 2 --workers 4`: proportional set sizes (Linux) of
the process and its children at the end of a pass, when every item has been touched.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import deque
from itertools import islice
from pathlib import Path

import torch

import fastamp

ITEM_NBYTES = 4000
KINDS = ("one process", "torch's workers", "threads")


def pss_nbytes() -> int:
    """Return the memory of this process and its children; shared pages count in proportion."""
    own = Path("/proc/self")
    children = (own / "task" / own.resolve().name / "children").read_text().split()
    total = 0
    for folder in (own, *(Path("/proc", child) for child in children)):
        lines = (folder / "smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 1024 * total


def load(kind: str, gigabytes: float, workers: int) -> int:
    """Read the dataset once; return the memory while its workers are alive."""
    items = [i.to_bytes(4, "little") * (ITEM_NBYTES // 4) for i in range(int(gigabytes * 2.5e5))]
    options = {"collate_fn": len, "shuffle": True}
    if kind == "one process":
        loader = torch.utils.data.DataLoader(items, 64, **options)
    elif kind == "threads":
        options |= {"num_workers": workers, "worker": "thread"}
        loader = fastamp.DataLoader(items, 64, **options)
    else:
        options |= {"num_workers": workers, "persistent_workers": True}
        loader = torch.utils.data.DataLoader(items, 64, **options)
    batches = iter(loader)  # whose end would end the threads
    deque(islice(batches, len(loader)), maxlen=0)
    return pss_nbytes()


def main() -> None:
    """Measure each kind in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        print(json.dumps(load(args.kind, args.gigabytes, args.workers)))
        return
    one = 0
    for kind in KINDS:
        command = [sys.executable, "-Wignore", *sys.argv, "--kind", kind]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        nbytes = json.loads(done.stdout)
        one = one or nbytes
        print(f"{kind}: {nbytes / 1e9:.2f} GB, {nbytes / one:.2f}x")


if __name__ == "__main__":
    main()
