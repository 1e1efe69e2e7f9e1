"""A text classifier as a task: `python -m fastamp.bench examples/task_hugging_face.py:make`.

As in Hugging Face's run_glue.py the batches are dicts, and the loss is the model's own.
"""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification


def make(device, seed):
    lines = [line.strip() for line in Path(torch.__file__).read_text().splitlines()]
    tokens = [torch.tensor([*line.encode()[:32].ljust(32, b"\0")]) for line in lines]
    labels = [int(line.startswith("#")) for line in lines]  # is it a comment?
    data = [
        {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": label}
        for ids, label in zip(tokens, labels, strict=True)
    ]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=256, intermediate_size=256, num_labels=2, **sizes)
    model = BertForSequenceClassification(config)
    return model, data, None, {"batch_size": 16, "max_norm": 1.0}
