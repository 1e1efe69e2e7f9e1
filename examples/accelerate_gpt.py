"""Train a small GPT with Accelerate and fastamp: `python examples/accelerate_gpt.py`.

Needs `pip install 'fastamp[accelerate]'`. Accelerate scales losses on GPUs only: on a CPU this
trains in bf16, without a scaler. For the Hugging Face Trainer there is
`fastamp.integrations.transformers.AmpTrainer`.
"""

import sysconfig
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

import fastamp
from fastamp.bench.gpt import GPT, Shape
from fastamp.integrations.accelerate import prepare

STEPS, BATCH, BLOCK = 60, 16, 32


def make_loader():
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    return fastamp.DataLoader(fastamp.TokenDataset(text, BLOCK), BATCH, shuffle=True, seed=0)


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="fp16" if torch.cuda.is_available() else "bf16")
    scaler = prepare(accelerator)  # from now on, clip_grad_norm_ and step are fastamp's
    model = GPT(Shape(layers=1, heads=2, width=32, block_size=BLOCK))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = make_loader()  # prepared, it stays a fastamp.DataLoader
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for step, (x, y) in enumerate(islice(loader, STEPS)):
        with accelerator.autocast():
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()  # does nothing after a skipped step
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print("loader:", loader.stats().path)
    print(f"steps: {scaler.last_step.way}; skipped: {scaler.skipped_steps}")


if __name__ == "__main__":
    main()
