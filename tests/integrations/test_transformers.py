"""The Hugging Face Trainer with fastamp's step."""

from __future__ import annotations

import math

import pytest
import torch
from support.accelerate_cases import fresh_state, use_fp16
from support.devices import NATIVE
from support.trainers import OVERFLOWS
from support.training import assert_same_bits, assert_same_but_for_rounding

import fastamp
from fastamp.integrations.transformers import AmpTrainer

transformers = pytest.importorskip("transformers")
__all__ = ["fresh_state"]  # a fixture
pytestmark = pytest.mark.usefixtures("fresh_state")
STEPS = 12
TOKENS = torch.arange(16 * 48).reshape(48, 16) % 61


class Fp16(transformers.Trainer):
    """A Trainer that scales losses on a CPU, as on a GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        use_fp16(self.accelerator)


class Ours(AmpTrainer, transformers.Trainer):
    pass


class OursInFp16(AmpTrainer, Fp16):
    pass


class Loading(Ours):
    """Reads by a loader of ours."""

    def get_train_dataloader(self):
        data = fastamp.ArrayDataset({"input_ids": TOKENS, "labels": TOKENS})
        return self.accelerator.prepare(fastamp.DataLoader(data, 8, shuffle=True, seed=4))


def make_trainer(kind, folder, overflows=(), **options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    n_backwards = iter(range(1000))
    model.transformer.ln_f.weight.register_hook(
        lambda grad: grad * math.inf if next(n_backwards) in overflows else grad
    )
    options = {"save_strategy": "no", "max_grad_norm": 0.5, "learning_rate": 1e-2, **options}
    options |= {"max_steps": STEPS, "logging_steps": 1, "disable_tqdm": True, "report_to": "none"}
    args = transformers.TrainingArguments(folder, use_cpu=True, **options)
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    trainer = kind(model, args, train_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def test_it_trains_as_the_trainer_alone_and_logs_what_the_steps_found(tmp_path):
    skipped_at = [2 * i + 1 for i in OVERFLOWS]  # of backward passes
    options = {"optim": "sgd", "gradient_accumulation_steps": 2}
    trainers = []
    for kind in (OursInFp16, Fp16):
        trainers.append(make_trainer(kind, tmp_path, skipped_at, **options))
        trainers[-1].train()
    ours, alone = trainers
    norms = logged(ours, "grad_norm")
    assert [i for i, norm in enumerate(norms) if not math.isfinite(norm)] == list(OVERFLOWS)
    skipped = [sum(i >= at for at in OVERFLOWS) for i in range(STEPS)]
    assert logged(ours, "skipped_steps") == skipped
    assert logged(ours, "loss_scale")[2:5] == [2048.0, 1024.0, 1024.0]
    assert ours.lr_scheduler.last_epoch == STEPS - len(OVERFLOWS)
    assert ours.scaler.skipped_steps == len(OVERFLOWS)
    assert ours.scaler.last_step.way.startswith(NATIVE)
    assert_same_but_for_rounding(ours.model.state_dict(), alone.model.state_dict())
    assert logged(ours, "learning_rate") == logged(alone, "learning_rate")
    finite = [i for i in range(STEPS) if i not in OVERFLOWS]
    expected = logged(alone, "grad_norm")
    assert [norms[i] for i in finite] == pytest.approx([expected[i] for i in finite], rel=1e-5)


def test_a_trainer_before_the_mixin_is_refused():
    with pytest.raises(TypeError, match="Late: expected AmpTrainer before Trainer among its"):
        type("Late", (transformers.Trainer, AmpTrainer), {})


@pytest.mark.parametrize("kind", [Ours, OursInFp16, Loading])
def test_it_resumes_from_its_checkpoints_to_the_bit(tmp_path, kind):
    """In the second epoch, of six steps each."""
    options = {"save_strategy": "steps", "save_steps": 8}
    whole = make_trainer(kind, tmp_path / "a", **options)
    whole.train()
    resumed = make_trainer(kind, tmp_path / "b", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-8"))
    assert_same_bits(whole.model.state_dict(), resumed.model.state_dict())
    assert logged(whole, "grad_norm") == logged(resumed, "grad_norm")
    assert whole.accelerator.scaler is None or (
        whole.scaler.state_dict() == resumed.scaler.state_dict()
    )


TINY = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"intermediate_size": 8, "num_labels": 11}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("GPT2Config", "GPT2LMHeadModel"),
        ("LlamaConfig", "LlamaForCausalLM"),
        ("BertConfig", "BertForMaskedLM"),
        ("BertConfig", "BertForTokenClassification"),
    ],
)
def test_a_loss_of_ones_own_is_given_the_targets_of_the_models_own_loss(config, kind):
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**TINY)).eval()
    ids = torch.randint(11, (2, 6))
    labels = ids.roll(2, 1).index_fill(1, torch.tensor([4]), -100)

    def loss_fn(output, target):
        return torch.nn.functional.cross_entropy(output.mT, target)

    batch = {"input_ids": ids, "labels": labels}
    expected = model(**batch).loss.item()
    assert fastamp.ModelCall(loss_fn)(model, batch).item() == pytest.approx(expected, rel=1e-5)
