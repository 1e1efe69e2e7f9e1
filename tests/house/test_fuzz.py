"""Fuzzed: files of tokens and checkpoints. An input follows from its number.

A finding runs again by its test's name. FASTAMP_EXAMPLES sets how many inputs there are of each.
"""

from __future__ import annotations

import io
import itertools
import os
import random

import numpy as np
import pytest
import support.fuzz
import torch
from support.fuzz import OURS, damaged, works_or_is_refused
from support.loading import assert_same

import fastamp
from fastamp.train import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=range(int(os.environ.get("FASTAMP_EXAMPLES", "80"))))
def rng(request):
    return random.Random(request.node.name)


def test_damaged_files_of_tokens(rng, tmp_path):
    tokens = np.arange(rng.randrange(70)).astype(rng.choice(("u1", "u2", "i4", "i8", "f4")))
    file, path = io.BytesIO(), tmp_path / rng.choice(("tokens.bin", "tokens.npy"))
    np.save(file, tokens)
    path.write_bytes(damaged(file.getvalue() if path.suffix == ".npy" else tokens.tobytes(), rng))
    source = rng.choice((path, path, [path, path], [path, np.arange(9, dtype="u2")], [path, [3]]))
    dtype = rng.choice((None, None, "uint8", "<i4", ">u2", np.int64, np.float32))
    block_size, header = rng.randrange(1, 9), rng.choice((0, 0, 0, 1, 8, 99))

    def use(dataset):
        for index in (0, len(dataset) - 1, -1):
            x, y = dataset[index]
            assert x.dtype == y.dtype == torch.int64
            assert x.shape == y.shape == (dataset.block_size,)
            assert_same(x[1:], y[:-1])
        [x, _], *_ = itertools.islice(fastamp.DataLoader(dataset, 4), 20)
        assert_same(x[0], dataset[0][0])

    def load():
        return fastamp.TokenDataset(source, block_size, dtype, header)

    works_or_is_refused(load, use, lambda: None, (ValueError, TypeError))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that trains a model to a step, and the checkpoint of step 2."""
    folder, x = tmp_path_factory.mktemp("run"), torch.arange(16.0).reshape(8, 2)
    options = {"batch_size": 4, "schedule": "constant", "precision": "16-mixed"}

    def train(model, max_steps):
        config = fastamp.TrainConfig(max_steps=max_steps, checkpoint_dir=folder, **options)
        torch.manual_seed(0)
        return fastamp.fine_tune(model, (x, x[:, 0].long() % 2), config=config)

    train(torch.nn.Linear(2, 2), 2)
    [path] = folder.iterdir()
    return train, path, path.read_bytes()


def test_damaged_checkpoints(rng, run):
    train, path, whole = run
    for file in path.parent.iterdir():
        file.unlink()
    path.write_bytes(damaged(whole, rng))
    model = torch.nn.Linear(2, 2)

    def look():
        numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - what a checkpoint restores
        weights, files = dict(model.state_dict()), [*path.parent.iterdir()]
        return weights, model.training, numpy, random.getstate(), files

    def use(result):
        assert result.summary()

    works_or_is_refused(lambda: train(model, 3), use, look, CheckpointError, path.name)


@pytest.mark.parametrize(
    "code",
    [
        "int('an error without a word')",
        "changed.append(1); raise ValueError('refused on purpose')",
        "while True: pass",
        "'loaded, and its use fails'",
    ],
)
def test_an_input_that_neither_works_nor_is_refused_is_found(code, monkeypatch):
    monkeypatch.setattr(support.fuzz, "LIMIT_S", 0.02)
    changed, code = [], compile(code, f"{OURS}/x.py", "exec")

    def load():
        exec(code, {"changed": changed})  # noqa: S102

    with pytest.raises((AssertionError, ZeroDivisionError)):
        works_or_is_refused(load, lambda _: 1 / 0, lambda: [*changed], ValueError)
