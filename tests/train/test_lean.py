"""fastamp.AdamW in fine_tune and in checkpoints, of one process and of ranks."""

from functools import partial

import pytest
import torch
from support import lean, ranks

import fastamp


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 64, generator=generator)
    return x, (x[:, :4] > 0).long() @ torch.tensor([1, 2, 4, 8]) % 5


def train(folder=None, **fields):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.GELU(), torch.nn.Linear(80, 5))
    model.bfloat16()
    config = {"lr": 1e-2, "precision": "bf16-mixed", "checkpoint_dir": folder, **fields}
    config["optimizer"] = partial(fastamp.AdamW, lr=1e-2, weight_decay=0.01, moments="8bit")
    result = fastamp.fine_tune(model, data(), config=fastamp.TrainConfig(**config))
    return model, result


def test_fine_tune_resumes_to_the_bit(tmp_path):
    whole, _ = train(max_steps=9, schedule="constant")
    train(tmp_path, max_steps=4, schedule="constant")
    resumed, result = train(tmp_path, max_steps=9, schedule="constant")
    assert result.steps == 9
    lean.assert_same(resumed.state_dict(), whole.state_dict())


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_shards_move_to_other_numbers_of_ranks(tmp_path):
    with ranks.start(3) as started:
        whole = lean.checkpointed_run(tmp_path / "whole", 1, 6)
        for count in (2, 3, 2):
            found = started.run(count, lean.checkpointed_run, tmp_path / "parts", count, 2)
    lean.assert_same(found[0], whole)
