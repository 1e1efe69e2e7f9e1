"""Updates of drawn lists of parameters: the compiled kernels get the oracle's bits.

150 for each backend, or as many as `FASTAMP_EXAMPLES` says: by hand 3,000.
"""

import math
import os
from typing import Any, NamedTuple

import torch
from support.drawn import EXAMPLES, hypothesis
from support.python_update import PythonScaler
from support.updates import everything

import fastamp

st = hypothesis.strategies

SETTINGS = hypothesis.settings(
    EXAMPLES, max_examples=EXAMPLES.max_examples if "FASTAMP_EXAMPLES" in os.environ else 150
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SIZES = st.one_of(
    st.integers(0, 40), st.integers(0, 2000), st.sampled_from([511, 513]), st.integers(0, 70_000)
)
RATES = st.sampled_from([0.0, 1e-3, 0.5])


class Drawn(NamedTuple):
    """One parameter: its size, its group, and where its tensors begin in memory."""

    size: int
    group: int
    dtype: torch.dtype
    grad_dtype: torch.dtype
    state_dtype: torch.dtype | None
    """None leaves it to the first step to make the states."""
    offsets: tuple[int, int, int]


PARAMETERS = st.lists(
    st.builds(
        Drawn,
        size=SIZES,
        group=st.integers(0, 2),
        dtype=DTYPES,
        grad_dtype=DTYPES,
        state_dtype=st.one_of(st.none(), DTYPES),
        offsets=st.tuples(*[st.integers(0, 3)] * 3),
    ),
    min_size=1,
    max_size=7,
)
ADAM = {
    "betas": st.tuples(st.sampled_from([0.0, 0.4, 0.9]), st.sampled_from([0.0, 0.9, 0.999])),
    "eps": st.sampled_from([1e-8, 0.1]),
}
OPTIONS = {
    torch.optim.AdamW: ADAM,
    torch.optim.Adam: ADAM,
    torch.optim.SGD: {"momentum": st.sampled_from([0.0, 0.9]), "nesterov": st.booleans()},
}
COMMON = {
    "lr": st.one_of(RATES, RATES.map(torch.tensor)),
    "weight_decay": RATES,
    "maximize": st.booleans(),
}


class Run(NamedTuple):
    """How the steps are made."""

    max_norm: float | None
    overflows: int
    zero_grad: bool
    fused: bool


RUNS = st.builds(
    Run,
    max_norm=st.sampled_from([None, 0.5]),
    overflows=st.integers(0, 3),
    zero_grad=st.booleans(),
    fused=st.booleans(),
)


def groups_of(cls):
    return st.lists(st.fixed_dictionaries(COMMON | OPTIONS[cls]), min_size=3, max_size=3)


CASES = st.one_of(*(st.tuples(st.just(cls), groups_of(cls)) for cls in OPTIONS))


def memory(size, dtype, offset, generator, device):
    """Return random values that begin a few elements after a block of memory does."""
    return torch.randn(size + offset, generator=generator).to(device, dtype)[offset:]


def states_of(optimizer, group, drawn, random):
    """Return states in a dtype of their own, in the middle of a run."""
    names = ["exp_avg", "exp_avg_sq"]
    if isinstance(optimizer, torch.optim.SGD):
        names = ["momentum_buffer"] if group["momentum"] else []
    values = [memory(drawn.size, drawn.state_dtype, drawn.offsets[2], *random) for _ in names]
    states: dict[str, Any] = {
        name: value.abs_() if name.endswith("sq") else value
        for name, value in zip(names, values, strict=True)
    }
    if isinstance(optimizer, torch.optim.SGD):
        return states
    return states | {"step": torch.tensor(3.0, device=random[1])}


def make(cls, options, drawn, run, random):
    """Return parameters with what was drawn for them, and their optimizer."""
    made, groups = [], [{"params": [], **o} for o in options]
    for each in drawn:
        parameter = torch.nn.Parameter(memory(each.size, each.dtype, each.offsets[0], *random))
        if hasattr(parameter, "grad_dtype"):  # torch 2.10
            parameter.grad_dtype = None
        else:
            each = each._replace(grad_dtype=each.dtype)  # noqa: PLW2901 - torch allows no other
        if not run.fused and each.grad_dtype == torch.float16:  # stock refuses to unscale them
            each = each._replace(grad_dtype=torch.float32, dtype=torch.float32)  # noqa: PLW2901
            parameter.data = parameter.data.float()
        made.append((parameter, each))
        groups[each.group]["params"].append(parameter)
    for group in groups if cls is torch.optim.SGD else ():
        group["nesterov"] = bool(group["nesterov"] and group["momentum"])
    optimizer = cls([group for group in groups if group["params"]], fused=run.fused or None)
    for group in optimizer.param_groups:
        for parameter, each in made:
            if each.state_dtype is not None and any(parameter is p for p in group["params"]):
                optimizer.state[parameter] = states_of(optimizer, group, each, random)
    return made, optimizer


def train(cls, options, drawn, run, scaler_class, device="cpu"):
    """Return the bits of all that three steps leave, and how they were made."""
    random = torch.Generator().manual_seed(0), device
    made, optimizer = make(cls, options, drawn, run, random)
    scaler = scaler_class(device, init_scale=8.0)
    scaler.scale(torch.ones((), device=device))
    ways = []
    for step in range(3):
        for parameter, each in made:
            parameter.grad = memory(each.size, each.grad_dtype, each.offsets[1], *random)
        if step == run.overflows and made[0][0].numel():
            made[0][0].grad[0] = math.inf
        scaler.step(optimizer, max_norm=run.max_norm, zero_grad=run.zero_grad)
        ways.append(scaler.last_step.way)
        scaler.update()
    return everything([parameter for parameter, _ in made], optimizer), ways


@SETTINGS
@hypothesis.given(case=CASES, drawn=PARAMETERS, run=RUNS)
def test_an_update_has_the_oracles_bits(compiled, device, case, drawn, run):
    found, ways = train(*case, drawn, run, fastamp.GradScaler, device)
    assert {*ways} == {"native"}
    assert found == train(*case, drawn, run, PythonScaler)[0]
