"""What checkpoints cost a loop: steps with one save among them, against steps without.

`python benchmarks/checkpoint_cost.py --steps 20 --rounds 14`: a GPT on random bytes, saved by
`fastamp.Checkpointer` at once and in a thread; the wait for the thread counts. Arms take turns, in
mirrored blocks. The last column but one is the share of time lost, with its 95 % interval. The last
one is the share spent in `save` and `wait`: the loss, less what the thread takes from the cores.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

import fastamp
from fastamp.bench.gpt import GPT, Shape
from fastamp.bench.race import Case, Plan, run_race

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = Shape(layers=4, heads=4, width=256, block_size=128)
BATCH = 8


def make_visit(
    folder: Path | None, steps: int, waits_s: list[float], *, in_thread: bool
) -> Callable[[], None]:
    """Return a function that trains for some steps, with one save after the first of them.

    `waits_s` gets the time in calls of the checkpointer.
    """
    torch.manual_seed(0)
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(256, (BATCH, SHAPE.block_size + 1))
    parts = {"model": model, "optimizer": optimizer}
    checkpointer = folder and fastamp.Checkpointer(folder, **parts, in_thread=in_thread)
    done = 0

    def visit() -> None:
        nonlocal done
        for step in range(steps):
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            fastamp.optimizer_step(optimizer, max_norm=1.0, zero_grad=True)
            done += 1
            if checkpointer and step == 0:
                start_s = perf_counter()
                checkpointer.save(done)
                waits_s.append(perf_counter() - start_s)
        if checkpointer:
            start_s = perf_counter()
            checkpointer.wait()
            waits_s[-1] += perf_counter() - start_s

    return visit


def main() -> None:
    """Measure, and print a row for each arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="for each save")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        waits_s: dict[str, list[float]] = {"no saves": [0.0], "at once": [], "in a thread": []}

        def make() -> Case:
            arms = {"no saves": make_visit(None, args.steps, [], in_thread=False)}
            for name, in_thread in {"at once": False, "in a thread": True}.items():
                folder = Path(tempfile.mkdtemp(dir=made))
                waits = waits_s[name]
                arms[name] = make_visit(folder, args.steps, waits, in_thread=in_thread)
            return Case(arms=arms)

        race = run_race(make, Plan(rounds=args.rounds, warmup=2, builds=(5,)))
        size = max(path.stat().st_size for path in Path(made).rglob("*.pt"))
    print(f"{args.steps} steps for each save of {size / 2**20:.0f} MiB, {args.rounds} rounds")
    for name in race.arms:
        cost = race.ratio("no saves", name).scaled(lambda ratio: ratio - 1)
        time_s, inside_s = race.time_s(name).value, median(waits_s[name])
        print(f"{name:12} {time_s:8.2f} s   {cost.text('.1%'):24} {inside_s / time_s:.2%}")


if __name__ == "__main__":
    main()
