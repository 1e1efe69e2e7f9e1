"""What lean optimizers share: states in 16 or 8 bits, and exact weights in bfloat16 and 16 more."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import formats, is_spread, local_of
from fastamp.step import native
from fastamp.step.arguments import as_bound

MOMENTS = ("float32", "bfloat16", "8bit")
_LEAST_EPS = 1e-12
_FEW = 1 << 16  # elements whose moments are not worth a warning
_OWN = {"betas", "eps", "momentum"}  # options that tell a class
_STAY = ("moments", "exact", "fused")  # of a group when a state is loaded
_NOT_LOADED = ("foreach", "capturable")  # of torch's groups, which have no effect here


class Lean(Optimizer):
    """An optimizer whose step is one call of the core, with its states in fewer bytes."""

    rule = ""
    """The name of its rule in csrc/step/rules.h and in `_ops.formats`."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {**options, "fused": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose options may differ; see `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        self._check_options(self.param_groups[-1])
        _check_parameters(self.param_groups[-1], len(self.param_groups) - 1)

    @_ops.untraced
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient, without a check of the gradients.

        Args:
            closure: computes the loss again, and returns it.

        Raises:
            RuntimeError: a gradient is of another layout or on another device than its parameter;
                tensors share memory; `exact` or a parameter changed after its first step; or a
                state was set that has 8-bit codes. The parameter is named.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step = native.read_own(self)
        if not isinstance(step, _ops.Why):
            step.apply(None, None, zero_grad=False)
        elif step.kind != "no gradient":
            msg = f"fastamp.{type(self).__name__} cannot make this step: {step.text}"
            raise RuntimeError(msg)
        return loss

    @torch.no_grad()
    def master_weights(self) -> list[Tensor]:
        """Return all float32 weights, of DTensors this rank's shards, in the groups' order."""
        return [
            formats.read_weights(local_of(p), _local_state(self.state.get(p, {}))).clone()
            for p in native.parameters_of([self])
        ]

    @torch.no_grad()
    def load_master_weights(self, weights: Sequence[Tensor]) -> None:
        """Set the parameters to float32 weights, as `master_weights` returns them.

        Raises:
            ValueError: their number or a shape differs; nothing is written.
        """
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        shapes = [tuple(local_of(p).shape) for _, p in params]
        given = [tuple(each.shape) for each in weights]
        _require(given == shapes, f"weights: expected tensors of the shapes {shapes}, got {given}")
        for (group, param), new in zip(params, weights, strict=True):
            if formats.has_low(group, param) and "low" not in self.state[param]:
                self.state[param] = self._new_state(group, param)
            state = _local_state(self.state.get(param, {}))
            formats.write_weights(local_of(param), state, new.to(param.device, torch.float32))

    def make_states(self, params: list[tuple[dict[str, Any], Tensor]]) -> None:
        """Make what is missing of the states of parameters, each given with its group."""
        for group, param in params:
            state = self.state[param]
            names = ["step", *formats.names_of(self.rule, group, state)]
            if any(name not in state for name in names):
                self.state[param] = {**self._new_state(group, param), **state}

    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        """Return a parameter's state before its first step."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
        if formats.has_low(group, param) and is_spread(param):
            state["low"] = zeros_beside(param, (*param.shape, 2), torch.uint8)
        elif formats.has_low(group, param):  # two bytes for each element, in its order of memory
            state["low"] = torch.zeros_like(param, dtype=torch.int16)[..., None].view(torch.uint8)
        for each in formats.states_of(self.rule, group):
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

        States are converted to this optimizer's `moments` and `exact`, which stay: bit for bit from
        the same ones. Lower halves that were not saved, as by torch's optimizer, become zeros.

        Raises:
            ValueError: the groups, a shape or a dtype are not those expected, as of another class,
                or an option is not supported; the optimizer is unchanged.
        """
        saved, groups, loaded = state_dict["param_groups"], [], {}
        sizes, expected = (
            [(len(group["params"]), *sorted(_OWN & group.keys())) for group in each]
            for each in (saved, self.param_groups)
        )
        shown = f"state_dict: expected one of fastamp.{type(self).__name__}, with groups of "
        _require(sizes == expected, f"{shown}{expected} parameters, got {sizes}")
        for group, ours in zip(saved, self.param_groups, strict=True):
            new = {name: value for name, value in group.items() if name not in _NOT_LOADED}
            stay = {name: ours[name] for name in _STAY}
            groups.append({**self.defaults, "seed": ours["seed"], **new, **stay})
            self._check_options(groups[-1])
            for place, param in zip(group["params"], ours["params"], strict=True):
                if state := state_dict["state"].get(place):
                    loaded[param] = self._converted(state, groups[-1], param, place)
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        self.state.update(loaded)

    def _converted(
        self, saved: dict[str, Any], group: dict[str, Any], param: Tensor, place: object
    ) -> dict[str, Any]:
        """Return a saved state in the formats of a parameter."""
        state, shape = self._new_state(group, param), local_of(param).shape
        ours, theirs = _local_state(state), _local_state(saved)
        theirs = {name: value for name, value in theirs.items() if value is not None}
        expected: dict[str, Any] = {"low": ((*shape, 2), "uint8")} if "low" in theirs else {}
        states = formats.states_of(self.rule, group)
        for each in states:
            if each.codes in theirs:
                scales = formats.shape_of_scales(local_of(param))
                expected |= {each.codes: (shape, "uint8"), each.scale: (scales, "float32")}
            else:
                expected[each.name] = shape, "float32 or bfloat16"
        for name, (size, dtypes) in expected.items():
            found: Any = theirs.get(name)
            shown = f"state_dict: {name} of parameter {place} is "
            _require(found is not None, f"{shown}missing")
            shown += f"{found.dtype} of shape {tuple(found.shape)}, expected {dtypes} of "
            shown += f"{tuple(size)}: something converted it since it was saved"
            is_valid = f"{found.dtype}".removeprefix("torch.") in dtypes.split(" or ")
            _require(is_valid and found.shape == size, shown)
        is_counted = "step" in theirs or self.rule != "Adam"
        _require(is_counted, f"state_dict: step of parameter {place} is missing")
        state["step"].fill_(float(theirs.pop("step", 0)))
        for each in states:
            if (each.codes in theirs) != (each.codes in ours):
                each.write(ours, each.read(theirs))
        for name in ours.keys() & theirs.keys():  # in the same format: bit for bit
            ours[name].copy_(theirs[name])
        return state

    def _check_options(self, group: dict[str, Any]) -> None:
        """Refuse wrong options of a group; make floats of NumPy's and tensors, for the core."""
        name, lr, moments, seed = type(self).__name__, group["lr"], group["moments"], group["seed"]
        for option in ("amsgrad", "differentiable", "dampening"):
            shown = f"{option}={group.get(option)}: fastamp.{name} does not support it; "
            _require(not group.get(option), f"{shown}torch.optim.{name} does")
        for option in ("lr", "eps", "weight_decay", "momentum", "dampening"):
            if option in group:
                number = as_bound(option, group[option])
                group[option] = lr if option == "lr" and isinstance(lr, Tensor) else number
        if "betas" in group:
            group["betas"] = betas = tuple(as_bound("betas", beta) for beta in group["betas"])
            is_valid = len(betas) == 2 and all(beta < 1 for beta in betas)
            _require(is_valid, f"betas: expected two numbers from 0 to below 1, got {betas}")
        _require(moments in MOMENTS, f"moments: expected one of {MOMENTS}, got {moments!r}")
        is_valid = moments != "8bit" or group.get("eps", 1) >= _LEAST_EPS
        _require(is_valid, f"eps: expected at least {_LEAST_EPS} with moments='8bit'")
        is_valid = isinstance(seed, int) and 0 <= seed < 1 << 32
        _require(is_valid, f"seed: expected an integer from 0 to 2^32 - 1, got {seed!r}")


def to_torch(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Turn the state of `fastamp.AdamW` or `fastamp.SGD` into one that torch's class can load.

    Returns:
        The groups, and of each parameter float32 states and, of AdamW, the count of steps. Lower
        halves of weights have no place there: `master_weights` returns the weights.

    Raises:
        TypeError, ValueError: it is no dict; or is of `fastamp.Lion`, which torch does not have.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> ours = fastamp.AdamW(model.parameters(), moments="8bit")
        >>> torchs = torch.optim.AdamW(model.parameters())
        >>> torchs.load_state_dict(fastamp.to_torch(ours.state_dict()))
    """
    shown = f"state_dict: expected what optimizer.state_dict() returns, got {type(state_dict)}"
    _require(isinstance(state_dict, dict), shown, TypeError)
    groups = state_dict["param_groups"]
    is_adam = "eps" in groups[0]
    shown = "state_dict: torch has no optimizer for it; it has AdamW and SGD"
    _require(is_adam or "momentum" in groups[0], shown)
    states: dict[Any, dict[str, Any]] = {}
    cls: Any = torch.optim.AdamW if is_adam else torch.optim.SGD
    defaults, ours = cls([torch.zeros(())]).defaults, {"moments", "exact", "seed", "fused"}
    kept = [{name: group[name] for name in group if name not in ours} for group in groups]
    for place, state in state_dict["state"].items():
        states[place] = {"step": state["step"].clone()} if is_adam else {"momentum_buffer": None}
        for each in formats.STATES["Adam" if is_adam else "SGD"]:
            if {each.name, each.codes} & state.keys():
                states[place][each.name] = each.read(state).clone()
    return {"state": states, "param_groups": [{**defaults, **group} for group in kept]}


def _require(is_valid: object, message: str, error: type[Exception] = ValueError) -> None:
    if not is_valid:
        raise error(message)


def _check_parameters(group: dict[str, Any], place: int) -> None:
    """Refuse parameters that no step could update, and say where 8 bits save little."""
    for index, param in enumerate(group["params"]):
        name = f"param_groups[{place}]['params'][{index}]"
        is_valid = not param.requires_grad or param.dtype in formats.DTYPES
        shown = f"params: expected float32 or bfloat16, {name} is {param.dtype}"
        _require(is_valid, shown, TypeError)
        placements: Any = getattr(param, "placements", ())
        by_rows = all(each.is_replicate() or each.is_shard(0) for each in placements)
        shown = f"moments='8bit': {name} is a DTensor that is not sharded by its first dimension "
        shown += f"but as {placements}; moments='bfloat16' has no blocks"
        _require(by_rows or group["moments"] != "8bit", shown)
    flat = sum(param.numel() for param in group["params"] if param.dim() < 2)
    half = sum(param.numel() for param in group["params"]) / 2
    if group["moments"] == "8bit" and flat > max(half, _FEW):
        msg = f"moments='8bit' saves nothing for most of param_groups[{place}]: tensors of one "
        msg += "dimension, as FSDP1's flat parameters, keep float32; FSDP2 (fully_shard) keeps rows"
        warnings.warn(msg, stacklevel=5)


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
