"""`fastamp.ModelCall`: every form of batch, output and target, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from support.trainable import make_data
from torch.nn import functional

from fastamp import ModelCall, TrainConfig, fine_tune

IDS = torch.arange(24).reshape(2, 12) % 7
MASK = torch.ones_like(IDS).index_fill(1, torch.tensor([0, 1]), 0)


class Tagger(torch.nn.Module):
    """Predicts a class for each token, without a word on what kind of model it is."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.make = torch.nn.Embedding(7, 8), torch.nn.Linear(8, 7), make

    def forward(self, input_ids, attention_mask=None):
        return self.make(self.head(self.embed(input_ids)))


class Language(Tagger):
    loss_type = "ForCausalLM"


class TinyLMHeadModel(Tagger):
    pass


class TinyForCausalLM(Tagger):
    pass


class Output:
    def __init__(self, logits, loss=None):
        self.logits, self.loss = logits, loss


FORMS = {
    "tensor": lambda logits: logits,
    "half": lambda logits: logits.bfloat16(),
    "tuple": lambda logits: (logits, "cache"),
    "dict": lambda logits: {"logits": logits},
    "object": Output,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_language_model_predicts_what_comes_next(form):
    model, model_call = Language(FORMS[form]), ModelCall()
    logits = Language(FORMS["tensor"])(IDS[:, :-1])
    if form == "half":
        logits = logits.bfloat16().float()
    each = functional.cross_entropy(logits.mT, IDS[:, 1:], reduction="none")
    for batch in (IDS, [IDS], {"input_ids": IDS, "labels": IDS}):
        loss = model_call(model, batch)
        assert (loss.dtype, loss.item()) == (torch.float32, pytest.approx(each.mean().item()))
    assert model_call(model, (IDS[:, :-1], IDS[:, 1:])).item() == loss.item()
    labels = IDS.masked_fill(MASK == 0, -100)
    masked = model_call(model, {"input_ids": IDS, "attention_mask": MASK, "labels": labels})
    assert masked.item() == pytest.approx(each[:, 1:].mean().item())


def mean_of_all(output, target):
    return functional.cross_entropy(output.mT, target)


@pytest.mark.parametrize("loss_fn", [None, mean_of_all])
def test_labels_are_shifted_only_for_a_model_that_declares_itself_causal(loss_fn):
    labels = (IDS + 2) % 7
    batch, model_call = {"input_ids": IDS, "labels": labels}, ModelCall(loss_fn)
    logits = Tagger(FORMS["tensor"])(IDS)
    here = functional.cross_entropy(logits.mT, labels).item()
    following = functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:]).item()
    for kind in (Language, TinyLMHeadModel, Tagger, TinyForCausalLM):
        model = kind(FORMS["tensor"])
        expected = here if kind is Tagger else following
        assert model_call(model, batch).item() == pytest.approx(expected, rel=1e-6), kind
        _, target = model_call.split_for(torch.compile(model, backend="eager"), batch)
        assert torch.equal(target, model_call.split_for(model, batch)[1])


class Classifier(Tagger):
    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.embed(input_ids)).mean(1)
        return self.make(logits, labels)


def test_a_column_label_is_the_target():
    label = torch.tensor([3, 5])
    batch = {"input_ids": IDS, "attention_mask": MASK, "label": label}
    seen = []
    model = Classifier(lambda logits, labels: seen.append(labels) or logits)
    loss = ModelCall()(model, batch)
    assert loss.item() == functional.cross_entropy(model(IDS), label).item()
    assert seen[0] is label


class Computes(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x, labels=None):
        return self.make(x, (x - labels).square().sum())


def test_a_loss_that_the_model_computes_is_taken():
    batch = {"x": torch.ones(3, 2), "labels": torch.zeros(3, 2)}
    makes = (Output, lambda x, y: (y, x), lambda x, y: {"loss": y}, lambda _, y: y)
    for make in makes:
        assert ModelCall()(Computes(make), batch).item() == 6
    assert ModelCall(functional.l1_loss)(Computes(Output), batch).item() == 1


class NanoGpt(torch.nn.Module):
    """Predicts the last token only, unless it is given targets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)

    def forward(self, idx, targets=None):
        hidden = self.embed(idx)
        if targets is None:
            return self.head(hidden[:, [-1]]), None
        logits = self.head(hidden)
        return logits, 2 * functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_model_of_nanogpts_form_is_given_its_targets_by_name():
    ids = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(0))
    x, y = ids[:, :-1], ids[:, 1:]
    expected = NanoGpt()(x, y)[1].item()
    model, data = NanoGpt(), {"idx": x, "targets": y}
    result = fine_tune(model, data, data, TrainConfig(max_steps=1, batch_size=3, device="cpu"))
    assert ModelCall().split(data)[1] is y  # whose elements count
    assert result.train_loss.values.tolist() == pytest.approx([expected])
    assert result.val_loss.values.tolist() == pytest.approx([model(x, y)[1].item()])
    with pytest.raises(ValueError, match=r"takes batches by name, {'idx': x, 'targets': y}"):
        ModelCall()(model, (x, y))


def test_several_inputs_and_other_dimensions():
    torch.manual_seed(0)
    model = torch.nn.Bilinear(3, 4, 5)
    a, b, y = torch.randn(6, 3), torch.randn(6, 4), torch.arange(6) % 5
    loss = ModelCall()(model, (a, b, y))
    assert torch.equal(loss, functional.cross_entropy(model(a, b), y))
    images, classes = torch.randn(2, 3, 8, 8), torch.randint(3, (2, 8, 8), dtype=torch.uint8)
    loss = ModelCall().loss(images, classes)
    assert torch.equal(loss, functional.cross_entropy(images, classes.long()))
    values = torch.randn(4, 1, dtype=torch.float64)
    assert ModelCall().loss(values, values + 2).item() == pytest.approx(4)
    assert ModelCall().loss(values, values).dtype == torch.float64


@pytest.mark.parametrize(
    ("output", "target", "error", "message"),
    [
        (torch.ones(4, 1), torch.ones(4), ValueError, r"\(4, 1\), target \(4,\).*output's shape"),
        (torch.ones(4, 1), torch.ones(4).long(), ValueError, "two classes or more in"),
        (torch.ones(4, 3), torch.ones(3).long(), ValueError, r"output \(4, 3\), target \(3,\)"),
        (torch.ones(4, 3), None, TypeError, "target: expected a tensor, or a loss_fn, got None"),
        ({"scores": 1}, torch.ones(4), TypeError, "got dict"),
        ("text", torch.ones(4), TypeError, "output: expected a tensor, .* got str"),
        ((), torch.ones(4), TypeError, "output: expected a tensor, .* got tuple"),
    ],
)
def test_an_output_without_a_loss_is_refused(output, target, error, message):
    with pytest.raises(error, match=message):
        ModelCall().loss(output, target)
    with pytest.raises(ValueError, match=r"loss: expected a 0-dim tensor, got torch.Size\(\[4\]\)"):
        ModelCall(lambda output, _: output)(torch.nn.Identity(), (torch.ones(4), torch.ones(4)))


class Whole(ModelCall):
    def __call__(self, model, batch):
        return model(batch[0]).sum()


def test_a_call_of_ones_own_is_refused_by_fine_tune_which_does_not_call_it():
    with pytest.raises(TypeError, match="model_call: fine_tune calls split, forward, loss"):
        fine_tune(torch.nn.Linear(8, 2), make_data(), config=TrainConfig(model_call=Whole()))
