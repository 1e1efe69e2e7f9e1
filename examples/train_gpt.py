"""Train a small GPT on the bytes of your text: `python examples/train_gpt.py --data PATH`.

Without `--data` the text is the sources of Python's own library. With `--checkpoint-dir run`, a
training that was killed or interrupted by Ctrl-C resumes where the same command runs again. On
several processes: `torchrun --nproc-per-node 2 examples/train_gpt.py --parallel fsdp`.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset

import fastamp
from fastamp.bench.gpt import GPT, Shape, load_corpus, read_library

VALIDATION_WINDOWS = 64


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--data", type=Path, help="a file or a folder; the last tenth is held out")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=128, help="bytes in a window")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", default="32-true", help="or bf16-mixed, 16-mixed")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), help="under torchrun")
    parser.add_argument("--checkpoint-dir", help="where the run is saved, and resumed from")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    return parser.parse_args()


def load_data(path, block_size):
    """Return all windows of bytes to train on, and some to evaluate on."""
    train, validation = read_library()
    if path is not None:
        found = [file for file in sorted(path.rglob("*")) if file.is_file()]
        train, validation = load_corpus(found or [path])
    held_out = fastamp.TokenDataset(validation, block_size)
    stride = -(-len(held_out) // VALIDATION_WINDOWS)
    chosen = Subset(held_out, range(0, len(held_out), stride))
    return fastamp.TokenDataset(train, block_size), chosen


def in_ranks(model, kind, device):
    """Return the model in DDP or sharded by FSDP2, over the ranks that torchrun has started."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model.to(device)
    if kind == "ddp":
        return DistributedDataParallel(model)
    return fully_shard(model)


def main():
    options = parse_options()
    config = fastamp.TrainConfig(
        max_steps=options.steps,
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        lr=options.lr,
        warmup_steps=options.steps // 10,
        precision=options.precision,
        eval_every=options.checkpoint_every,
        checkpoint_dir=options.checkpoint_dir,
        checkpoint_every=options.checkpoint_every if options.checkpoint_dir else None,
        progress=True,
    )
    torch.manual_seed(0)
    sizes = {name: getattr(options, name) for name in ("layers", "heads", "width", "block_size")}
    data = load_data(options.data, options.block_size)
    model = GPT(Shape(**sizes))
    if options.parallel:
        model = in_ranks(model, options.parallel, config.chosen_device)
    result = fastamp.fine_tune(model, *data, config)
    if os.environ.get("RANK", "0") == "0":
        shown = range(0, len(result.train_loss.steps), max(1, options.steps // 10))
        for i in shown:
            print(f"step {result.train_loss.steps[i]}: loss {result.train_loss.values[i]:.3f}")
        print(result)
    if options.parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
