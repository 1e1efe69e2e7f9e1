"""`fastamp.fine_tune`: a model trained in one call."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastamp.step.shards import is_spread
from fastamp.train import ranks
from fastamp.train.config import TrainConfig
from fastamp.train.loop import Loop, modes_kept
from fastamp.train.random_state import rng_state, seed_all, set_rng_state
from fastamp.train.result import TrainResult


def fine_tune(
    model: nn.Module, train_data: Any, val_data: Any = None, config: TrainConfig | None = None
) -> TrainResult:
    """Train a model in place: fine-tune a pretrained one, or train one from scratch.

    1. The model moves to the device. A run in `config.checkpoint_dir` is resumed, as the log says.
    2. A step: for each of `config.accumulate` batches forward and loss under autocast, and backward
       of the scaled loss; then unscale, check, clip and step at once. The loss is the mean over the
       step's targets that are not -100 (`ModelCall.count`): one batch of 8 equals two of 4; without
       any it is NaN, and gradients are 0. The learning rate advances after a step that was taken.
    3. After every epoch, or as the config says: evaluation in the same precision, a checkpoint.

    With a checkpoint folder SIGTERM and Ctrl-C wait for the step, its evaluation and a checkpoint;
    a second signal acts at once. On a CPU a run that is resumed is bit-identical, except for random
    numbers that worker processes, or a loader other than fastamp's, draw within an epoch. With a
    loader that has no `state_dict` signals act at once, see `TrainConfig`'s `checkpoint_every`.

    Over ranks each calls this with the same arguments, and a model on its device in DDP or sharded
    by `fully_shard`. A Dataset or tensors are divided among them; a loader yields the rank's part,
    in as many batches as the others'. As in torch, gradients and training losses are means over the
    ranks, each of its own targets; validation losses over all, also of samples that pad a part.
    Only the first rank logs to `config.tracker`. As many ranks resume bit-identically, except for
    buffers, which are the first rank's, and the first sum of DDP on more than two. Another number,
    with as many steps in all or more, resumes the rest of the epoch, with the first random numbers.

    Args:
        model: modules keep their modes; if it is in evaluation mode itself, all of them train.
        train_data: a Dataset, such as a list of samples, or tensors (one, a tuple or a dict), which
            are shuffled; a DataLoader; or another iterable of batches, see `ModelCall.split`:
            `torch.utils.data.DataLoader(batches, batch_size=None)` for a list. Before each epoch
            `set_epoch(epoch)` of the loader or else its samplers, and of its dataset, is called.
        val_data: as `train_data`, but not shuffled; None evaluates nothing.
        config: None is `TrainConfig()`.

    Raises:
        CheckpointError: see `Checkpointer.save` and `restore`: only the model's device has changed.
        OSError: a checkpoint cannot be written; the model and older checkpoints are unchanged.
        TypeError: the model, the config, the data or the model's output are of a wrong kind.
        ValueError: there is no batch or parameter to train, shapes or options do not fit, ranks
            have unlike numbers of batches, or the run has finished: the model has its weights.

    Example:
        >>> x, y = torch.randn(64, 4), torch.randint(2, (64,))
        >>> config = fastamp.TrainConfig(epochs=2, batch_size=16, device="cpu")
        >>> fastamp.fine_tune(torch.nn.Linear(4, 2), (x, y), config=config).steps
        8
    """
    config = TrainConfig() if config is None else config
    for name, value, kind in (("model", model, nn.Module), ("config", config, TrainConfig)):
        if not isinstance(value, kind):
            msg = f"{name}: expected a {kind.__name__}, got {type(value).__name__}"
            raise TypeError(msg)
    n_ranks = ranks.count()
    if dist.is_available() and dist.is_torchelastic_launched():  # maybe without a process group
        n_ranks = int(os.environ["WORLD_SIZE"])
    if n_ranks > 1 and not (ranks.is_ddp(model) or any(map(is_spread, model.parameters()))):
        msg = "model: expected a model in DistributedDataParallel, or sharded by fully_shard, "
        raise ValueError(msg + f"as there are {n_ranks} ranks, got {type(model).__name__}")
    if config.chosen_device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # its generators are restored, too
    rng = rng_state()
    with modes_kept(model):
        seed_all(config.seed, ranks.rank())
        if not model.training:
            model.train()
        try:
            return Loop(model, train_data, val_data, config).train()
        finally:
            set_rng_state(rng)
