"""What lean optimizers share: states in 16 or 8 bits, and exact weights in bfloat16 and 16 more."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import formats, local_of, torch_update
from fastamp.step import native
from fastamp.step.shards import is_spread

MOMENTS = ("float32", "bfloat16", "8bit")
_LEAST_EPS = 1e-12
_FEW = 1 << 16  # elements whose moments are not worth a warning
# Of a group: these stay as they are when a state is loaded, the rest is loaded.
_OWN = ("moments", "exact", "fused")
_NOT_LOADED = ("amsgrad", "foreach", "capturable", "differentiable")  # of torch's groups
_OF_TORCH = {"eps": torch.optim.AdamW, "momentum": torch.optim.SGD}
"""torch's optimizers, by an option that no other lean one has."""


class Lean(Optimizer):
    """An optimizer whose step is one call of the core, with its states in fewer bytes."""

    rule = ""
    """The name of its rule in csrc/step/rules.h and in `_ops.torch_update`."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {**options, "fused": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose options may differ; see `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        group, place = self.param_groups[-1], len(self.param_groups) - 1
        try:
            _check_options(group)
            _check_parameters(group, place)
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
                parameter's dtype, shape or order of memory, changed after its first step; or a
                state was set that has 8-bit codes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(param.grad is None for param in native.parameters_of([self])):
            return loss
        found = native.read_own(self)
        if isinstance(found, _ops.Why):
            msg = f"fastamp.{type(self).__name__} cannot make this step: {found.text}"
            raise RuntimeError(msg)  # noqa: TRY004 - a reason, not a type
        found.apply(None, None, zero_grad=False)
        return loss

    @torch.no_grad()
    def master_weights(self) -> list[Tensor]:
        """Return the float32 weights of all parameters, in the order of the groups.

        Of a DTensor it is this rank's shard.
        """
        return [
            torch_update.read_weights(local_of(p), _local_state(self.state.get(p, {}))).clone()
            for p in native.parameters_of([self])
        ]

    @torch.no_grad()
    def load_master_weights(self, weights: Sequence[Tensor]) -> None:
        """Set the parameters to float32 weights, as `master_weights` returns them.

        Args:
            weights: one tensor of each parameter's shape, in the order of the groups; of a DTensor
                this rank's shard.

        Raises:
            ValueError: their number or a shape differs; nothing is written.
        """
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        shapes = [tuple(local_of(p).shape) for _, p in params]
        if (given := [tuple(each.shape) for each in weights]) != shapes:
            msg = f"weights: expected tensors of the shapes {shapes}, got {given}"
            raise ValueError(msg)
        for (group, param), new in zip(params, weights, strict=True):
            if torch_update.has_low(param, group) and "low" not in self.state[param]:
                self.state[param] = self._new_state(group, param)
            state = _local_state(self.state.get(param, {}))
            torch_update.write_weights(local_of(param), state, new.to(param.device, torch.float32))

    def make_states(self) -> str | None:
        """Make missing states of parameters with a gradient; or say why it cannot be."""
        for group in self.param_groups:
            states = torch_update.states_of(self.rule, group)
            for param in group["params"]:
                state = self.state[param] if param.grad is not None else {}
                names = ["step", *torch_update.names_of(states, state)]
                if param.grad is None or all(name in state for name in names):
                    continue
                if param.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    return "a graph captures the first step"
                self.state[param] = {**self._new_state(group, param), **state}
        return None

    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        """Return a parameter's state before its first step."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
        if torch_update.has_low(param, group):
            state["low"] = _low_like(param)
        for each in torch_update.states_of(self.rule, group):
            if group["moments"] == "8bit" and formats.has_rows(param):
                state[each.codes] = torch.zeros_like(param, dtype=torch.uint8)
                shape = formats.shape_of_scales(param)
                state[each.scale] = zeros_beside(param, shape, torch.float32)
            else:
                dtype = torch.bfloat16 if group["moments"] == "bfloat16" else torch.float32
                state[each.name] = torch.zeros_like(param, dtype=dtype)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch's optimizer of its name returned.

        Each state is kept in this optimizer's formats: what was saved in the same ones is loaded
        bit for bit. `moments` and `exact` of the groups stay as they are. Without saved lower
        halves, as from torch's optimizer, they become zeros.

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
            stay = {name: own[name] for name in _OWN}
            groups.append({**self.defaults, "seed": own["seed"], **new, **stay})
            _check_options(groups[-1])
            for place, param in zip(group["params"], own["params"], strict=True):
                if saved.get(place):
                    loaded[param] = self._converted(saved[place], groups[-1], param, place)
        return groups, loaded

    def _converted(
        self, saved: dict[str, Any], group: dict[str, Any], param: Tensor, place: object
    ) -> dict[str, Any]:
        """Return a saved state in the formats of a parameter."""
        state = self._new_state(group, param)
        states = torch_update.states_of(self.rule, group)
        own, theirs = _local_state(state), _local_state(saved)
        names = torch_update.names_of(states, theirs)
        if missing := {*names, *(["step"] if self.rule == "Adam" else [])} - saved.keys():
            msg = f"state_dict: parameter {place} has no {', '.join(sorted(missing))}"
            raise ValueError(msg)
        _check_saved(states, theirs, place)
        state["step"].fill_(float(saved.get("step", 0)))
        pairs = list(zip(torch_update.names_of(states, own), names, strict=True))
        for name, its in [*pairs, *((s.scale, s.scale) for s in states), ("low", "low")]:
            if name not in own or theirs.get(its) is None:
                continue
            _check_shape(own[name], theirs[its], its, place)
            if name == its:
                own[name].copy_(theirs[its])
        for each, (name, its) in zip(states, pairs, strict=True):
            if name != its and theirs[its] is not None:
                each.write(own, each.read(theirs))
        return state


def to_torch(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Turn the state of `fastamp.AdamW` or `fastamp.SGD` into one that torch's class can load.

    Args:
        state_dict: of a lean optimizer; it is not changed.

    Returns:
        The groups, and of each parameter float32 states and, of AdamW, the count of steps. Lower
        halves of weights have no place there: `master_weights` returns the weights.

    Raises:
        ValueError: it is of `fastamp.Lion`, which torch does not have.
        TypeError: it holds DTensors; `torch.distributed.checkpoint.state_dict` gathers them.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> ours = fastamp.AdamW(model.parameters(), moments="8bit")
        >>> torchs = torch.optim.AdamW(model.parameters())
        >>> torchs.load_state_dict(fastamp.to_torch(ours.state_dict()))
    """
    first = state_dict["param_groups"][0]
    cls = next((cls for option, cls in _OF_TORCH.items() if option in first), None)
    if cls is None:
        msg = "state_dict: torch has no optimizer for it; it has AdamW and SGD"
        raise ValueError(msg)
    states: dict[Any, dict[str, Any]] = {}
    is_adam, defaults = cls is torch.optim.AdamW, cls([torch.zeros(())]).defaults
    ours = {"moments", "exact", "seed", "fused"}
    groups = [
        {**defaults, **{name: value for name, value in group.items() if name not in ours}}
        for group in state_dict["param_groups"]
    ]
    for place, state in state_dict["state"].items():
        if any(map(is_spread, state.values())):
            msg = f"state_dict: the state of parameter {place} is a DTensor; gather it first"
            raise TypeError(msg)
        states[place] = {"step": state["step"].clone()} if is_adam else {"momentum_buffer": None}
        for each in torch_update.RULES["Adam" if is_adam else "SGD"][0]:
            if {each.name, each.codes} & state.keys():
                states[place][each.name] = each.read(state).clone()
    return {"state": states, "param_groups": groups}


def refuse(optimizer: type, *, dampening: float = 0.0, **options: Any) -> None:
    """Refuse options that only torch's optimizer of the same name has."""
    names = [f"{name}=True" for name, value in options.items() if value]
    names += [f"dampening={dampening}"] * (dampening != 0)
    if names:
        name = optimizer.__name__
        msg = f"{names[0]}: fastamp.{name} does not support it; torch.optim.{name} does"
        raise ValueError(msg)


def _check_options(group: dict[str, Any]) -> None:
    """Refuse the options of a group; numbers of NumPy and tensors become floats, for the core."""
    lr, betas, moments, seed = (group.get(name) for name in ("lr", "betas", "moments", "seed"))
    numbers = {"lr", "eps", "weight_decay", "momentum", "dampening"} & group.keys()
    if isinstance(lr, Tensor):
        numbers -= {"lr"}
        _require(lr.numel() == 1, f"lr: expected a number or a tensor of one, got {lr.numel()}")
        _require(lr >= 0, f"lr: expected at least 0, got {float(lr)}")
    for name in numbers:
        group[name] = _as_float(name, group[name])
        _require(group[name] >= 0, f"{name}: expected at least 0, got {group[name]}")
    if betas is not None:
        group["betas"] = betas = tuple(_as_float("betas", beta) for beta in betas)
        is_valid = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        _require(is_valid, f"betas: expected two numbers from 0 to below 1, got {betas}")
    refuse(torch.optim.SGD, dampening=group.get("dampening", 0.0))
    is_valid = not group.get("nesterov") or group["momentum"] > 0
    _require(is_valid, "nesterov=True: expected a momentum above 0")
    _require(moments in MOMENTS, f"moments: expected one of {MOMENTS}, got {moments!r}")
    is_valid = moments != "8bit" or group.get("eps", 1) >= _LEAST_EPS
    _require(is_valid, f"eps: expected at least {_LEAST_EPS} with moments='8bit'")
    is_valid = isinstance(seed, int) and 0 <= seed < 1 << 32
    _require(is_valid, f"seed: expected an integer from 0 to 2^32 - 1, got {seed!r}")


def _require(is_valid: object, message: str) -> None:
    if not is_valid:
        raise ValueError(message)


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"{name}: expected a number, got {value!r}"
        raise TypeError(msg) from error


def _check_parameters(group: dict[str, Any], place: int) -> None:
    """Refuse parameters that no step could update, and say where 8 bits save little."""
    flat, whole = {}, 0
    for index, param in enumerate(group["params"]):
        name = f"param_groups[{place}]['params'][{index}]"
        if param.requires_grad and param.dtype not in torch_update.DTYPES:
            msg = f"params: expected float32 or bfloat16, {name} is {param.dtype}"
            raise TypeError(msg)
        if group["moments"] != "8bit":
            continue
        placements: Any = getattr(param, "placements", ())
        if not all(each.is_replicate() or each.is_shard(0) for each in placements):
            msg = f"moments='8bit': {name} is a DTensor that is not sharded by its first dimension "
            msg += f"but as {placements}; moments='bfloat16' has no blocks"
            raise ValueError(msg)
        whole += param.numel()
        if param.dim() < 2:
            flat[name] = param.numel()
    if sum(flat.values()) > max(whole / 2, _FEW):
        largest = max(flat, key=lambda name: flat[name])
        msg = f"moments='8bit' saves nothing for {largest} and others of one dimension, as FSDP1's "
        msg += "flat parameters: they keep float32; FSDP2 (fully_shard) keeps rows"
        warnings.warn(msg, stacklevel=5)


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
    return {name: value if value is None else local_of(value) for name, value in state.items()}


def _check_saved(states: list[torch_update.State], saved: dict[str, Any], place: object) -> None:
    """Refuse tensors of a saved state that have another dtype than they were saved in."""
    floats, bytes_ = (torch.float32, torch.bfloat16), (torch.uint8,)
    dtypes: dict[str, tuple[torch.dtype, ...]] = {"low": bytes_}
    for each in states:
        dtypes |= {each.name: floats, each.codes: bytes_, each.scale: (torch.float32,)}
    for name, expected in dtypes.items():
        if saved.get(name) is not None and saved[name].dtype not in expected:
            msg = f"state_dict: {name} of parameter {place} is {saved[name].dtype}, expected "
            msg += f"{' or '.join(map(str, expected))}: something converted it since it was saved"
            raise ValueError(msg)


def _check_shape(own: Tensor, saved: Tensor, name: str, place: object) -> None:
    if own.shape != saved.shape:
        shapes = f"{tuple(saved.shape)}, expected {tuple(own.shape)}"
        msg = f"state_dict: {name} of parameter {place} has the shape {shapes}"
        raise ValueError(msg)
