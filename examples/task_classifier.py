"""An image classifier as a task: `python -m fastamp.bench examples/task_classifier.py:make`.

The network, loss and optimizer of pytorch/examples' mnist/main.py, on scikit-learn's digits.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make(device, seed):
    digits = load_digits()
    x, y = torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), 64, shuffle=True, drop_last=True)
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
    pool = [nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()]
    head = [nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1)]
    options = {
        "optimizer": lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0),
        "evaluate": lambda model: model(x[1500:].to(device)).argmax(1).cpu() == y[1500:],
    }
    return nn.Sequential(*convolutions, *pool, *head), loader, nn.functional.nll_loss, options
