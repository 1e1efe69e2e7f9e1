"""The reader of compiled kernels, on loops that are written by hand as cuobjdump prints them."""

import importlib
import sys
from pathlib import Path

import pytest

TOGETHER = """
        LDG.E.128 R4, desc[UR4][R2.64]
        LDG.E.128 R8, desc[UR4][R2.64+0x200]
        DFMA R12, R4, R4, R12
        DFMA R12, R10, R10, R12
    @P0 BRA 0x0000
        EXIT
"""
IN_TURN = """
        LDG.E.128 R4, desc[UR4][R2.64]
        DFMA R12, R6, R6, R12
        LDG.E.128 R8, desc[UR4][R2.64+0x200]
        DFMA R12, R10, R10, R12
    @P0 BRA 0x0000
"""
# A tensor of 32 or of 16 bits, then another of 32; what the shorter way reads is not under way.
BY_DTYPE = """
        BSSY B0, 0x0070
    @P1 BRA 0x0050
        LDG.E.64 R4, desc[UR4][R2.64]
        PRMT R4, R4, 0x5410, R5
        BSYNC B0
        LDG.E.128 R4, desc[UR4][R2.64]
        BSYNC B0
        LDG.E.128 R8, desc[UR4][R20.64]
        FADD R12, R4, R8
    @P0 BRA 0x0000
"""
# The division of the round with codes, which has the shuffle, has a fast and a slow way.
LEAN = """
        LDG.E.128 R4, desc[UR4][R2.64]
   @!P1 BRA 0x0070
        SHFL.IDX PT, R5, R4, R6, 0x1f
    @P2 BRA 0x0050
        CALL.REL.NOINC 0x0900
        MUFU.RCP R5, R5
        STG.E.64 desc[UR4][R2.64], R4
        IADD3 R2, R2, 0x10, RZ
    @P0 BRA 0x0000
"""


@pytest.fixture
def sass(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    return importlib.import_module("sass")


def printed(text, name="_Z6kernel"):
    """Write code as cuobjdump prints it, with places and a second line of bits."""
    lines = [f"\t\tFunction : {name}"]
    for i, line in enumerate(text.strip("\n").splitlines()):
        lines += [f"        /*{16 * i:04x}*/ {line} ;   /* 0x00{i} */", "     /* 0x000fe2 */"]
    return "\n".join(lines)


def loop_of(sass, text):
    (code,) = sass.functions_of(printed(text)).values()
    (loop,) = sass.loops_of(code)
    return loop


@pytest.mark.parametrize(("text", "expected"), [(TOGETHER, 2), (IN_TURN, 1), (BY_DTYPE, 2)])
def test_loads_are_in_flight_until_the_first_use_of_their_registers(sass, text, expected):
    assert sass.loads_in_flight(loop_of(sass, text)) == expected


def test_a_round_is_counted_on_its_way_with_shuffles_where_divisions_are_fast(sass):
    assert sass.instructions_of(loop_of(sass, LEAN)) == 8


def test_spills_and_loads_that_go_out_in_turn_are_not_right(sass):
    good, bad = (
        TOGETHER.replace("\n    @P0", f"\n{line}\n    @P0") for line in ("NOP", "STL [R1], R4")
    )
    for text, name, is_right in (
        (good, "update_kernel<Adam>", True),
        (bad, "update_kernel<Adam>", False),
        (good, "reduce_kernel", False),  # two loads are not eight
    ):
        rows, found = sass.rows_of(
            {name: next(iter(sass.functions_of(printed(text)).values()))}, 90
        )
        assert found is is_right
        assert rows[0].endswith("in flight [2]")
    assert sass.rows_of({}, 90) == ([], True)
