"""Lightning's plugin, Fabric and loaders of ours: on one rank, and on two, with DDP and FSDP2."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from support import lightning_cases as cases
from support import ranks
from support.devices import NATIVE
from support.training import assert_same_bits, assert_same_but_for_rounding

if find_spec("lightning") is None:
    pytest.skip("could not import 'lightning'", allow_module_level=True)


@pytest.fixture(scope="module")
def two():
    with ranks.start(2) as started:
        yield started


def assert_shared_out(answers):
    """Hold that two epochs were seen once each by all ranks together."""
    for epoch in range(2):
        batches = [batch for answer in answers for batch in answer["seen"][6 * epoch :][:6]]
        assert sorted(row for batch in batches for row in batch) == list(range(cases.ROWS))
    assert answers[0]["seen"][:6] != answers[0]["seen"][6:]


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one_on_the_samples_of_both(two, strategy, precision):
    options = {"precision": precision, "strategy": strategy, "overflow": True}
    answers = two.run(2, partial(cases.fit, **options))
    assert_shared_out(answers)
    together = [a + b for a, b in zip(*(answer["seen"] for answer in answers), strict=True)]
    expected = cases.train_by_hand(together, precision)
    for answer in answers:
        assert_same_bits(answer["weights"], answers[0]["weights"])
        # The ranks' means are rounded, in fp16 to 11 bits.
        rtol = 0.02 if precision == "16-mixed" else 1e-4
        torch.testing.assert_close(answer["weights"], expected, rtol=rtol, atol=rtol / 10)
        assert answer["skipped"] == 2
        assert answer["way"].startswith(NATIVE)
        assert answer["rate"] == [pytest.approx(0.1 * 0.9**10)]


@pytest.mark.parametrize("share", ["shard", "lightning"])
def test_a_loader_is_shared_out_and_resumes_on_two_ranks(two, tmp_path, share):
    options = {"strategy": "ddp", "share": share, "folder": str(tmp_path)}
    whole, rest = (two.run(2, partial(cases.fit, **options)) for _ in range(2))
    assert_shared_out(whole)
    for begun, resumed in zip(whole, rest, strict=True):
        assert begun["kind"] == "DataLoader"
        assert begun["path"].startswith("gathered")
        assert begun["seen"][cases.SAVED :] == resumed["seen"]
        assert_same_bits(begun["weights"], resumed["weights"])


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_guides_loops_in_fabric_train_as_fabrics_own(two, precision, count):
    expected, found = (
        two.run(count, partial(cases.run_fabric, precision, ours=ours)) for ours in (False, True)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_but_for_rounding(ours, theirs)
    if count == 1:
        n = cases.ROWS // cases.BATCH
        rows = [each.tolist() for each in found[0][:n]]
        by_hand = cases.train_by_hand(rows, precision, overflow=False)
        assert_same_bits(found[0][n:], by_hand)
