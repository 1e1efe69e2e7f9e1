"""What `fastamp.fine_tune` makes of the data: epochs, samples and how much each batch counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.trainable import CrashError, act_at, crash, make_data, outcome, run
from support.trainers import MARKS
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import fastamp
from fastamp import ModelCall, TrainConfig, fine_tune
from fastamp.train.batches import Batches

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
    every = 1 if kind == "fastamp" else None
    fields = {"epochs": 3, "max_steps": None, "checkpoint_every": every}
    expected = outcome(*run(data=LOADERS[kind](Noted()), **fields))
    with pytest.raises(CrashError):
        run(tmp_path, LOADERS[kind](Noted()), loss_fn=act_at(step, crash), **fields)
    data = Noted()
    assert outcome(*run(tmp_path, LOADERS[kind](data), **fields)) == expected
    left = [*orders(3)][(step - 1) // (every or 2) * (every or 2) * 16 :]
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


LABELS = torch.arange(6) < (torch.arange(8) % 5 + 2)[:, None]
PADDED = torch.randint(1, 11, (8, 6), generator=torch.Generator().manual_seed(3))


def gradient(train):
    """Return the gradient of a tiny GPT-2 in a step of SGD with the learning rate 1."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    fields = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id"], 0)
    torch.manual_seed(0)
    config = transformers.GPT2Config(**sizes, **fields, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, {"input_ids": PADDED * LABELS, "attention_mask": LABELS.long()})
    return torch.cat(
        [(a - b).flatten().detach() for a, b in zip(before, model.parameters(), strict=True)]
    )


def test_gradients_of_padded_text_are_those_of_hugging_faces_trainer(tmp_path):
    """Up to the count: transformers 5.23 counts a row's first label, which no token predicts."""
    labels = PADDED.masked_fill(~LABELS, -100)

    def ours(size):
        def train(model, columns):
            columns["labels"] = labels
            cut = [{k: v[i : i + size] for k, v in columns.items()} for i in range(0, 8, size)]
            fields = {"max_steps": 1, "accumulate": 8 // size, "max_norm": None, "device": "cpu"}
            fields |= {"optimizer": lambda parameters: torch.optim.SGD(parameters, 1.0)}
            fine_tune(model, DataLoader(cut, batch_size=None), config=TrainConfig(**fields))

        return train

    def theirs(size):
        def train(model, columns):
            import transformers

            columns["labels"] = labels
            rows = [{k: v[i] for k, v in columns.items()} for i in range(8)]
            fields = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
            fields |= {"max_steps": 1, "max_grad_norm": 0, "use_cpu": True, "report_to": []}
            fields |= {"save_strategy": "no", "disable_tqdm": True, "output_dir": tmp_path}
            arguments = transformers.TrainingArguments(**fields, lr_scheduler_type="constant")
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            trainer = transformers.Trainer(
                model, arguments, train_dataset=rows, optimizers=(optimizer, None)
            )
            trainer.train()

        return train

    whole, cut, by_trainer = (gradient(train) for train in (ours(8), ours(4), theirs(4)))
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-6)
    n, n_by_trainer = ((each != -100).sum() for each in (labels[:, 1:], labels))
    torch.testing.assert_close(by_trainer * n_by_trainer / n, whole, rtol=0, atol=1e-6)


def make_text(n=8):
    """Return sequences, and targets of which each sequence has another number that counts."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(7, (n, 6), generator=generator)
    lengths = torch.arange(n) % 6 + 1
    return ids, torch.where(torch.arange(6) < lengths[:, None], (ids + 1) % 7, -100)


class Tagger(torch.nn.Module):
    """Predicts a class for each token, and computes its loss if it is given targets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)

    def forward(self, tokens, labels=None):
        logits = self.head(self.embed(tokens))
        if labels is None:
            return logits
        return {"loss": torch.nn.functional.cross_entropy(logits.mT, labels)}


class OnDevice(ModelCall):
    """Counts into a tensor, as on a GPU."""

    def count(self, target, n_samples):
        return torch.tensor(super().count(target, n_samples))


FORMS = {
    "columns": lambda ids, targets: (ids, targets),
    "a model that returns its loss": lambda ids, targets: {"tokens": ids, "labels": targets},
}


def train_tagger(data, held_out=None, **fields):
    model = Tagger()
    fields = {"optimizer": "sgd", "lr": 0.5, "weight_decay": 0, "max_norm": None} | fields
    result = fine_tune(model, data, held_out, TrainConfig(**({"epochs": 1} | fields)))
    return [p.detach() for p in model.parameters()], result


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", [ModelCall, OnDevice])
def test_a_step_is_the_mean_over_the_targets_that_count_however_it_is_cut(form, call):
    ids, targets = make_text()
    ends = []
    for size in (8, 4, 3):
        columns = zip(ids.split(size), targets.split(size), strict=True)
        batches = fastamp.prefetch([FORMS[form](*pair) for pair in columns], "cpu")
        ends.append(train_tagger(batches, accumulate=-(-8 // size), model_call=call()))
    expected, result = ends[0]
    loss = torch.nn.functional.cross_entropy(Tagger()(ids).mT, targets)
    assert result.train_loss.values.tolist() == pytest.approx([loss.item()], rel=1e-6)
    for weights, each in ends[1:]:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(each.train_loss.values, result.train_loss.values, rtol=1e-6)


@pytest.mark.parametrize("call", [ModelCall, OnDevice])
def test_the_validation_loss_does_not_depend_on_the_batch_size(call):
    held_out, found = make_text(), []
    for size in (1, 3, 8):
        fields = {"batch_size": size, "lr": 1e-30, "model_call": call()}
        found.append(train_tagger(held_out, held_out, **fields)[1].val_loss.values[0])
    expected = torch.nn.functional.cross_entropy(Tagger()(held_out[0]).mT, held_out[1]).item()
    assert found == pytest.approx([expected] * 3, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", [ModelCall, OnDevice])
def test_a_batch_without_a_target_that_counts_is_nothing(form, call, tmp_path):
    ids, targets = make_text()
    empty = FORMS[form](ids, torch.full_like(targets, -100))
    full = FORMS[form](ids, targets)
    fields = {"keep_best": True, "checkpoint_dir": tmp_path, "model_call": call()}

    def prepared(*batches):
        return fastamp.prefetch([*batches], "cpu")

    weights, result = train_tagger(
        prepared(full, empty), prepared(empty, full), accumulate=2, **fields
    )
    expected, alone = train_tagger(prepared(full), prepared(full))
    torch.testing.assert_close(weights, expected)
    assert result.train_loss.values.tolist() == alone.train_loss.values.tolist()
    assert result.val_loss.values.tolist() == alone.val_loss.values.tolist()
    assert result.best_checkpoint == tmp_path / "step-00000001.pt"


def test_a_step_without_a_target_that_counts_changes_nothing():
    ids, targets = make_text()
    weights, result = train_tagger((ids, torch.full_like(targets, -100)))
    assert all(map(torch.equal, weights, Tagger().parameters()))
    assert math.isnan(result.train_loss.values[0])


IMAGES = [torch.ones(3, 4, 4), torch.ones(3, 5, 6)]
SAMPLES = {
    "images": (IMAGES, [{"boxes": torch.ones(3, 4)}, {"boxes": torch.ones(3, 4)}]),
    "sequences": ([torch.ones(5), torch.ones(7)], [torch.ones(1), torch.ones(1)]),
    "sequences by name": {"x": [torch.ones(5), torch.ones(7)]},
    "sequences with targets": ([torch.ones(5), torch.ones(5)], torch.ones(2)),
    "inputs of two columns": [[torch.ones(2, 5), torch.ones(2)], torch.ones(2)],
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_are_counted_in_lists_too(kind):
    data = fastamp.prefetch([SAMPLES[kind]], "cpu")
    batches = Batches("train_data", data, TrainConfig(device="cpu"), shuffle=False)
    assert [n for _, n in batches] == [2]


def test_a_list_is_a_dataset_of_samples():
    x, y = make_data(20)
    samples = [(row, int(label)) for row, label in zip(x, y, strict=True)]
    models = []
    for data in (samples, TensorDataset(x, y)):
        model, result = run(data=data, held_out=data, max_steps=6, precision="32-true")
        models.append((model, result))
    (ours, listed), (torchs, expected) = models
    assert all(map(torch.equal, ours.parameters(), torchs.parameters()))
    for name in ("train_loss", "val_loss"):
        assert getattr(listed, name).values.tolist() == getattr(expected, name).values.tolist()
