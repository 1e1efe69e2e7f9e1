"""For fuzzers: bytes damaged at random, and the property of every input.

An input works, and so does its use; or a `raise` statement of fastamp's refuses it with a message,
and its target is unchanged. Both within seconds.
"""

from __future__ import annotations

import dis
import resource
import signal
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.loading import assert_same

import fastamp

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

OURS = str(Path(fastamp.__file__).parent)
LIMIT_S = 5.0  # of the processor
MEMORY_NBYTES = 4 << 30  # above the memory in use


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
