"""Whole trainings that the ranks of step/test_shards.py run."""

from __future__ import annotations

import contextlib
import math
import warnings

import torch
import torch.distributed as dist
from support.shard_cases import mesh_of, whole
from support.training import OPTIMIZERS
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fastamp
from fastamp import _ops
from fastamp.bench.gpt import GPT, Shape

STEPS, BAD_STEP = 14, 7  # the scale grows at the last one again
MAX_NORM = 0.5
BATCH = 4


def make_gpt():
    torch.manual_seed(0)
    return GPT(Shape(layers=2, heads=2, width=16, block_size=8))


def batches():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (STEPS, BATCH, 9), generator=generator)


def sharded(model, mesh):
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def train(how, name):
    """Train over the ranks in a way, or alone, with an inf in one part of the last rank.

    Returns:
        What each step has said, and the whole parameters.
    """
    count, rank = (1, 0) if how == "alone" else (dist.get_world_size(), dist.get_rank())
    model, group = make_gpt(), None
    if how in ("fsdp2", "hsdp"):
        sharded(model, mesh_of(2, count // 2) if how == "hsdp" else mesh_of(count))
    elif how == "ddp":
        model = DistributedDataParallel(model)
    elif how == "fsdp1":  # whose gradients are plain parts
        group = dist.group.WORLD
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it is deprecated
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = fastamp.GradScaler("cpu", 1024.0, growth_interval=6, process_group=group)
    seen = []
    for i, batch in enumerate(batches()):
        optimizer.zero_grad()
        part = batch[rank * BATCH // count : (rank + 1) * BATCH // count]
        halves = part.chunk(2) if how == "ddp" else [part]  # the first one is not reduced
        for half in halves:
            is_last = half is halves[-1]
            with contextlib.nullcontext() if is_last else model.no_sync():
                logits = model(half[:, :-1]).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, half[:, 1:].flatten())
                scaler.scale(loss / len(halves)).backward()
        if i == BAD_STEP and (rank == count - 1 or how == "ddp"):
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            [*_, last] = [g for g in map(_ops.local_of, grads) if g.numel()]
            last.view(-1)[0] = math.inf
        scaler.step(optimizer, max_norm=MAX_NORM)
        scaler.update()
        seen.append((scaler.last_step.skipped, scaler.get_scale()))
    summoned = contextlib.nullcontext()
    if how == "fsdp1":
        summoned = FullyShardedDataParallel.summon_full_params(model)
    with summoned:
        return seen, [whole(p).clone() for p in model.parameters()]


def collectives(what):
    """Count the collectives of one step after backward."""
    count = dist.get_world_size()
    if what == "tensor parallel":
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh_of(count), plan)
        inputs = torch.ones(2, 8)
    else:
        model = sharded(make_gpt(), mesh_of(2, count // 2) if what == "hsdp" else mesh_of(count))
        inputs = batches()[0, :, :-1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(model(inputs).square().mean()).backward()
    with CommDebugMode() as counted:
        scaler.step(optimizer, max_norm=MAX_NORM)
        scaler.update()
    return counted.get_total_counts()
