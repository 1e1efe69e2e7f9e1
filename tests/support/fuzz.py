"""For fuzzers: values changed and bytes damaged at random; and the property of every input.

An input works, and so does its use; or a `raise` statement of fastamp's refuses it with a message,
and its target is unchanged. Both within seconds.
"""

from __future__ import annotations

import dis
import math
import resource
import signal
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch._dynamo  # else the first optimizer imports it, which takes longer than an input may
from support.loading import assert_same

import fastamp

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

OURS = str(Path(fastamp.__file__).parent)
LIMIT_S = 5.0  # of the processor
MEMORY_NBYTES = 4 << 30  # above the memory in use
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 5, 255, 10**9, 2**31, 2**63, -(2**63) - 1, 10**400),
    *(-0.0, 0.5, 1e308, math.nan, math.inf, 1j),
    *("", "5", "nan", "\ud800", "\0", "é" * 100, b"", b"\xff" * 8),
    *([], {}, [None], [[]], {"x": None}, {0: 1}, (), (1, 2), [0] * 1000, set()),
    torch.zeros(()),
    torch.tensor([True]),
    torch.ones(3, 4).t(),
    torch.full((2,), math.nan),
    torch.zeros(5056, dtype=torch.uint8),
    torch.zeros(1).expand(4, 5),
    torch.ones(2, 2).to_sparse(),
    torch.zeros(2, device="meta"),
    torch.zeros(2, dtype=torch.complex64),
    torch.nn.Parameter(torch.ones(2)),
)
"""What a checkpoint, or a state in memory, may hold in place of what belongs there."""


def changed(value: Any, rng: random.Random) -> Any:
    """Return a copy of a value with one change, in it or in a child."""
    if isinstance(value, dict | list | tuple) and value and rng.random() < 0.9:
        items = [*value.items()] if isinstance(value, dict) else [*value]
        place, how = rng.randrange(len(items)), rng.random()
        if how < 0.1:
            del items[place]
        elif how < 0.2:
            new = rng.choice(VALUES)
            items.append((rng.choice((0, "", "x", None)), new) if isinstance(value, dict) else new)
        elif isinstance(value, dict):
            items[place] = items[place][0], changed(items[place][1], rng)
        else:
            items[place] = changed(items[place], rng)
        return type(value)(items)
    if type(value) in (int, float) and rng.random() < 0.6:
        return rng.choice((value + 1, value - 1, -value, value * 2**33, value // 2, [value]))
    if isinstance(value, str) and rng.random() < 0.6:
        return rng.choice((value[1:], value + "x", value.upper(), [value], value.encode()))
    return rng.choice(VALUES)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with up to four changes: bits, runs, cuts, insertions, repetitions."""
    for _ in range(rng.randrange(5)):
        start, length = rng.randrange(len(data) + 1), rng.randrange(65)
        end = rng.choice((start, start + length, start + 1, len(data)))
        old = data[start:end]
        flipped = bytes(each ^ 1 << rng.randrange(8) for each in old)
        new = rng.choice((b"", flipped, rng.randbytes(len(old)), bytes(len(old)), old + old))
        data = data[:start] + new + data[end:]
    return data


def works_or_is_refused(
    load: Callable[[], Any],
    use: Callable[[Any], object],
    look: Callable[[], Any],
    errors: type[Exception] | tuple[type[Exception], ...],
    match: str = "",
) -> None:
    """Load an input and use what was loaded; `look` returns all that a refusal must not change."""
    before, refusal = look(), None
    with bounds():
        try:
            loaded = load()
        except errors as error:
            refusal = error
        else:
            use(loaded)
    if refusal is not None:
        *_, (frame, _) = traceback.walk_tb(refusal.__traceback__)
        raises = frame.f_code.co_code[frame.f_lasti] == dis.opmap["RAISE_VARARGS"]
        if not (raises and frame.f_code.co_filename.startswith(OURS)):
            msg = "not refused on purpose"
            raise AssertionError(msg) from refusal
        assert match in str(refusal)
        assert len(str(refusal)) > 10
        assert_same(look(), before)


@contextmanager
def bounds() -> Iterator[None]:
    """Bound the time of the processor, and the process's memory."""

    def stop(*_: object) -> None:
        msg = "an input takes too long"
        raise AssertionError(msg)

    handler = signal.signal(signal.SIGVTALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_NBYTES, limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, handler)
