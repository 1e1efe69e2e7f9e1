"""Print what nvcc makes of the kernels, read from SASS: spills, loads in flight, instructions.

python benchmarks/sass.py [--csrc FOLDER]   # with nvcc and c++filt on the PATH; no GPU
It needs the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm; `nox -s sass` installs them. It
ends with 1 if a kernel spills, or if the norm has fewer than eight loads in flight on a data
center's GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

ARCHITECTURES = (75, 80, 90, 100, 120)
FILES = ("cuda", "update")
WANTED = 8
WANTED_ON = {75, 80, 90, 100}
"""Where memory needs them: on 120 a third is enough (docs/how/numerics.md)."""
ELEMENTS = 8  # of a thread, in one round of the lean kernel's main loop
LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+) )?([\w.]+)\s*(.*?)\s*;")
FORWARD_ENDS = {"EXIT", "RET", "BRX", "BRA", "BSYNC"}


class Instruction(NamedTuple):
    """One line of SASS."""

    place: int
    guard: str | None
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> int | None:
        """Where it may jump to."""
        found = re.search(r"(?:^|[ ,])0x([0-9a-f]+)$", self.operands)
        return int(found[1], 16) if found and self.name in {"BRA", "BSSY"} else None

    @property
    def written(self) -> int | None:
        """The first register that a load writes."""
        found = re.match(r"R(\d+)", self.operands)
        return int(found[1]) if found and self.name == "LDG" else None

    @property
    def read(self) -> set[int]:
        """The registers that it reads; of a wide one the first."""
        first = re.match(r"R\d+(?:\.\w+)?", self.operands)
        is_written = first is not None and not self.name.startswith(("ST", "RED"))
        rest = self.operands[first.end() :] if is_written and first else self.operands
        return {int(number) for number in re.findall(r"\bR(\d+)", rest)}


Code = dict[int, Instruction]


def functions_of(sass: str) -> dict[str, Code]:
    """Return the kernels' instructions by place, from what `cuobjdump -sass` prints."""
    found: dict[str, Code] = {}
    for line in sass.splitlines():
        if "Function : " in line:
            code = found[line.partition("Function : ")[2].strip()] = {}
        elif match := LINE.match(line):
            code[int(match[1], 16)] = Instruction(int(match[1], 16), *match.groups()[1:])
    return found


def loops_of(code: Code) -> list[Code]:
    """Return the loops: what lies between the target of a jump back and that jump."""
    jumps = [(each.target, each.place) for each in code.values() if each.name == "BRA"]
    ends = [(start, end) for start, end in jumps if start is not None and start < end]
    return [{p: code[p] for p in code if start <= p <= end} for start, end in ends]


def nexts_of(code: Code) -> dict[int, list[int]]:
    """Return where each instruction may be followed by another, forwards only."""
    places = sorted(code)
    found, meeting = dict[int, list[int]](), dict[str, int]()
    for place, after in zip(places, [*places[1:], -1], strict=True):
        each = code[place]
        targets = []
        if each.name == "BSSY" and each.target is not None:
            meeting[each.operands.partition(",")[0]] = each.target
        if each.name == "BRA" and each.target is not None:
            targets.append(each.target)
        if each.name == "BSYNC":
            targets.append(meeting.get(each.operands.strip(), after))
        is_certain = each.guard is None and not re.match(r"!?U?P", each.operands)
        if each.name not in FORWARD_ENDS or not is_certain:
            targets.append(after)
        found[place] = [target for target in targets if target > place and target in code]
    return found


def loads_in_flight(loop: Code) -> int:
    """Return how many 16-byte loads are under way at most, on the way from one to the next."""
    nexts, place, most = nexts_of(loop), -1, 0
    nexts[place] = [min(loop)]
    waiting = set[int]()
    while (way := _way_to_load(loop, nexts, place)) is not None:
        for each in (loop[step] for step in way):
            waiting = {load for load in waiting if not each.read & {*range(load, load + 4)}}
        place = way[-1]
        waiting.add(loop[place].written or 0)
        most = max(most, len(waiting))
    return most


def _way_to_load(code: Code, nexts: dict[int, list[int]], start: int) -> list[int] | None:
    """Return the shortest way from an instruction to the next load of 16 bytes, if there is one."""
    before, ways = {start: start}, [start]
    for place in ways:
        for after in nexts[place]:
            if after in before:
                continue
            before[after] = place
            ways.append(after)
            if code[after].opcode.startswith("LDG.E.128"):
                way = [after]
                while before[way[-1]] != start:
                    way.append(before[way[-1]])
                return way[::-1]
    return None


def instructions_of(loop: Code) -> int:
    """Return the fewest instructions of a round with all shuffles and most vectors of 8 bytes.

    Of the lean kernel these are rounds with 16-bit weights in two halves and moments of 8 bits.
    Divisions and roots take their fast way.
    """
    nexts, best = nexts_of(loop), dict[int, tuple[int, int, int]]()
    for place in sorted(loop, reverse=True):
        name, opcode = loop[place].name, loop[place].opcode
        is_wide = name in {"LDG", "STG"} and ".64" in opcode and loop[place].guard is None
        rest = max((best[after] for after in nexts[place]), default=(0, 0, 0))
        best[place] = (rest[0] + (name == "SHFL"), rest[1] + is_wide, rest[2] - 1)
    return -best[min(loop)][2]


def find_tool(name: str) -> str:
    """Return the path of a tool, on the PATH or of NVIDIA's wheels."""
    wheels = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob(f"**/bin/{name}"))
    found = shutil.which(name) or (str(wheels[0]) if wheels else None)
    if found is None:
        sys.exit(f"{name} is neither on the PATH nor among NVIDIA's wheels")
    return found


def compile_file(csrc: Path, folder: str, name: str, architecture: int) -> dict[str, Code]:
    """Compile a file and return its kernels, by readable names without arguments."""
    made = Path(folder, f"{name}.{architecture}.cubin")
    options = ["-cubin", f"-arch=sm_{architecture}", "-std=c++17", f"-I{csrc}", "-o", str(made)]
    subprocess.run([find_tool("nvcc"), *options, str(csrc / "step" / f"{name}.cu")], check=True)
    env = {**os.environ, "NVDISASM_PATH": str(Path(find_tool("nvdisasm")).parent)}
    command = [find_tool("cuobjdump"), "-sass", str(made)]
    sass = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    found = functions_of(sass)
    command = [find_tool("c++filt"), *found]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(zip(map(short_name, names.splitlines()), found.values(), strict=True))


def short_name(name: str) -> str:
    """Return a kernel's readable name without namespaces and arguments."""
    return re.sub(r"^void |fastamp::|\(anonymous namespace\)::", "", name).partition("(")[0]


def rows_of(kernels: dict[str, Code], architecture: int) -> tuple[list[str], bool]:
    """Return a line for each kernel with a main loop, and whether all is as it has to be."""
    rows, is_right = [], True
    for name, code in kernels.items():
        spills = sum(each.name in {"STL", "LDL"} for each in code.values())
        is_right &= spills == 0
        row = f"sm_{architecture}  {name}: {len(code)} instructions, {spills} spills"
        loops = [
            loop
            for loop in loops_of(code)
            if any(each.opcode.startswith("LDG.E.128") for each in loop.values())
        ]
        if "LeanEntry" in name and loops:
            count = instructions_of(max(loops, key=len))
            row += f", {count / ELEMENTS:.0f} an element"
        if name.startswith(("reduce_kernel", "update_kernel")):
            flights = sorted(loads_in_flight(loop) for loop in loops)
            row += f", 16-byte loads in flight {flights}"
            is_norm = name.startswith("reduce_kernel") and architecture in WANTED_ON
            is_right &= not is_norm or (flights != [] and flights[0] >= WANTED)
        rows.append(row)
    return rows, is_right


def main() -> None:
    """Print a table; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csrc", type=Path, default=Path(__file__).parents[1] / "csrc")
    csrc = parser.parse_args().csrc
    all_right, kernels_seen = True, set[str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = [*product(FILES, ARCHITECTURES)]
        made = pool.map(lambda pair: compile_file(csrc, folder, *pair), pairs)
        for (_, architecture), kernels in zip(pairs, made, strict=True):
            rows, is_right = rows_of(kernels, architecture)
            all_right &= is_right
            kernels_seen |= {name.partition("<")[0] for name in kernels}
            print(*rows, sep="\n", flush=True)
    if missing := {"reduce_kernel", "update_kernel"} - kernels_seen:
        sys.exit(f"the sources have no {', '.join(sorted(missing))}")
    if not all_right:
        sys.exit("a kernel spills, or the norm's loads do not go out together")


if __name__ == "__main__":
    main()
