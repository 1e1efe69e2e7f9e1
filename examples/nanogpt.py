"""A training loop in nanoGPT's style, before and after: `python examples/nanogpt.py`.

Both train the same small GPT on the sources of Python's own library, with loss scaling.
"""

import sysconfig
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import fastamp
from fastamp.bench.gpt import GPT, Shape

STEPS, BATCH, BLOCK = 30, 16, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def read_text():
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def make_model():
    torch.manual_seed(0)
    model = GPT(Shape(layers=1, heads=2, width=32, block_size=BLOCK)).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def report(step, loss):
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.3f}")


def train_before(text):
    def get_batch():
        starts = torch.randint(len(text) - BLOCK, (BATCH,))
        windows = [torch.from_numpy(text[i : i + BLOCK + 1].astype(np.int64)) for i in starts]
        batch = torch.stack(windows).to(DEVICE)
        return batch[:, :-1], batch[:, 1:]

    model, optimizer = make_model()
    scaler = torch.amp.GradScaler(DEVICE)
    for step in range(STEPS):
        x, y = get_batch()
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        report(step, loss)


def train_after(text):
    dataset = fastamp.TokenDataset(text, BLOCK)
    loader = fastamp.DataLoader(dataset, BATCH, shuffle=True, device=DEVICE, seed=0)
    model, optimizer = make_model()
    scaler = fastamp.GradScaler(DEVICE)
    for step, (x, y) in enumerate(islice(loader, STEPS)):
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        report(step, loss)


if __name__ == "__main__":
    text = read_text()
    for train in (train_before, train_after):
        start_s = time.perf_counter()
        train(text)
        print(f"{train.__name__}: {time.perf_counter() - start_s:.1f} s")
