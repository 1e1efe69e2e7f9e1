"""nanoGPT's train.py as a task: `python -m fastamp.bench examples/task_nanogpt.py:make`."""

from pathlib import Path

import torch

from fastamp.bench.gpt import GPT, Shape  # in place of its model.py

data = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()


class Batches:
    def __iter__(self):  # its get_batch
        while True:
            ix = torch.randint(len(data) - 65, (12,))
            yield tuple(torch.stack([data[i + k : i + k + 64] for i in ix]) for k in (0, 1))


def make(device, seed):
    def configure_optimizers(model):
        kinds = [[p for p in model.parameters() if (p.dim() > 1) == d] for d in (True, False)]
        groups = [{"params": p, "weight_decay": w} for p, w in zip(kinds, (0.1, 0.0), strict=True)]
        return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)

    def loss(logits, y):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    model = GPT(Shape(layers=4, heads=4, width=128, block_size=64))
    return model, Batches(), loss, {"optimizer": configure_optimizers, "max_norm": 1.0}
