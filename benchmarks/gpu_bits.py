"""Compare the CUDA kernels with the compiled CPU core, bit by bit: a line of JSON for each case.

    python benchmarks/gpu_bits.py            # a minute on a GPU; --small for compute-sanitizer

A case makes the same tensors on both devices, does the same work, and compares all that it has
written. One that differs, or that raises an error, is a line, and the next one follows. Which
optimizers, options and formats there are is asked of torch and fastamp: every optimizer that the
compiled core steps on the CPU is compared, with each of its options. Products of Muon's matrices
are torch's, on each device others: its weights are compared with a tolerance, its momentum by bits.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
import time
import traceback
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import fastamp
from fastamp.step.lean import MOMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    Found = dict[str, Any]
    Case = tuple[str, Callable[[str], Found]]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [(3,), (70, 5), (0,), (1025,), (4, 300), (9, 64), (17_000,)]
MATRICES = [(48, 32), (32, 48), (1, 40), (64, 64)]
NUMBERS = {
    "weight_decay": 0.1,
    "betas": (0.3, 0.99),
    "eps": 1e-3,
    "momentum": 0.9,
}
"""Options of optimizers, and values that are not their defaults."""
OF_TORCH = {"foreach", "capturable", "differentiable", "fused"}  # flags that choose torch's kernels
# Of the norm of Muon's steps: fifteen products in bfloat16. A step moves weights of 16 bits by less
# than their last bit, so that a product's last bit decides whether they move.
PRODUCTS_RTOL = {torch.float32: 0.1, torch.bfloat16: 0.4, torch.float16: 0.4}


def draw(
    sizes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: str,
    seed: int,
    *,
    odd: bool = False,
    scale: float = 1.0,
) -> list[Tensor]:
    """Return random tensors, the same on each device; odd ones begin in the middle of a vector."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for place, size in enumerate(sizes):
        values = scale * torch.randn(size, generator=generator)
        start = place % 8 + 1 if odd else 0
        buffer = torch.zeros(values.numel() + start, dtype=dtype, device=device)
        made.append(buffer[start:].view(size).copy_(values.to(dtype)))
    return made


def list_norms(*, small: bool) -> Iterator[Case]:
    """Yield gradients of all kinds: their norm, and themselves after they are clipped."""
    sizes = [(0,), (1,), (255,), (257,), (8195,), (33, 65), (65_537,), (140_000,)]
    for dtype in DTYPES:
        limits, name = torch.finfo(dtype), str(dtype).removeprefix("torch.")
        for odd in (False, True):
            where = "misaligned" if odd else "aligned"
            yield f"norm, {name}, {where}", partial(_norm, sizes, [dtype], odd=odd)
        for kind, value in (
            ("inf", math.inf),
            ("nan", math.nan),
            ("largest", limits.max),
            ("subnormal", limits.tiny / 2),
        ):
            yield f"norm, {name}, {kind}", partial(_norm, sizes[:5], [dtype], value=value)
    yield "norm, empty tensors", partial(_norm, [(0,), (0, 3)], [torch.float32])
    yield "norm, mixed dtypes", partial(_norm, sizes, DTYPES, odd=True)
    many = [(1 + place % 600,) for place in range(2300)]
    yield "norm, 2,300 tensors", partial(_norm, many, DTYPES, odd=True)
    if not small:
        yield "norm, 20 million elements", partial(_norm, [(20_000_001,)], [torch.float32])


def _norm(
    sizes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: str,
    *,
    odd: bool = False,
    value: float | None = None,
) -> Found:
    parameters = []
    for place, size in enumerate(sizes):
        dtype = dtypes[place % len(dtypes)]
        grad = draw([size], dtype, device, seed=place, odd=odd)[0]
        if value is not None:
            grad.view(-1)[1::7] = value
        parameters.append(torch.nn.Parameter(torch.zeros_like(grad)))
        parameters[-1].grad = grad
    grads: Any = [parameter.grad for parameter in parameters]
    found = {"get_total_norm": fastamp.get_total_norm(grads)}
    found["clip_grad_norm_"] = fastamp.clip_grad_norm_(parameters, 1.0)
    return found | {f"gradient {place}": grad for place, grad in enumerate(grads)}


def find_rules() -> list[tuple[type[Optimizer], list[tuple[int, ...]]]]:
    """Return the optimizers that the compiled core steps, each with shapes that it takes."""
    known = [*vars(torch.optim).values(), *vars(fastamp).values()]
    found = []
    for cls in dict.fromkeys(each for each in known if inspect.isclass(each)):
        if issubclass(cls, Optimizer) and cls is not Optimizer:
            sizes = (each for each in (SIZES, MATRICES) if _is_native(cls, {}, torch.float32, each))
            found += [(cls, its) for its in [next(sizes, None)] if its]
    return found


def _is_native(cls: Any, options: Mapping[str, Any], dtype: torch.dtype, sizes: Any) -> bool:
    """Say whether fastamp steps an optimizer itself; a refusal is no."""
    try:
        return "way" in _step(cls, options, dtype, sizes, "cpu", steps=1)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError):
        return False


def list_options(cls: type[Optimizer]) -> Iterator[dict[str, Any]]:
    """Yield options of an optimizer: the defaults, each other value alone, and each format."""
    names = inspect.signature(cls).parameters
    flags = [name for name, each in names.items() if each.default is False and name not in OF_TORCH]
    yield {}
    for name, value in [*NUMBERS.items(), *((flag, True) for flag in flags)]:
        if name in names:
            momentum = {"momentum": 0.9} if name == "nesterov" else {}
            yield momentum | {name: value}
    if "fused" in names:
        yield {"fused": True}
    state = {"momentum": 0.9} if "momentum" in names else {}
    for moments in MOMENTS if "moments" in names else ():
        for exact in (True, False):
            yield state | {"moments": moments, "exact": exact}
            changed = {name: NUMBERS[name] for name in ("weight_decay", "betas") if name in names}
            yield state | {"moments": moments, "exact": exact, "maximize": True} | changed


def list_steps(*, small: bool) -> Iterator[Case]:
    """Yield four steps, the second of which overflows, of each optimizer, option and dtype."""
    for cls, sizes in find_rules():
        own = "fastamp." if cls.__module__.startswith("fastamp") else ""
        for options in list_options(cls):
            if small and options and not {"moments", "fused"} & options.keys():
                continue
            for dtype in DTYPES:
                if _is_native(cls, options, dtype, sizes):
                    said = "".join(f", {name}={value}" for name, value in options.items())
                    name = f"{own}{cls.__name__}{said}, {str(dtype).removeprefix('torch.')}"
                    yield name, partial(_step, cls, options, dtype, sizes)
        if sizes is SIZES and not small:
            many = [(1 + place % 50,) for place in range(2300)]
            name = f"{own}{cls.__name__}, 2,300 tensors"
            yield name, partial(_step, cls, {}, torch.float32, many)


def _step(
    cls: Any,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    sizes: Sequence[tuple[int, ...]],
    device: str,
    *,
    steps: int = 4,
) -> Found:
    """Return parameters, gradients and states after steps; raise an error if torch makes them."""
    parameters = [torch.nn.Parameter(each) for each in draw(sizes, dtype, device, 1, odd=True)]
    starts = [each.detach().float().clone() for each in parameters]
    half = len(sizes) // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 3e-3}]
    optimizer = cls(groups, lr=1e-2, **options)
    found: Found = {}
    for step in range(steps):
        grads = draw(sizes, dtype, device, 100 + step, odd=step % 2 == 0, scale=0.1)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        if step == 1:
            grads[-1].view(-1)[-1] = math.inf
        report = fastamp.optimizer_step(optimizer, max_norm=1.0, zero_grad=step == 3)
        if report.way != "native":
            msg = f"the step is {report.way}"
            raise RuntimeError(msg)
        found |= {f"{name}, step {step}": getattr(report, name) for name in ("norm", "found_inf")}
        found |= {f"gradient {i}, step {step}": p.grad for i, p in enumerate(parameters)}
    found["way"] = report.way
    for place, parameter in enumerate(parameters):
        if sizes is MATRICES:
            rtol = PRODUCTS_RTOL[dtype]
            found[f"~{rtol} moved {place}"] = parameter.detach().float() - starts[place]
        else:
            found[f"weight {place}"] = parameter
        for name, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {place}"] = value
    return found


def list_scalers(*, small: bool) -> Iterator[Case]:
    """Yield steps under a loss scale that grows and backs off."""
    for way in ("step", "clip_grad_norm_"):
        for dtype in DTYPES[: 1 if small else 2]:
            name = f"GradScaler, {way}, {str(dtype).removeprefix('torch.')}"
            yield name, partial(_scaler, way, dtype)


def _scaler(way: str, dtype: torch.dtype, device: str) -> Found:
    module = torch.nn.ParameterList(draw(SIZES, dtype, device, 1, odd=True))
    parameters = [*module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    scaler = fastamp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    found: Found = {}
    for step in range(5):
        scaler.scale(torch.ones((), device=device))
        for parameter, grad in zip(parameters, draw(SIZES, dtype, device, 50 + step), strict=True):
            parameter.grad = grad
        if step == 2:
            parameters[0].grad[1], parameters[-1].grad[5:7] = math.nan, -math.inf
        if way == "step":
            scaler.step(optimizer, max_norm=1e-2)
        else:
            found[f"norm {step}"] = scaler.clip_grad_norm_(optimizer, 1e-2)
            scaler.step(optimizer)
        scaler.update()
        if step == 2:
            found["named"] = [[*each] for each in scaler.nonfinite_parameters(module)]
        found |= {f"last_step.{n} {step}": getattr(scaler.last_step, n) for n in ("norm", "scale")}
        found |= {f"gradient {i}, step {step}": p.grad for i, p in enumerate(parameters)}
    found |= {f"weight {place}": each for place, each in enumerate(parameters)}
    return found | {"scale": scaler.get_scale(), "skipped_steps": scaler.skipped_steps}


def take(found: Found) -> Found:
    """Copy tensors to the host: the bits of each, or of `~` names their values.

    All NaNs are the same: a GPU's have other bits than a CPU's.
    """
    taken: Found = {}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            taken[name] = value
            continue
        host = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        if host.is_floating_point():
            host[host.isnan()] = math.nan
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        is_bits = not name.startswith("~")
        taken[name] = host.view(-1).view(width[host.element_size()]) if is_bits else host
    return taken


def compare(ours: Found, theirs: Found) -> list[str]:
    """Return the names of what differs, and in how many elements."""
    wrong = [name for name in theirs if name not in ours] + [n for n in ours if n not in theirs]
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            wrong += [f"{name}: {one}, not {other}"] if one != other else []
        elif one.shape != other.shape:
            wrong.append(f"{name}: the shape is {tuple(one.shape)}, not {tuple(other.shape)}")
        elif name.startswith("~"):
            error = ((one - other).norm() / other.norm()).item()
            rtol = float(name[1:].split()[0])
            wrong += [] if error < rtol else [f"{name}: off by {error:.3f} of the step"]
        elif not torch.equal(one, other):
            different = one != other
            first = int(different.nonzero()[0])
            wrong.append(f"{name}: {int(different.sum())} of {one.numel()} elements, from {first}")
    return sorted(wrong)


def run(
    device: str,
    *,
    small: bool = False,
    using: Callable[[], AbstractContextManager[object]] = nullcontext,
    only: str = "",
) -> Iterator[dict[str, Any]]:
    """Yield a line for each case.

    Args:
        device: whose kernels are compared with the CPU's.
        small: a few cases of each kind.
        using: what to enter for the work on `device`.
        only: take cases with this in their names.
    """
    yield {"rules": [cls.__name__ for cls, _ in find_rules()]}
    for make in (list_norms, list_scalers, list_steps):
        for name, case in make(small=small):
            if only not in name:
                continue
            begin_s = time.perf_counter()
            line: dict[str, Any] = {"case": name, "ok": False}
            try:
                expected = take(case("cpu"))
                with using():
                    wrong = compare(take(case(device)), expected)
                line |= {"ok": not wrong, "of": len(expected), "wrong": wrong[:8]}
            except Exception as error:  # noqa: BLE001 - of any kind: the next case has to run
                line["wrong"] = [f"{type(error).__name__}: {error}"[:500]]
                traceback.print_exc()
            yield line | {"s": round(time.perf_counter() - begin_s, 3)}


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for each case; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a few cases of each kind")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their names")
    args = parser.parse_args(words)
    missing = {"cuda", "cpu"} - {*fastamp.backends()}
    if missing:
        parser.error(f"needs compiled code for CUDA and the CPU; not here: {', '.join(missing)}")
    failed = 0
    for line in run("cuda", small=args.small, only=args.only):
        print(json.dumps(line), flush=True)
        failed += not line.get("ok", True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
