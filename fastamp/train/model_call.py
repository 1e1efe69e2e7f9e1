"""How a model is called and how its loss is computed: what differs between models."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastamp.train.ranks import unwrapped

IGNORED = -100  # the target to ignore, as in torch and Hugging Face


class ModelCall:
    """How to call a model and compute its loss.

    `model_call(model, batch)` calls `split`, `forward` and `loss` in turn, and returns the loss;
    subclasses override one of these. `fine_tune` calls them, and `count` for a batch's weight.

    Args:
        loss_fn: `loss_fn(output, target)` returns a 0-dim tensor; `output` is the tensor of
            predictions in float32. None chooses the loss by the target, see `loss`.

    Example:
        >>> class Last(fastamp.ModelCall):
        ...     def split(self, batch):
        ...         return batch["history"][:, -1], batch["next"]
        >>> batch = {"history": torch.ones(4, 9, 3), "next": torch.zeros(4, 1)}
        >>> Last()(torch.nn.Linear(3, 1), batch).shape
        torch.Size([])
    """

    def __init__(self, loss_fn: Callable[[Tensor, Any], Tensor] | None = None) -> None:
        if isinstance(loss_fn, type):
            msg = f"loss_fn: expected {loss_fn.__name__}(), or a function, got the class"
            raise TypeError(msg)
        self.loss_fn = loss_fn

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a model on a batch: 0-dim, float32 or float64, with its graph."""
        inputs, target = self.split_for(model, batch)
        return self.loss(self.forward(model, inputs), target)

    def split_for(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return `split(batch)`, with what depends on the model.

        The "labels" of tokens are shifted, so that each token's target is the next label, for a
        class named "...ForCausalLM" or "...LMHeadModel", or with `loss_type = "ForCausalLM"`.
        """
        inputs, target = self.split(batch)
        if isinstance(inputs, (tuple, Tensor)) or not isinstance(inputs, Mapping):
            return inputs, target
        is_labels = target is inputs.get("labels")
        if is_labels and isinstance(target, Tensor) and target.ndim == 2:
            inside = unwrapped(model)
            is_causal = type(inside).__name__.endswith(("ForCausalLM", "LMHeadModel"))
            is_causal |= getattr(inside, "loss_type", None) == "ForCausalLM"
            target = _shifted(target) if is_causal else target
        return inputs, target

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into the model's inputs and the target of its output.

        =============================  ===========  ============================================
        batch                          inputs       target
        =============================  ===========  ============================================
        (x, y)                         x            y; for a language model it is already shifted
        (a, b, ..., y)                 (a, b, ...)  y
        integers [batch, time], alone  the batch    the same, shifted by one: a language model
        a mapping                      the batch    "labels", which a "label" becomes, or "targets"
        anything else                  the batch    None: the model computes its loss
        =============================  ===========  ============================================
        """
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
        if isinstance(batch, (tuple, list)):
            (batch,) = batch
        if isinstance(batch, Tensor):
            is_language = batch.ndim == 2 and _is_integer(batch)
            return batch, _shifted(batch) if is_language else None
        if not isinstance(batch, Mapping):
            return batch, None
        if "label" in batch and "labels" not in batch:
            batch = {{"label": "labels"}.get(key, key): batch[key] for key in batch}
        return batch, batch.get("labels", batch.get("targets"))

    def count(self, target: Any, n_samples: int) -> int | Tensor:
        """Return how many targets of a batch count: the weight of its loss, which is their mean.

        Its elements, without -100 of integers; `n_samples` if it is no tensor. A loss that leaves
        out others, or is no mean, needs a `count` of its own: 0, or a 0-dim tensor on the device.
        """
        if not isinstance(target, Tensor):
            return n_samples
        if not _is_integer(target):
            return target.numel()
        n_counted = (target.long() != IGNORED).sum()
        return n_counted if n_counted.is_cuda else int(n_counted)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Call the model: a mapping by keyword, "labels" if it takes them; a tuple by position."""
        if isinstance(inputs, tuple):
            return model(*inputs)
        if isinstance(inputs, Tensor) or not isinstance(inputs, Mapping):
            return model(inputs)
        takes_labels = _takes_labels(type(unwrapped(model)).forward)
        output = model(**{k: v for k, v in inputs.items() if takes_labels or k != "labels"})
        # A model of nanoGPT's form returns the loss after the predictions.
        is_last = "targets" in inputs and isinstance(output, tuple) and _read(output)[0] is None
        return output[::-1] if is_last else output

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the 0-dim loss, in float32 or the predictions' float64: the first that applies.

        1. `loss_fn` of the predictions: the output, its "logits", or a tuple's first element.
        2. The loss that the model computed: "loss", or an output, or first element, with 0
           dimensions; or the second, of a model that was given `targets` by a mapping.
        3. Integer targets: cross entropy that ignores -100; the target has the shape of the output
           without the dimension of the classes, which is the last or the second.
        4. Floating-point targets of the output's shape: mean squared error.

        Raises a TypeError without predictions or a target, a ValueError for other shapes.
        """
        loss, predictions = _read(output)
        if self.loss_fn is not None or loss is None:
            if not isinstance(predictions, Tensor):
                msg = f"output: expected a tensor, logits or a loss, got {type(output).__name__}"
                raise TypeError(msg)
            loss = (self.loss_fn or _default_loss)(_in_float32(predictions), target)
        if not isinstance(loss, Tensor) or loss.ndim:
            msg = f"loss: expected a 0-dim tensor, got {getattr(loss, 'shape', loss)!r}"
            raise ValueError(msg)
        return _in_float32(loss)


def _read(output: Any) -> tuple[Any, Any]:
    """Return the loss and the predictions in an output, or None for each that is missing."""
    if isinstance(output, Tensor):
        return (None, output) if output.ndim else (output, None)
    if isinstance(output, Mapping):
        return output.get("loss"), output.get("logits")
    if isinstance(output, (tuple, list)) and output:  # a loss comes first
        loss, predictions = _read(output[0])
        return loss, predictions if loss is None else next(iter(output[1:]), None)
    return getattr(output, "loss", None), getattr(output, "logits", None)


def _default_loss(output: Tensor, target: Any) -> Tensor:
    if not isinstance(target, Tensor):
        msg = f"target: expected a tensor, or a loss_fn, got {type(target).__name__}"
        raise TypeError(msg)
    shapes = f"output {tuple(output.shape)}, target {tuple(target.shape)} of {target.dtype}"
    if not _is_integer(target) and output.shape == target.shape:
        return functional.mse_loss(output, _in_float32(target))
    if output.shape[:-1] == target.shape:
        output, target = output.flatten(0, -2), target.flatten()
    fits = output.ndim > 1 and output.shape[:1] + output.shape[2:] == target.shape
    if not (_is_integer(target) and fits and output.shape[1] > 1):
        msg = f"{shapes}: expected integers, and two classes or more in the output's last or "
        msg += "second dimension, or numbers of the output's shape; a model like nanoGPT's takes "
        raise ValueError(msg + "batches by name, {'idx': x, 'targets': y}")
    return functional.cross_entropy(output, target.long(), ignore_index=IGNORED)


def _shifted(ids: Tensor) -> Tensor:
    """Return the token after each token, and IGNORED after the last one."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1).long()


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


@cache
def _takes_labels(forward: Callable[..., object]) -> bool:
    parameters = inspect.signature(forward).parameters
    return "labels" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
