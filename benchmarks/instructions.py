"""Print what 16 bytes cost in the main loops of the norm's kernels, from compiled code; no GPU.

nvcc -cubin -arch=sm_86 -std=c++17 -Icsrc csrc/step/cuda.cu -o cuda.cubin
python benchmarks/instructions.py cuda.cubin   # with cuobjdump and c++filt on the PATH
"""

import re
import subprocess
import sys
from collections import Counter

LOADS = 8  # of 16 bytes each, that a main loop has in flight
FUNCTION = re.compile(r"\s+Function : (\S+)")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([\w.]+)(.*?);")
KINDS = {
    "float64": r"D(ADD|MUL|FMA|SETP).*|F2F.F64.*",
    "float32": r"F(ADD|MUL|FMA).*",
    "any": r".*",
}


def run(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


name = ""
code: list[tuple[int, str]] = []
for line in run("cuobjdump", "-sass", sys.argv[1]).splitlines():
    if function := FUNCTION.match(line):
        name = re.sub(r"fastamp::|\(anonymous \w+\)::", "", run("c++filt", function[1]))
        name = name.partition("(Table")[0]
        code = []
    elif found := INSTRUCTION.match(line):
        code.append((int(found[1], 16), found[2]))
        target = re.search(r"0x[0-9a-f]+", found[3])
        if found[2] != "BRA" or target is None or not name.endswith(", 16>"):
            continue
        loop = Counter(opcode for place, opcode in code if place >= int(target[0], 16))
        if sum(n for opcode, n in loop.items() if "LDG.E.128" in opcode) == LOADS:
            costs = {
                kind: sum(n for opcode, n in loop.items() if re.fullmatch(pattern, opcode))
                for kind, pattern in KINDS.items()
            }
            print(name, *(f"{kind} {n / LOADS:.1f}" for kind, n in costs.items()), sep="  ")
