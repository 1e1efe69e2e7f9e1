"""Whole trainings that the ranks of step/test_shards.py run, and what stock does with them."""

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
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
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


def train(model, scaler, optimizer, rank=0, count=1, bad_rank=0):
    """Train on this rank's part of each batch, with an inf in one part of a gradient."""
    seen = {"skipped": [], "scales": [], "norms": []}
    for i, batch in enumerate(batches()):
        optimizer.zero_grad()
        part = batch[rank * BATCH // count : (rank + 1) * BATCH // count]
        logits = model(part[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        scaler.scale(loss).backward()
        if i == BAD_STEP and rank == bad_rank:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            held = [g for g in map(_ops.local_of, grads) if g.numel()]
            held[-1].view(-1)[0] = math.inf
        scaler.step(optimizer, max_norm=MAX_NORM)
        scaler.update()
        seen["skipped"].append(scaler.last_step.skipped)
        seen["scales"].append(scaler.get_scale())
        seen["norms"].append(scaler.last_step.norm.item())
    return seen


def make_scaler(**kwargs):
    return fastamp.GradScaler("cpu", init_scale=1024.0, growth_interval=6, **kwargs)


def train_alone(name):
    model = make_gpt()
    seen = train(model, make_scaler(), OPTIMIZERS[name](model.parameters()))
    return seen, [p.detach() for p in model.parameters()]


def train_sharded(name, sizes, bad_rank):
    """Train with fully_shard on a mesh of one dimension, or two for HSDP."""
    mesh = mesh_of(*sizes)
    model = make_gpt()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = OPTIMIZERS[name](model.parameters())
    seen = train(model, make_scaler(), optimizer, dist.get_rank(), dist.get_world_size(), bad_rank)
    return seen, [whole(p) for p in model.parameters()]


def train_fsdp1(name, bad_rank):
    """Train with FullyShardedDataParallel, whose gradients are plain parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 says that it is deprecated
        model = FullyShardedDataParallel(make_gpt(), device_id=torch.device("cpu"))
        optimizer = OPTIMIZERS[name](model.parameters())
        scaler = make_scaler(process_group=dist.group.WORLD)
        seen = train(model, scaler, optimizer, dist.get_rank(), dist.get_world_size(), bad_rank)
        with FullyShardedDataParallel.summon_full_params(model):
            return seen, [p.detach().clone() for p in model.parameters()]


def train_ddp(name, accumulate):
    """Train with DDP; accumulate: the batch comes in two halves, the first without a reduction."""
    model = DistributedDataParallel(make_gpt())
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = make_scaler()
    rank, count = dist.get_rank(), dist.get_world_size()
    scales = []
    for batch in batches():
        optimizer.zero_grad()
        part = batch[rank * BATCH // count : (rank + 1) * BATCH // count]
        micro = part.chunk(2) if accumulate else [part]
        for i, tokens in enumerate(micro):
            last = i == len(micro) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(tokens[:, :-1]).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
                scaler.scale(loss / len(micro)).backward()
        scaler.step(optimizer, max_norm=MAX_NORM)
        scaler.update()
        scales.append((scaler.get_scale(), scaler.last_step.norm.item()))
    return scales, [p.detach() for p in model.parameters()]


def collectives(what, stock):
    """Count the collectives of one step after backward."""
    count = dist.get_world_size()
    if what == "tensor parallel":
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh_of(count), plan)
        inputs = torch.ones(2, 8)
    else:
        model = make_gpt()
        mesh = mesh_of(2, count // 2) if what == "hsdp" else mesh_of(count)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        inputs = batches()[0, :, :-1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = (torch.amp.GradScaler if stock else fastamp.GradScaler)("cpu")
    scaler.scale(model(inputs).square().mean()).backward()
    with CommDebugMode() as counted:
        if stock:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
        else:
            scaler.step(optimizer, max_norm=MAX_NORM)
        scaler.update()
    return counted.get_total_counts()
