"""AdamW in less memory: moments in 16 or 8 bits, exact weights in bfloat16 and 16 bits more."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import formats, kept, local_of
from fastamp.step import native
from fastamp.step.shards import is_spread

MOMENTS = ("float32", "bfloat16", "8bit")
_LEAST_EPS = 1e-12
# Of a group: these stay as they are when a state is loaded, the rest is loaded.
_OWN = ("moments", "exact", "fused", "decoupled_weight_decay")
_NOT_LOADED = ("amsgrad", "foreach", "capturable", "differentiable")  # of torch's groups
_DTYPES = {
    **dict.fromkeys(kept.MOMENTS, (torch.float32, torch.bfloat16)),
    **dict.fromkeys(kept.SCALES, (torch.float32,)),
    **dict.fromkeys((*kept.CODES, "low"), (torch.uint8,)),
}
"""Of the tensors of a saved state."""


class AdamW(Optimizer):
    """torch.optim.AdamW that keeps its moments, and the weights, in fewer bytes.

    A step is one call of fastamp's core for all parameters, as with torch's AdamW: in
    `GradScaler.step`, in `optimizer_step`, and in `step` alone. Without compiled code it is made
    in torch's operators, with the same bits, but many times slower.

    Bytes of a parameter and its state, beside the gradient: float32 has 12, as torch's; bfloat16
    with `exact` has 4, and moments 8, 4 or 2 more.

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
        amsgrad: False; True is not supported.
        maximize: maximize the objective.
        foreach: None or False: the update is always fused.
        capturable: has no effect: on CUDA every step but the first can be captured in a graph.
        differentiable: False; True is not supported.
        fused: None or True.
        moments: how both moments are kept: "float32"; "bfloat16"; or "8bit", with a scale for each
            block of 256 elements. There tensors of one dimension, of rows shorter than 64 elements,
            or that are not contiguous, as channels_last, keep float32. The second moment
            is rounded randomly, or it would not change.
        exact: keep the lower 16 bits of bfloat16 parameters: all updates are bit-identical to those
            of float32 weights. With False nothing is kept, and updates are rounded randomly.
        seed: of random rounding; the same on all ranks. Bits depend on it, the count of steps and
            the element's first moment.

    Raises:
        ValueError: an argument is out of its range or not supported.
        TypeError: a parameter that is not frozen is neither float32 nor bfloat16. float16 has too
            few exponents for weights: updates below 6e-8 vanish.

    Example:
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = fastamp.AdamW(model.parameters(), moments="8bit")
        >>> model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        >>> report = fastamp.optimizer_step(optimizer, max_norm=1.0, zero_grad=True)
        >>> optimizer.state[model.weight]["exp_avg_codes"].dtype
        torch.uint8
    """

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
        foreach: bool | None = None,
        capturable: bool = False,  # noqa: ARG002
        differentiable: bool = False,
        fused: bool | None = None,
        moments: str = "float32",
        exact: bool = True,
        seed: int = 0,
    ) -> None:
        given = {"amsgrad": amsgrad, "foreach": foreach, "differentiable": differentiable}
        refused = [f"{name}=True" for name, value in given.items() if value]
        refused += ["fused=False"] * (fused is False)
        if refused:
            msg = f"{refused[0]}: fastamp.AdamW does not support it"
            raise ValueError(msg)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "moments": moments,
            "exact": exact,
            "seed": seed,
            "fused": True,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose options may differ; see `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1], len(self.param_groups) - 1)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @_ops.untraced
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient, without a check of the gradients.

        Args:
            closure: computes the loss again, and returns it.

        Raises:
            RuntimeError: a gradient is sparse, complex or on another device; `exact`, or a
                parameter's dtype, shape or order of memory, changed after its first step; or
                "exp_avg" was set in a state that has 8-bit codes for it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(param.grad is None for param in native.parameters_of([self])):
            return loss
        found = native.read_own(self)
        if isinstance(found, _ops.Why):
            msg = f"fastamp.AdamW cannot make this step: {found.text}"
            raise RuntimeError(msg)  # noqa: TRY004 - a reason, not a type
        found.apply(None, None, zero_grad=False)
        return loss

    @torch.no_grad()
    def master_weights(self) -> list[Tensor]:
        """Return the float32 weights of all parameters, in the order of the groups.

        Of a DTensor it is this rank's shard.
        """
        return [
            kept.read_weights(local_of(param), _local_state(self.state.get(param, {}))).clone()
            for param in native.parameters_of([self])
        ]

    def make_states(self) -> str | None:
        """Make the states of parameters with a gradient that have none; or say why it cannot be."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None or "step" in self.state[param]:
                    continue
                if param.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    return "a graph captures the first step"
                self.state[param] = _new_state(group, param)
        return None

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch's AdamW returned.

        Each state is kept in this optimizer's formats: what was saved in the same ones is loaded
        bit for bit. `moments` and `exact` of the groups stay as they are. Without saved lower
        halves, as from torch's AdamW, they become zeros.

        Raises:
            ValueError: the groups or shapes differ from this optimizer's, an option is not
                supported, or a state has another dtype than it was saved in; the optimizer is
                unchanged.
        """
        loaded: dict[Tensor, dict[str, Any]] = {}

        def convert(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            groups, found = self._loadable(given)
            loaded.update(found)
            return {**given, "state": {}, "param_groups": groups}

        def fill(_: Optimizer) -> None:
            self.state.update(loaded)

        # Between the hooks of others, which see all of the state.
        with (
            self.register_load_state_dict_pre_hook(convert),
            self.register_load_state_dict_post_hook(fill, prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _loadable(self, state_dict: dict[str, Any]) -> tuple[list[Any], dict[Tensor, Any]]:
        """Return the groups of a saved state, and its states in this optimizer's formats."""
        saved_groups, saved = state_dict["param_groups"], state_dict["state"]
        if any(group.get("amsgrad") for group in saved_groups):
            msg = "state_dict: amsgrad=True, which fastamp.AdamW does not support"
            raise ValueError(msg)
        sizes = [[len(group["params"]) for group in g] for g in (saved_groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            msg = f"state_dict: groups of {sizes[0]} parameters; this optimizer has {sizes[1]}"
            raise ValueError(msg)
        groups, loaded = [], {}
        for group, own in zip(saved_groups, self.param_groups, strict=True):
            new = {name: value for name, value in group.items() if name not in _NOT_LOADED}
            kept_ = {name: own[name] for name in _OWN}
            groups.append({**self.defaults, "seed": own["seed"], **new, **kept_})
            _check_group({**groups[-1], "params": ()}, len(groups) - 1)
            for place, param in zip(group["params"], own["params"], strict=True):
                if saved.get(place):
                    loaded[param] = _converted(saved[place], own, param, place)
        return groups, loaded


def to_torch(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Turn the state of `fastamp.AdamW` into one that `torch.optim.AdamW` can load.

    Args:
        state_dict: of a `fastamp.AdamW`; it is not changed.

    Returns:
        The groups, and of each parameter the count of steps and float32 moments. Lower halves of
        weights have no place there: `master_weights` returns the weights.

    Raises:
        TypeError: it holds DTensors; `torch.distributed.checkpoint.state_dict` gathers them.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> ours = fastamp.AdamW(model.parameters(), moments="8bit")
        >>> torchs = torch.optim.AdamW(model.parameters())
        >>> torchs.load_state_dict(fastamp.to_torch(ours.state_dict()))
    """
    defaults = torch.optim.AdamW([torch.zeros(())]).defaults
    ours = {"moments", "exact", "seed", "fused"}
    groups = [
        {**defaults, **{name: value for name, value in group.items() if name not in ours}}
        for group in state_dict["param_groups"]
    ]
    states = {}
    for place, state in state_dict["state"].items():
        if any(map(is_spread, state.values())):
            msg = f"state_dict: the state of parameter {place} is a DTensor; gather it first"
            raise TypeError(msg)
        moments = zip(kept.MOMENTS, kept.read_moments(state), strict=True)
        states[place] = {"step": state["step"].clone(), **{k: v.clone() for k, v in moments}}
    return {"state": states, "param_groups": groups}


def _make_floats(group: dict[str, Any]) -> None:
    """Make numbers of NumPy and tensors floats, which the core reads; the rate may be a tensor."""
    for name in ("lr", "eps", "weight_decay"):
        if name != "lr" or not isinstance(group[name], Tensor):
            group[name] = _as_float(name, group[name])
    group["betas"] = tuple(_as_float("betas", beta) for beta in group["betas"])


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"{name}: expected a number, got {value!r}"
        raise TypeError(msg) from error


def _check_group(group: dict[str, Any], place: int) -> None:
    """Refuse the options and parameters of a group; its numbers become floats."""
    _make_floats(group)
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        msg = f"lr: expected a number or a tensor of one, got {lr.numel()} elements"
        raise ValueError(msg)
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            msg = f"{name}: expected at least 0, got {float(group[name])}"
            raise ValueError(msg)
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        msg = f"betas: expected two numbers from 0 to below 1, got {group['betas']}"
        raise ValueError(msg)
    if group["moments"] not in MOMENTS:
        msg = f"moments: expected one of {', '.join(MOMENTS)}, got {group['moments']!r}"
        raise ValueError(msg)
    if group["moments"] == "8bit" and group["eps"] < _LEAST_EPS:
        msg = f"eps: expected at least {_LEAST_EPS} with moments='8bit', got {group['eps']}"
        raise ValueError(msg)
    if not isinstance(group["seed"], int) or not 0 <= group["seed"] < 1 << 32:
        msg = f"seed: expected an integer from 0 to 2^32 - 1, got {group['seed']!r}"
        raise ValueError(msg)
    for index, param in enumerate(group["params"]):
        if param.requires_grad and param.dtype not in kept.DTYPES:
            msg = f"params: expected float32 or bfloat16, param_groups[{place}]['params'][{index}]"
            msg += f" is {param.dtype}"
            raise TypeError(msg)


def _new_state(group: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Return a parameter's state before its first step."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
    if kept.has_low(param, group):
        state["low"] = _low_like(param)
    if group["moments"] != "8bit" or not formats.has_rows(param):
        dtype = torch.bfloat16 if group["moments"] == "bfloat16" else torch.float32
        return state | {name: torch.zeros_like(param, dtype=dtype) for name in kept.MOMENTS}
    placements: Any = getattr(param, "placements", ())
    if not all(each.is_replicate() or each.is_shard(0) for each in placements):
        msg = "moments='8bit': a DTensor has to be sharded by its first dimension, got "
        msg += f"{placements}; moments='bfloat16' has no blocks"
        raise ValueError(msg)
    for codes, scale in zip(kept.CODES, kept.SCALES, strict=True):
        state[codes] = torch.zeros_like(param, dtype=torch.uint8)
        state[scale] = zeros_beside(param, formats.shape_of_scales(param), torch.float32)
    return state


def _low_like(param: Tensor) -> Tensor:
    """Return a zero lower half: two bytes for each element, in the parameter's order of memory."""
    if is_spread(param):
        return zeros_beside(param, (*param.shape, 2), torch.uint8)
    return torch.zeros_like(param, dtype=torch.int16)[..., None].view(torch.uint8)


def zeros_beside(param: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros on a parameter's device; a DTensor's are sharded as it is."""
    if not is_spread(param):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    from torch.distributed.tensor import zeros  # noqa: PLC0415 - it takes half a second

    mesh, placements = param.device_mesh, param.placements
    spread: Tensor = zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return spread


def _local_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: local_of(value) for name, value in state.items()}


def _converted(
    saved: dict[str, Any], group: dict[str, Any], param: Tensor, place: object
) -> dict[str, Any]:
    """Return a saved state in the formats of a parameter."""
    state = _new_state(group, param)
    if missing := {"step", *kept.names_of(saved)} - saved.keys():
        msg = f"state_dict: parameter {place} has no {', '.join(sorted(missing))}"
        raise ValueError(msg)
    own, theirs = _local_state(state), _local_state(saved)
    for name, dtypes in _DTYPES.items():
        if name in theirs and theirs[name].dtype not in dtypes:
            found, expected = theirs[name].dtype, " or ".join(map(str, dtypes))
            msg = f"state_dict: {name} of parameter {place} is {found}, expected {expected}: "
            raise ValueError(msg + "something has converted it since it was saved")
    pairs = {name: name for name in own.keys() - {"step"}}
    pairs |= zip(kept.names_of(own), kept.names_of(theirs), strict=True)
    for name, its in pairs.items():
        if its in theirs and own[name].shape != theirs[its].shape:
            shapes = f"{tuple(theirs[its].shape)}, expected {tuple(own[name].shape)}"
            msg = f"state_dict: {name} of parameter {place} has the shape {shapes}"
            raise ValueError(msg)
    state["step"].fill_(float(saved["step"]))
    for name in pairs.keys() & theirs.keys():
        own[name].copy_(theirs[name])
    if kept.names_of(own) != kept.names_of(theirs):
        kept.write_moments(own, *kept.read_moments(theirs))
    return state
