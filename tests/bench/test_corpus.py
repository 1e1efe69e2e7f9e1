"""The text to train on: which files are read, what is held out, how batches are drawn."""

from __future__ import annotations

import argparse
import os

import pytest
import torch

from fastamp.bench import text

SIZES = (16, 24)  # of a window, of a batch


@pytest.fixture
def corpus(tmp_path):
    """Return a text whose validation part holds bytes of its own."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)) * 90 + bytes(range(100, 200)) * 10)
    return text.load_corpus(str(path), block_size=16)


def test_files_are_joined_in_the_order_of_their_paths_and_the_tail_is_held_out(tmp_path):
    for name, letter in {"b/a": b"3", "a/z": b"2", "a.txt": b"1", "c": b"4"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(letter * 100)
    corpus = text.load_corpus(str(tmp_path), block_size=4)
    assert bytes(corpus.train) == b"1" * 100 + b"2" * 100 + b"3" * 100 + b"4" * 60
    assert bytes(corpus.validation) == b"4" * 40


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_bytes(b"1" * 100)
    scan = os.scandir

    def refuse(folder):
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(argparse.ArgumentError, match="closed' cannot be read: Permission denied"):
        text.load_corpus(str(tmp_path), block_size=4)


def test_a_link_to_itself_is_refused(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(argparse.ArgumentError, match="loop' cannot be read: Too many levels"):
        text.load_corpus(str(loop), block_size=4)


def test_the_standard_library_is_read_without_third_party_code_and_tests(tmp_path, monkeypatch):
    for name in ("os.py", "json/scanner.py", "site-packages/torch.py", "test/test_os.py", "os.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name[:1].encode() * 100)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path))
    corpus = text.load_corpus(None, block_size=4)
    assert bytes(corpus.train) + bytes(corpus.validation) == b"j" * 100 + b"o" * 100


def test_no_validation_byte_is_ever_trained_on(corpus):
    draws = text.training_batches(corpus.train, *SIZES)
    seen = torch.cat([torch.cat(next(draws)).flatten() for _ in range(120)])
    spread = text.validation_batches(corpus.validation, *SIZES, 64)
    held = [torch.cat(batch).flatten() for batch in spread]
    assert seen.max() == 99
    assert torch.cat(held).min() == 100
    assert [batch.numel() // 32 for batch in held] == [24, 24, 16]


def test_a_batch_asks_for_the_next_byte_and_depends_on_the_seed_alone(corpus):
    def draw(seed):
        return next(text.training_batches(corpus.train, *SIZES, seed))

    tokens, targets = draw(0)
    assert torch.equal(targets, (tokens + 1) % 100)
    assert torch.equal(tokens, draw(0)[0])
    assert not torch.equal(tokens, draw(1)[0])
