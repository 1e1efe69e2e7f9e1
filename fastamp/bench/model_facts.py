"""What a task's model allows: the Linears that fit fp8 and MXFP8, and where torch.compile breaks.

A Linear makes three products, and each of its sizes is once the one that is summed over: inputs,
outputs, and the rows of a batch, samples or tokens. The rules are documented, as of 2026:

- fp8: `torch._scaled_mm` needs that size divisible by 16 (torchao's issue 3111). Where fp8 gains on
  an H100: `_auto_filter_for_recipe` of `torchao.float8`, whose K is the outputs (`weight.shape`).
- MXFP8: 32 values have one scale (Transformer Engine's user guide, "MXFP8").
- Units: compute capability 8.9 for fp8, 10.0 for MXFP8 (its support matrix).
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fastamp.bench.record import Report
from fastamp.bench.tasks import Make, Part, compute_loss, draw, make_loader, make_training

Sizes: TypeAlias = tuple[int, int, int]  # of a Linear's product: inputs, outputs, rows

MOST_BREAKS = 8
# torch's counter knows attention on a GPU only.
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FORMULAS = {_CPU_ATTENTION: lambda q, k, *_, **__: 4 * math.prod(q) * k[-2]}


class Rule(NamedTuple):
    """What a precision asks of a Linear, and of a GPU."""

    text: str
    divisor: int
    capability: tuple[int, int]
    gains: Callable[[int, int], bool] = lambda _inputs, _outputs: True

    def allows(self, sizes: Sizes) -> bool:
        """Say whether a product passes."""
        return all(size % self.divisor == 0 for size in sizes) and self.gains(*sizes[:2])


_LARGE = "and large enough to gain"
RULES = {
    "fp8": Rule("divisible by 16", 16, (8, 9)),
    "fp8 tensorwise": Rule(_LARGE, 16, (8, 9), lambda i, o: i > 1024 or o > 4096),
    "fp8 rowwise": Rule(
        _LARGE, 16, (8, 9), lambda i, o: min(i, o) > 2048 or (i > 4096 and o > 1024)
    ),
    "MXFP8": Rule("divisible by 32", 32, (10, 0)),
}


def examine_model(make: Make, device: str, seed: int) -> Report:
    """Call a task's model on one batch, and say what its Linears and its graph allow."""
    training = make_training(make, device, seed)
    model = getattr(training.model, "_orig_mod", training.model)  # of torch.compile
    with Part("model", "its move to the device"):
        model.to(device)
    names = {m: name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    seen: dict[str, list[Sizes]] = {name: [] for name in names.values()}
    calls: list[Any] = []

    def see(linear: Any, _: object, output: object) -> None:
        if not isinstance(output, Tensor):  # of a class of the user's
            return
        outputs = linear.out_features
        seen[names[linear]].append((linear.in_features, outputs, output.numel() // outputs))

    hooks = [linear.register_forward_hook(see) for linear in names]
    note = calls.append
    hooks.append(model.register_forward_pre_hook(lambda _, *call: note(call), with_kwargs=True))
    batch = next(draw(make_loader(training, seed, device=device), device))
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with torch.no_grad(), warnings.catch_warnings(), counter:  # under it nothing is compiled
        warnings.filterwarnings("ignore", "Using .torch.compile.module")  # its hooks, in a part
        compute_loss(training, model, batch)
    for hook in hooks:
        hook.remove()
    rows, notes = _describe(seen, counter.get_total_flops(), device)
    args, options = calls[0]
    notes += find_graph_breaks(model, *args, **options)
    return Report(table=rows, notes=notes, details={"linears": seen})


def _describe(
    seen: dict[str, list[Sizes]], flops: int, device: str
) -> tuple[list[dict[str, str]], list[str]]:
    """Return a row for each rule, and a line for each shape, the largest share first."""

    def share(products: list[Sizes]) -> str:  # a multiply-add is two operations
        return f"{2 * sum(map(math.prod, products)) / max(flops, 1):.0%}"

    rows, notes = [], ["arithmetic: of the forward pass on one batch, as torch counts it"]
    for name, rule in RULES.items():
        passed = [own for own in seen.values() if own and all(map(rule.allows, own))]
        row = {"precision": name, "rule": rule.text, "Linears": f"{len(passed)} of {len(seen)}"}
        row |= {"of the arithmetic": share([*chain(*passed)])}
        rows.append(row | {"units here": _find_units(device, rule.capability)})
    shapes = Counter(chain(*seen.values()))
    for sizes in sorted(shapes, key=lambda each: -shapes[each] * math.prod(each)):
        fits = [name for name, rule in RULES.items() if rule.allows(sizes)] or ["none of these"]
        text = f"{shapes[sizes]} x Linear({sizes[0]}, {sizes[1]}) on {sizes[2]} rows"
        notes.append(f"{text}, {share([sizes] * shapes[sizes])}: {', '.join(fits)}")
    unused = [name for name, own in seen.items() if not own]
    return rows, notes + [f"not called: {', '.join(unused)}"] * bool(unused)


def _find_units(device: str, needed: tuple[int, int]) -> str:
    """Say whether this device has units for a precision."""
    if device == "cpu" or torch.version.hip is not None:
        return "n/a: a CPU" if device == "cpu" else "n/a: a GPU that is not NVIDIA's"
    found = torch.cuda.get_device_capability()
    return f"{'yes' if found >= needed else 'no'}: compute capability {found[0]}.{found[1]}"


def find_graph_breaks(model: nn.Module, /, *args: Any, **options: Any) -> list[str]:
    """Return a line that says whether torch.compile gets one graph, and a line for each break."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its tracing
            torch._dynamo.reset()
            found = _collect_breaks(model, *args, **options)
    except Exception as error:  # noqa: BLE001 - whatever it is, the task itself has worked
        return [f"torch.compile: {type(error).__name__}: {_first_line(str(error))}"]
    finally:
        torch._dynamo.reset()
    breaks: dict[str, str] = {}
    for text, stack in found:
        own = [frame for frame in stack if not frame.filename.startswith(torch.__path__[0])]
        place = f"{own[-1].filename}:{own[-1].lineno}" if own else "a line of torch's own"
        breaks.setdefault(place, _first_line(text.partition("Explanation: ")[2] or text))
    count = f"the graph breaks at {len(breaks)} place(s) at least" if breaks else "no graph break"
    lines = [f"graph break at {place}: {reason}" for place, reason in breaks.items()]
    return [f"torch.compile: {count} in a forward pass", *lines[:MOST_BREAKS]]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _collect_breaks(model: nn.Module, /, *args: Any, **options: Any) -> list[tuple[str, Any]]:
    """Return torch's text on each graph break, and its stack of frames.

    `fullgraph=True` decides, and tells the first one. `explain` tells more, but none of a function
    that is not compiled at all, as one with a break in a loop.
    """
    try:
        torch.compile(model, backend="eager", fullgraph=True)(*args, **options)
    except torch._dynamo.exc.Unsupported as error:
        explained = torch._dynamo.explain(model)(*args, **options)
        more = [(each.reason, each.user_stack) for each in explained.break_reasons]
        return [(str(error), error.real_stack), *more]
    return []
