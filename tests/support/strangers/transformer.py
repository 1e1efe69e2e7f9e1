"""A fine-tuned transformer: a body with a small rate, and a new head with a larger one."""

import torch
from torch import nn

WORDS, LENGTH, CLASSES = 200, 32, 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.words = nn.Embedding(WORDS, 64)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, tokens):
        return self.head(self.body(self.words(tokens)).mean(1))


def make(device, seed):
    pretrained = Classifier().state_dict()  # where a program loads a file
    model = Classifier()
    model.load_state_dict(pretrained)
    model.head.reset_parameters()
    model.words.requires_grad_(False)
    tokens = torch.randint(WORDS, (600, LENGTH))
    labels = tokens[:, 0] % CLASSES
    samples = list(zip(tokens[:500], labels[:500], strict=True))

    def optimizer(model):
        groups = [{"params": model.body.parameters(), "lr": 1e-4}]
        return torch.optim.AdamW([*groups, {"params": model.head.parameters(), "lr": 1e-3}])

    def evaluate(model):
        right = model(tokens[500:].to(device)).argmax(1) == labels[500:].to(device)
        return right.float().tolist()

    options = {"optimizer": optimizer, "evaluate": evaluate, "batch_size": 16, "max_norm": 1.0}
    return model, samples, nn.functional.cross_entropy, options
