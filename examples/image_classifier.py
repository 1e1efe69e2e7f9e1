"""Classify handwritten digits with loss scaling: `python examples/image_classifier.py`.

The loader, the step, the timer and the tracker together; needs scikit-learn for the data.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import fastamp

EPOCHS, BATCH = 5, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_data():
    """Return training and held-out images [n, 1, 8, 8] in [0, 1] with their classes."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
    return torch.utils.data.random_split(data, [1500, len(data) - 1500])


def main():
    torch.manual_seed(0)
    train_data, held_out = load_data()
    train_loader = fastamp.DataLoader(train_data, BATCH, shuffle=True, device=DEVICE, seed=0)
    test_loader = fastamp.DataLoader(held_out, BATCH, device=DEVICE)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, EPOCHS * len(train_loader))
    scaler = fastamp.GradScaler(DEVICE)
    timer, tracker = fastamp.Timer(), fastamp.MetricsTracker()
    tracker.watch(scaler)
    step = 0
    for epoch in range(EPOCHS):
        for images, classes in train_loader:
            with timer("forward"), torch.autocast(DEVICE, dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(images), classes)
            with timer("backward"):
                scaler.scale(loss).backward()
            with timer("step"):
                scaler.step(optimizer, max_norm=1.0)
                scaler.update()
                if not scaler.last_step.skipped:  # waits for a GPU: see docs/guides/your-loop.md
                    scheduler.step()
            optimizer.zero_grad()
            tracker.log_scalar("train/loss", loss, step)
            step += 1
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in test_loader).item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {right / len(held_out):.1%}")
    print(train_loader.stats())
    print(timer.table())
    print({name: stats.last for name, stats in tracker.summary().items()})


if __name__ == "__main__":
    main()
