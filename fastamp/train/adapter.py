"""How a model is called and what its loss is: what differs between models, in one small class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

__all__ = ["Adapter", "Outcome"]

IGNORED = -100  # a target, as in torch and Hugging Face


class Outcome(NamedTuple):
    """What a model made of one batch: `output` as it returned it, `target` as `split` did."""

    loss: Tensor
    """0-dim, float32, or float64 where the output is, with its graph."""
    output: Any
    target: Any


class Adapter:
    """How a model is called and what its loss is; subclass it and replace a method.

    `adapter(model, batch)` is split, forward and loss in turn.

    Args:
        loss_fn: `loss_fn(output, target)` returns a 0-dim tensor; `output` is the tensor of
            predictions in float32. None chooses by the target, see `loss`.
    """

    def __init__(self, loss_fn: Callable[[Tensor, Any], Tensor] | None = None) -> None:
        self.loss_fn = loss_fn

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Run the model on a batch, which is where the model is, and compute the loss."""
        inputs, target = self.split(batch)
        output = self.forward(model, inputs)
        return Outcome(self.loss(output, target), output, target)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Tell the model's inputs from what its output is held against.

        | batch | inputs | target |
        |---|---|---|
        | (x, y) | x | y, language models' too: it is shifted already |
        | (a, b, ..., y) | (a, b, ...) | y |
        | integers [batch, time], alone | the batch | the same, one place on: a language model |
        | a mapping | the batch | "labels", else "input_ids" where "attention_mask" is not 0; |
        | | | both one place on if they have the shape of "input_ids" |
        | anything else | the batch | None: the model computes its loss |
        """
        if isinstance(batch, Mapping):
            ids, mask, labels = map(batch.get, ("input_ids", "attention_mask", "labels"))
            if ids is None:
                return batch, labels
            if labels is None:
                labels = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
            is_language = labels.ndim == 2 and labels.shape == ids.shape
            return batch, _one_place_on(labels) if is_language else labels
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
        if isinstance(batch, (tuple, list)):
            (batch,) = batch
        is_language = isinstance(batch, torch.Tensor) and batch.ndim == 2 and _is_integer(batch)
        return batch, _one_place_on(batch) if is_language else None

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Call the model: with keywords for a mapping, with several arguments for a tuple.

        "labels" are left out where the model's `forward` does not take them.
        """
        if isinstance(inputs, Mapping):
            plain = model.module if isinstance(model, DistributedDataParallel) else model
            plain = getattr(plain, "_orig_mod", plain)  # of torch.compile
            taken = _takes_labels(type(plain).forward)
            return model(**{key: v for key, v in inputs.items() if taken or key != "labels"})
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss, computed in float32.

        1. A `loss_fn` is given the predictions: the output, its "logits" (attribute or key), or the
           first element of a tuple.
        2. The loss that the model has computed: "loss", or an output, or first element, with 0
           dimensions.
        3. Integer targets: cross entropy, -100 ignored; the target has the shape of the output
           without its dimension of classes, which is the last one or the second.
        4. Floating targets, of the output's shape: mean squared error.

        Returns:
            A 0-dim tensor, float64 if the predictions are.

        Raises:
            TypeError: there are no predictions in the output, or no target to hold them against.
            ValueError: the shapes do not fit, or the loss is not 0-dim.
        """
        computed, predictions = _read(output)
        loss: Any = computed
        if self.loss_fn is not None or computed is None:
            if not isinstance(predictions, torch.Tensor):
                has = f" with {list(output)}" if isinstance(output, Mapping) else ""
                got = type(output).__name__ + has
                msg = f"output: expected a tensor, logits or a loss, got {got}"
                raise TypeError(msg)
            loss = (self.loss_fn or _default_loss)(_in_float32(predictions), target)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            msg = f"loss: expected a 0-dim tensor, got {getattr(loss, 'shape', loss)!r}"
            raise ValueError(msg)
        return _in_float32(loss)


def _read(output: Any) -> tuple[Any, Any]:
    """Return the loss and the predictions that an output holds; None for what it does not."""
    if isinstance(output, Mapping):
        return output.get("loss"), output.get("logits")
    first, *rest = output if isinstance(output, (tuple, list)) else (output,)
    if not isinstance(first, torch.Tensor):
        return getattr(output, "loss", None), getattr(output, "logits", None)
    return (None, first) if first.ndim else (first, next(iter(rest), None))


def _default_loss(output: Tensor, target: Any) -> Tensor:
    if not isinstance(target, torch.Tensor):
        got = type(target).__name__
        msg = f"target: expected a tensor, got {got}; give a loss_fn or let the model return a loss"
        raise TypeError(msg)
    shapes = f"output {tuple(output.shape)}, target {tuple(target.shape)} of {target.dtype}"
    if not _is_integer(target):
        if output.shape != target.shape:
            msg = f"{shapes}: a mean squared error needs equal shapes"
            raise ValueError(msg)
        return functional.mse_loss(output, _in_float32(target))
    if output.shape[:-1] == target.shape:
        output, target = output.flatten(0, -2), target.flatten()
    fits = output.ndim > 1 and output.shape[:1] + output.shape[2:] == target.shape
    if not fits or output.shape[1] < 2:
        msg = f"{shapes}: cross entropy needs two classes or more, in a dimension of the output's"
        raise ValueError(msg)
    return functional.cross_entropy(output, target.long(), ignore_index=IGNORED)


def _one_place_on(ids: Tensor) -> Tensor:
    """Return what follows each token; nothing follows the last one."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1).long()


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


@cache
def _takes_labels(forward: Callable[..., object]) -> bool:
    parameters = inspect.signature(forward).parameters
    return "labels" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
