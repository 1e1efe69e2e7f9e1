"""Which precision a run ends up with, in Lightning's names."""

import torch

_NAMES = ["64-true", "32-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed"]
_NAMES += ["transformer-engine", "transformer-engine-float16"]
ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
ALIASES |= {"None": "32-true", "no": "32-true", "fp16": "16-mixed", "torch.float64": "64-true"}
ALIASES |= {"torch.float32": "32-true", "torch.float16": "16-mixed", "torch.bfloat16": "bf16-mixed"}


def compute_effective_precision(
    requested: str | int | torch.dtype | None,
    use_amp: bool | None,  # noqa: FBT001 - a fixed signature
    cuda_available: bool | None = None,  # noqa: FBT001
    use_gpu: bool = True,  # noqa: FBT001, FBT002
) -> str:
    """Return Lightning's full name of a requested precision and a switch for mixed precision.

    With `use_amp=None` the result is `requested` on every device; Lightning itself replaces
    "16-mixed" by bf16 on a CPU. With True and a GPU it is `requested` made mixed: bf16 stays bf16,
    Transformer Engine stays, the rest is "16-mixed". Else "32-true", or the requested "64-true".

    Args:
        requested: one of Lightning's names, as "bf16-mixed", also an old one, as 16 ("16-mixed"),
            "16" or "bf16"; Accelerate's "no" or "fp16"; a torch.dtype; or None: "32-true".
        use_amp: None leaves it to `requested`.
        cuda_available: None asks torch, if the result depends on it.
        use_gpu: whether the run would use a GPU.

    Raises:
        ValueError: `requested` is none of these names.

    Example:
        >>> fastamp.compute_effective_precision("32-true", use_amp=True, cuda_available=True)
        '16-mixed'
    """
    name = ALIASES.get(str(requested), str(requested))
    if name not in _NAMES:
        msg = f"requested: expected one of {', '.join([*_NAMES, *ALIASES])}, got {requested!r}"
        raise ValueError(msg)
    if use_amp is None:
        return name
    has_gpu = use_gpu and (torch.cuda.is_available() if cuda_available is None else cuda_available)
    if use_amp and has_gpu:
        is_mixed = name.startswith("transformer-engine")
        return name if is_mixed else "bf16-mixed" if name.startswith("bf16") else "16-mixed"
    return "64-true" if name == "64-true" else "32-true"
