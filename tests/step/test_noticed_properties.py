"""Changes between steps, in any order and number: each backend sees all of them."""

from contextlib import nullcontext

import torch
from support.changes import CHANGED, NOTICED, SIZES
from support.drawn import EXAMPLES, hypothesis
from support.updates import everything, give, make

import fastamp
from fastamp import _ops

st = hypothesis.strategies

CHANGES = st.lists(st.tuples(st.sampled_from(NOTICED), st.sampled_from(CHANGED)), max_size=2)
MISSING = st.sets(st.integers(0, len(SIZES)), max_size=2)
STEPS = st.lists(st.tuples(CHANGES, MISSING, st.integers(0, 5)), min_size=3, max_size=8)


def tried(change, parameters, optimizer, step):
    """Make a change, unless it needs what another one has taken."""
    try:
        change(parameters, optimizer, step)
    except (LookupError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        return type(error).__name__
    return None


def run(steps):
    """Return the bits of all that is left after each step, and how it was made."""
    parameters, optimizer = make("adamw", sizes=SIZES)
    found = []
    for seed, (changes, missing, kind) in enumerate(steps):
        found += [tried(change, parameters, optimizer, step) for change, step in changes]
        give(parameters, seed=seed)
        for place in missing:
            parameters[min(place, len(parameters) - 1)].grad = None
        try:
            if kind == 0:
                optimizer.step()
                way = "torch's"
            else:
                report = fastamp.optimizer_step(optimizer, 1.0, zero_grad=kind == 1)
                way = report.way.partition(";")[0]
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            way = type(error).__name__  # torch's own
        states = [(list(s), [v.dtype for v in s.values()]) for s in optimizer.state.values()]
        found += [way, states, everything(parameters, optimizer)]
    return found


@EXAMPLES
@hypothesis.given(steps=STEPS)
def test_any_changes_are_noticed(compiled, steps):
    found = []
    for backend in (nullcontext(), _ops.use_only("fallback")):
        with backend:
            torch.manual_seed(0)
            found.append(run(steps))
    assert found[0] == found[1]
