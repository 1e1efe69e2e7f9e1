"""compute_effective_precision: every combination of its arguments, in one table."""

from __future__ import annotations

import itertools

import pytest
import torch

import fastamp

# requested, as written: what use_amp=None, use_amp=True with a GPU and everything else give.
TABLE = {
    **dict.fromkeys([64, "64", "64-true", torch.float64], ("64-true", "16-mixed", "64-true")),
    **dict.fromkeys([32, "32", "32-true", None, "no"], ("32-true", "16-mixed", "32-true")),
    **dict.fromkeys([16, "16", "16-mixed", "fp16"], ("16-mixed", "16-mixed", "32-true")),
    **dict.fromkeys(["bf16", "bf16-mixed"], ("bf16-mixed", "bf16-mixed", "32-true")),
    torch.float32: ("32-true", "16-mixed", "32-true"),
    torch.float16: ("16-mixed", "16-mixed", "32-true"),
    torch.bfloat16: ("bf16-mixed", "bf16-mixed", "32-true"),
    "16-true": ("16-true", "16-mixed", "32-true"),
    "bf16-true": ("bf16-true", "bf16-mixed", "32-true"),
}
for name in ("transformer-engine", "transformer-engine-float16"):
    TABLE[name] = (name, name, "32-true")


@pytest.mark.parametrize("requested", TABLE, ids=repr)
def test_every_combination(monkeypatch, requested):
    as_asked, mixed, full = TABLE[requested]
    everything = itertools.product((None, True, False), (None, True, False), (True, False))
    for use_amp, cuda_available, use_gpu in everything:
        for torch_sees_cuda in (True, False):
            monkeypatch.setattr(torch.cuda, "is_available", lambda sees=torch_sees_cuda: sees)
            on_gpu = use_gpu and (torch_sees_cuda if cuda_available is None else cuda_available)
            expected = as_asked if use_amp is None else mixed if use_amp and on_gpu else full
            got = fastamp.compute_effective_precision(requested, use_amp, cuda_available, use_gpu)
            assert got == expected, (use_amp, cuda_available, use_gpu, torch_sees_cuda)


@pytest.mark.parametrize("requested", ["fp8", "32-mixed", "", 8, 16.5, True, torch.int8, ["16"]])
@pytest.mark.parametrize("use_amp", [None, True, False])
def test_unknown_names_are_refused_with_the_list(requested, use_amp):
    with pytest.raises(ValueError, match=r"^requested: expected one of 64-true, ") as error:
        fastamp.compute_effective_precision(requested, use_amp)
    assert str(error.value).endswith(f", torch.bfloat16, got {requested!r}")
