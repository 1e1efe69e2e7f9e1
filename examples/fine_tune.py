"""Train in one call, from scratch, with an interruption: `python examples/fine_tune.py`.

A small GPT on the sources of Python's own library, with checkpoints in a folder of its own.
"""

import itertools
import signal
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch

import fastamp
from fastamp.train.gpt import GPT, Shape

BLOCK = 32


def load_data():
    """Return windows of bytes to train on, and others to evaluate on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    train, held_out = np.split(text, [len(text) * 9 // 10])
    return fastamp.TokenDataset(train, BLOCK), fastamp.TokenDataset(held_out[: 50 * BLOCK], BLOCK)


def train(folder, interrupt_at=None):
    """Train, or resume from the newest checkpoint in the folder."""
    calls = itertools.count()

    def loss_fn(logits, target):
        if next(calls) == interrupt_at:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does; a checkpoint is written first
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    torch.manual_seed(0)
    model = GPT(Shape(layers=1, heads=2, width=32, block_size=BLOCK))
    config = fastamp.TrainConfig(
        max_steps=80,
        batch_size=16,
        lr=1e-2,
        warmup_steps=10,
        precision="16-mixed",
        loss_fn=loss_fn,
        checkpoint_dir=folder,
        checkpoint_every=20,
    )
    return fastamp.fine_tune(model, *load_data(), config)


def main():
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(folder, interrupt_at=30)
        except KeyboardInterrupt:
            print("interrupted; on disk:", sorted(path.name for path in Path(folder).iterdir()))
        result = train(folder)
    for step, loss in zip(*result.train_loss, strict=True):
        if step % 10 == 1:
            print(f"step {step}: loss {loss:.3f}")
    print(result)


if __name__ == "__main__":
    main()
