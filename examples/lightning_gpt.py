"""Train a small GPT with Lightning, fused AdamW and clipping: `python examples/lightning_gpt.py`.

Needs `pip install 'fastamp[lightning]'`; for `pytorch_lightning`, import that one instead.
"""

import sysconfig
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch

import fastamp
from fastamp.bench.gpt import GPT, Shape
from fastamp.integrations.lightning import AmpCallback, AmpPrecision, to_lightning_module

STEPS, BATCH, BLOCK = 60, 16, 32


def make_loaders():
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    train, held_out = (fastamp.TokenDataset(part, BLOCK) for part in (text[5000:], text[:5000]))
    train_loader = fastamp.DataLoader(train, BATCH, shuffle=True, seed=0)
    return train_loader, fastamp.DataLoader(held_out, BATCH)


def make_optimizer(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    # The schedule does not advance when a step overflows and is skipped.
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Printer(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % 10 == 1:
            print(f"step {trainer.global_step}: loss {outputs['loss'].item():.3f}")


def main():
    torch.manual_seed(0)
    model = GPT(Shape(layers=1, heads=2, width=32, block_size=BLOCK))
    amp = AmpCallback()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=STEPS,
            val_check_interval=STEPS,
            limit_val_batches=10,
            plugins=[AmpPrecision("16-mixed")],  # in place of precision="16-mixed"
            gradient_clip_val=1.0,
            callbacks=[amp, Printer()],
            logger=pl.loggers.CSVLogger(folder),
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(to_lightning_module(model, optimizer=make_optimizer), *make_loaders())
    print(trainer.callback_metrics)
    print({name: stats.last for name, stats in amp.tracker.summary().items()})


if __name__ == "__main__":
    main()
