"""What `fastamp.fine_tune` makes of the data: epochs, samples and how much each batch counts."""

from __future__ import annotations

import pytest
import torch
from support.trainable import CrashError, act_at, crash, make_data, outcome, run
from support.trainers import MARKS
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import fastamp

pytestmark = MARKS


class Noted(TensorDataset):
    """Keeps the samples that are asked for, in order, with the epoch that it was told."""

    def __init__(self, n=32):
        super().__init__(*make_data(n))
        self.seen, self.epoch = [], None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        self.seen.append((self.epoch, index))
        return super().__getitem__(index)


class Sharding(DataLoader):
    """A loader that has `set_epoch`, as those of Accelerate do."""

    def set_epoch(self, epoch):
        self.sampler.set_epoch(epoch)


def one_rank_of(dataset):
    return DistributedSampler(dataset, num_replicas=1, rank=0, seed=5)


LOADERS = {
    "sampler": lambda data: DataLoader(data, 8, sampler=one_rank_of(data)),
    "batch sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(one_rank_of(data), 8, drop_last=False)
    ),
    "loader": lambda data: Sharding(data, 8, sampler=one_rank_of(data)),
    "fastamp": lambda data: fastamp.DataLoader(data, 8, sampler=one_rank_of(data)),
}


def orders(n_epochs):
    sampler = one_rank_of(range(32))
    for epoch in range(n_epochs):
        sampler.set_epoch(epoch)
        yield from ((epoch, index) for index in sampler)


@pytest.mark.parametrize("kind", LOADERS)
def test_every_epoch_is_told_and_has_an_order_of_its_own(kind):
    data = Noted()
    run(data=LOADERS[kind](data), epochs=3, max_steps=None, checkpoint_every=None)
    assert data.seen == [*orders(3)]


@pytest.mark.parametrize("step", [4, 5])  # an epoch has 2 steps
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_epoch_is_told_its_number(kind, step, tmp_path):
    fields = {"epochs": 3, "max_steps": None, "checkpoint_every": 1}
    expected = outcome(*run(data=LOADERS[kind](Noted()), **fields))
    with pytest.raises(CrashError):
        run(tmp_path, LOADERS[kind](Noted()), loss_fn=act_at(step, crash), **fields)
    data = Noted()
    assert outcome(*run(tmp_path, LOADERS[kind](data), **fields)) == expected
    left = [*orders(3)][(step - 1) * 16 :]
    assert data.seen[-len(left) :] == left


def test_the_orders_change_as_lightnings_do():
    pl = pytest.importorskip("lightning.pytorch")
    data = Noted()

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)

        def training_step(self, batch, _):
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu"}
    pl.Trainer(max_epochs=3, **quiet).fit(Module(), LOADERS["sampler"](data))
    ours = Noted()
    run(data=LOADERS["sampler"](ours), epochs=3, max_steps=None, checkpoint_every=None)
    assert [index for _, index in ours.seen] == [index for _, index in data.seen]
