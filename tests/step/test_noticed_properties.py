"""Changes between steps, in any order and number: each backend sees all of them."""

import torch
from support.changes import CHANGED, NOTICED, SIZES
from support.drawn import EXAMPLES, hypothesis
from support.python_update import python_step
from support.updates import everything, give, make

import fastamp

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


def run(steps, ways=()):
    """Return the bits of all that is left after each step, and how it was made.

    Steps that were native in a run before are made by the oracle.
    """
    torch.manual_seed(0)
    parameters, optimizer = make("adamw", sizes=SIZES)
    found, made = [], []
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
                is_native = bool(ways) and ways[seed] == "native"
                make_step = python_step if is_native else fastamp.optimizer_step
                way = make_step(optimizer, 1.0, zero_grad=kind == 1).way
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            way = type(error).__name__  # torch's own
        states = [(list(s), [v.dtype for v in s.values()]) for s in optimizer.state.values()]
        found += [states, everything(parameters, optimizer)]
        made.append(way)
    return found, made


@EXAMPLES
@hypothesis.given(steps=STEPS)
def test_any_changes_are_noticed(compiled, device, steps):
    found, ways = run(steps)
    assert found == run(steps, ways)[0]
