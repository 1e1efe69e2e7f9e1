"""An epoch at scale, in one process: thousands of ranks, whose number changes on the way.

    nox -s scale -- --samples 10000000000 --ranks 4096 --changes 20 --looks 64

Between two changes all ranks take the same number of steps, as in training. A few ranks are
checked: real loaders load the state that the ranks before have left, and draw the rank's first and
last batches. The inverse of the permutation gives the place of each of these samples in the epoch,
which has to be the rank's. For random samples of the dataset it gives the rank and the number of
the sample there, and a loader of that rank has to draw it. Each sample has one place, and each
place one stage, rank and number: a sample that came twice, or never, would show at a wrong place.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import random
import time
from collections import Counter
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from support.loading import Rows

import fastamp
from fastamp.data import shuffle
from fastamp.data.shuffle import Permutation

SEED, EPOCH = 3, 2
STATE_NBYTES = 1000  # less than 1 KB, as JSON


def find_places(permutation, indices):
    """Return the places of the indices: the inverse of the permutation, round by round."""
    numbers = indices.numpy().astype(np.uint64)
    outside = np.ones(len(numbers), bool)
    while outside.any():
        left, right = np.divmod(numbers[outside], permutation._columns)
        for size, key in reversed(permutation._rounds):
            left, right = right, left
            left = (left + size - shuffle._hash(right, key, size)) % size
        numbers[outside] = left * permutation._columns + right
        outside = numbers >= permutation._length
    return torch.from_numpy(numbers.view(np.int64))


class Stage(NamedTuple):
    """What happens between two changes of the number of ranks."""

    ranks: int
    batch_size: int
    begin: int
    """Samples that all ranks have read before."""
    steps: int
    state: dict
    """The state that the ranks before have left."""


class _Counted(Permutation):
    drawn = 0

    def __getitem__(self, places):
        _Counted.drawn += len(places)
        return super().__getitem__(places)


def make_loader(length, ranks, rank, batch_size, state=None):
    """Return a rank's loader, which begins where the ranks before have stopped."""
    options = {"shuffle": True, "seed": SEED, "rank": rank, "world_size": ranks}
    loader = fastamp.DataLoader(Rows(length, torch.tensor), batch_size, **options)
    if state is None:
        loader.set_epoch(EPOCH)
    else:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def make_stages(rng, length, most_ranks, changes):
    """Return the stages of an epoch; after the last change the rest of it is read."""
    first, begin, stages = make_loader(length, 1, 0, 1), 0, []
    iterator = iter(first)  # the state of a pass that has begun
    state = first.state_dict()
    del iterator
    for following in range(changes, -1, -1):
        ranks = rng.randint(most_ranks // 2, most_ranks)
        share = (length - begin) // (following + 1) // ranks  # samples of a rank
        batch_size = rng.randint(1, min(16, share // 2))
        steps = rng.randint(share // batch_size // 2, share // batch_size)
        if following == 0:
            steps = -(-(length - begin) // (ranks * batch_size))
        stages.append(Stage(ranks, batch_size, begin, steps, {**state, "consumed": begin}))
        begin += ranks * batch_size * steps
    return stages


def look_at_ranks(rng, length, stages, looks):
    """Draw the first and last batches of some ranks of each stage, and check their places."""
    permutation, batches = Permutation(length, SEED + EPOCH), 0
    for stage, following in itertools.zip_longest(stages, stages[1:]):
        ranks, batch_size, begin, steps, state = stage
        for rank in rng.sample(range(ranks), min(looks, ranks)):
            for step in (0, steps - 1):
                place = begin + step * ranks * batch_size
                loader = make_loader(length, ranks, rank, batch_size, {**state, "consumed": place})
                batch = next(iter(loader))
                places = place + torch.arange(len(batch)) * ranks + rank
                places %= length  # the epoch's end is padded with its beginning
                assert torch.equal(find_places(permutation, batch), places)
                left, batches = loader.state_dict(), batches + 1
                assert left["consumed"] == min(place + ranks * batch_size, length)
                assert len(json.dumps(left)) < STATE_NBYTES
            assert following is None or left == following.state  # a few steps are as good as all
    return batches


def look_at_samples(rng, length, stages, looks):
    """Check that random samples are drawn by the ranks that have to draw them."""
    permutation = Permutation(length, SEED + EPOCH)
    begins = [stage.begin for stage in stages]
    for _ in range(looks):
        sample = rng.randrange(length)
        place = int(find_places(permutation, torch.tensor([sample])))
        ranks, batch_size, begin, _, state = stages[bisect.bisect_right(begins, place) - 1]
        number, rank = divmod(place - begin, ranks)
        loader = make_loader(length, ranks, rank, batch_size, state)
        chunks = loader.sampler.at(EPOCH, begin).chunks(number)
        assert int(next(chunks)[0]) == sample


def read_all(length, stages):
    """Return what all ranks of all stages read, batch by batch, for a small epoch."""
    samples = Counter()
    for ranks, batch_size, _, steps, state in stages:
        for rank in range(ranks):
            loader = make_loader(length, ranks, rank, batch_size, state)
            for batch in itertools.islice(iter(loader), steps):
                samples.update(batch.tolist())
    return samples


def simulate(samples, ranks, changes, looks, seed):
    """Return how many batches and samples were checked, and how many indices computed for it."""
    rng = random.Random(seed)
    before = _Counted.drawn
    with mock.patch.object(shuffle, "Permutation", _Counted):
        stages = make_stages(rng, samples, ranks, changes)
        batches = look_at_ranks(rng, samples, stages, looks)
        look_at_samples(rng, samples, stages, looks * len(stages))
    return batches, looks * len(stages), _Counted.drawn - before


def main() -> None:
    """Check an epoch of the given size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"samples": 10**10, "ranks": 4096, "changes": 20, "looks": 64, "seed": 0}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    start_s = time.monotonic()
    batches, samples, drawn = simulate(**vars(args))
    looked = f"{batches} batches and {samples} samples were read where they belong, and only there"
    print(f"{args}: {looked}; {drawn} indices computed, {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
