"""Updates of drawn lists of parameters: the compiled kernels and the fallback get the same bits.

`FASTAMP_EXAMPLES=3000` draws as many for each test and backend in place of 125.
"""

import itertools
import math
from contextlib import nullcontext

import torch
from support.bits import bits
from support.drawn import EXAMPLES, hypothesis

import fastamp
from fastamp import _ops

st = hypothesis.strategies

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([511, 513, 1003, 65_537, 70_000]))
RATES = st.sampled_from([0.0, 1e-3, 0.5])
PARAMETERS = st.lists(
    st.tuples(DTYPES, DTYPES, SIZES, st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=7
)
ADAM = {
    "betas": st.tuples(st.sampled_from([0.0, 0.4, 0.9]), st.sampled_from([0.0, 0.9, 0.999])),
    "eps": st.sampled_from([1e-8, 0.1]),
    "amsgrad": st.booleans(),
}
OPTIONS = {
    torch.optim.AdamW: ADAM,
    torch.optim.Adam: ADAM,
    torch.optim.SGD: {"momentum": st.sampled_from([0.0, 0.9]), "nesterov": st.booleans()},
    torch.optim.Adagrad: {"lr_decay": RATES, "initial_accumulator_value": RATES},
}
COMMON = {"lr": RATES, "weight_decay": RATES, "maximize": st.booleans()}


def groups_of(cls):
    return st.lists(st.fixed_dictionaries(COMMON | OPTIONS[cls]), min_size=3, max_size=3)


CASES = st.one_of(*(st.tuples(st.just(cls), groups_of(cls)) for cls in OPTIONS))


def memory(size, dtype, offset, generator):
    """Return random values that begin a few elements after a block of memory does."""
    return torch.randn(size + offset, generator=generator).to(dtype)[offset:]


def run(cls, options, drawn, max_norm, overflows):
    """Return the bits of all that three steps leave, and how they were made."""
    generator = torch.Generator().manual_seed(0)
    made, groups = [], [{"params": [], **o} for o in options]
    for dtype, grad_dtype, size, offset, group in drawn:
        parameter = torch.nn.Parameter(memory(size, dtype, offset, generator))
        if hasattr(parameter, "grad_dtype"):  # torch 2.10
            parameter.grad_dtype = None
        else:
            grad_dtype = dtype  # noqa: PLW2901 - torch allows no other
        made.append((parameter, grad_dtype, offset))
        groups[group]["params"].append(parameter)
    for group in groups:
        if group.get("nesterov") and not group["momentum"]:
            group["nesterov"] = False
    optimizer = cls([group for group in groups if group["params"]], fused=True)
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        for parameter, dtype, offset in made:
            parameter.grad = memory(parameter.numel(), dtype, offset, generator)
        if step == overflows and made[0][0].numel():
            made[0][0].grad[0] = math.inf
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
    states = itertools.chain(*(s.values() for s in optimizer.state.values()))
    tensors = [t for p, *_ in made for t in (p.detach(), p.grad)]
    found = [bits(t).tobytes() for t in [*tensors, *states] if t is not None]
    return found, scaler.last_step.way


@EXAMPLES
@hypothesis.given(
    case=CASES, drawn=PARAMETERS, max_norm=st.sampled_from([None, 0.5]), overflows=st.integers(0, 3)
)
def test_an_update_has_the_same_bits_on_all_backends(compiled, case, drawn, max_norm, overflows):
    results = []
    for backend in (nullcontext(), _ops.use_only("fallback")):
        with backend:
            results.append(run(*case, drawn, max_norm, overflows))
    assert results[0][1].startswith("native")
    assert results[0][0] == results[1][0]
