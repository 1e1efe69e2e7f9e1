"""The race over photographs: its arms give the same images, and the files are like photographs."""

from __future__ import annotations

import argparse

import pytest
import torch

from fastamp.bench import photos
from fastamp.bench.record import PLAIN

Image = pytest.importorskip("PIL.Image")


def test_its_arms_are_compared_before_they_are_timed(monkeypatch):
    monkeypatch.setattr(photos, "COUNT", 3)
    monkeypatch.setattr(photos, "WORKERS", (0,))
    case = photos.make_case(argparse.Namespace(seed=0))
    assert list(case.arms) == ["torch, 0 workers", PLAIN, "fastamp"]
    for arm in case.arms.values():
        arm()


def test_batches_that_are_missing_or_others_are_refused():
    batch = [torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])]
    photos.check([batch], [batch])
    with pytest.raises(ValueError, match="argument 2 is longer"):
        photos.check([], [batch])
    white = torch.full_like(batch[0], 255)
    with pytest.raises(AssertionError, match=r"the images differ by 255\.0 of 255"):
        photos.check([[white, batch[1]]], [batch])
    with pytest.raises(AssertionError, match="not equal"):
        photos.check([[batch[0], batch[1] + 1]], [batch])


def test_its_files_are_as_large_as_photographs(tmp_path):
    photos.write_photos(tmp_path, 3, 0)
    files = sorted(tmp_path.glob("*/*.jpg"))
    assert len({path.read_bytes() for path in files}) == 3
    for path in files:
        assert 35_000 < path.stat().st_size < 65_000
        with Image.open(path) as image:
            assert image.size == (500, 375)
