"""The lean optimizers: torch's AdamW and SGD, and Lion, in fewer bytes."""

from typing import Any

from torch import Tensor

from fastamp.step.lean import Lean


class AdamW(Lean):
    """torch.optim.AdamW that keeps its moments, and the weights, in fewer bytes.

    A step, also a bare `step`, is one call of fastamp's core. Without compiled code it is made in
    torch's operators, with the same bits, but many times slower. A bfloat16 parameter takes 4 bytes
    with `exact`, and moments 8, 4 or 2 more; float32 ones take 12, as torch's.

    **A bare `step` does not check gradients, as in torch. With `moments="8bit"` one that is not
    finite spoils the moments of its whole block of 256 elements.** `optimizer_step` with a
    `max_norm`, and an enabled `GradScaler`, skip such a step.

    Args:
        params: float32 or bfloat16 parameters, or groups of them.
        lr: learning rate, a number or a 0-dim tensor.
        betas: of the moments.
        eps: added to the root of the second moment; at least 1e-12 with `moments="8bit"`, which
            keeps moments below 2^-100 as zeros.
        weight_decay: decoupled weight decay.
        amsgrad, differentiable: False; True is not supported.
        maximize: maximize the objective.
        foreach, capturable, fused: have no effect; on CUDA every step but the first can be captured
            in a graph.
        moments: "float32", "bfloat16", or "8bit", with a scale for each block of 256 elements.
            There tensors of one dimension, of rows shorter than 64 elements, or that are not
            contiguous keep float32. The second moment is rounded randomly.
        exact: keep the lower 16 bits of bfloat16 parameters: updates are bit-identical to those of
            float32 weights. With False nothing is kept, and updates are rounded randomly.
        seed: of random rounding, the same on all ranks; see csrc/step/formats.h.

    Raises:
        ValueError: an argument is out of its range or not supported.
        TypeError: a parameter that is not frozen is neither float32 nor bfloat16. In float16
            updates below 6e-8 would vanish.

    Example:
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = fastamp.AdamW(model.parameters(), moments="8bit")
        >>> model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        >>> report = fastamp.optimizer_step(optimizer, max_norm=1.0, zero_grad=True)
        >>> optimizer.state[model.weight]["exp_avg_codes"].dtype
        torch.uint8
    """

    rule = "Adam"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        *,
        maximize: bool = False,
        foreach: bool | None = None,  # noqa: ARG002
        capturable: bool = False,  # noqa: ARG002
        differentiable: bool = False,
        fused: bool | None = None,  # noqa: ARG002
        moments: str = "float32",
        exact: bool = True,
        seed: int = 0,
    ) -> None:
        given: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        given |= {"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable}
        given |= {"moments": moments, "exact": exact, "seed": seed, "decoupled_weight_decay": True}
        super().__init__(params, **given)


class SGD(Lean):
    """torch.optim.SGD that keeps its momentum, and the weights, in fewer bytes; see `AdamW`.

    Args:
        params, lr, maximize, exact, seed: as in `AdamW`.
        momentum: of the gradients; 0 keeps no state but the lower halves of exact weights.
        dampening: 0; others are not supported.
        weight_decay: coupled weight decay.
        nesterov: Nesterov's momentum.
        moments: how the momentum is kept, as in `AdamW`; in 16 and 8 bits it is rounded randomly.

    Raises:
        ValueError, TypeError: as in `AdamW`.

    Example:
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = fastamp.SGD(model.parameters(), lr=0.1, momentum=0.9, moments="8bit")
    """

    rule = "SGD"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,  # noqa: FBT001, FBT002
        *,
        maximize: bool = False,
        moments: str = "float32",
        exact: bool = True,
        seed: int = 0,
    ) -> None:
        given: dict[str, Any] = {"lr": lr, "momentum": momentum, "dampening": dampening}
        given |= {"nesterov": nesterov, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, **given, moments=moments, exact=exact, seed=seed)


class Lion(Lean):
    """Lion, with its momentum and the weights in fewer bytes; see `AdamW`.

    A parameter moves by `lr` times the sign of an average of gradients (Chen et al. 2023, "Symbolic
    discovery of optimization algorithms"). Use 3 to 10 times AdamW's decay, and as small a rate.

    Args:
        params, lr, weight_decay, maximize, exact, seed: as in `AdamW`.
        betas: of the average whose sign is taken, and of the momentum.
        moments: how the momentum is kept, as in `AdamW`; in 16 and 8 bits it is rounded randomly.

    Raises:
        ValueError, TypeError: as in `AdamW`.

    Example:
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = fastamp.Lion(model.parameters(), lr=1e-4, weight_decay=0.1, moments="8bit")
    """

    rule = "Lion"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        moments: str = "float32",
        exact: bool = True,
        seed: int = 0,
    ) -> None:
        given = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, **given, moments=moments, exact=exact, seed=seed)
