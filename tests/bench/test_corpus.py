"""The text to train on: which files are read, what is held out, how batches are drawn."""

from __future__ import annotations

import argparse
import os

import pytest
import torch

from fastamp.bench import text
from fastamp.bench.gpt import Shape
from fastamp.bench.jobs import language

SHAPE = Shape(layers=1, heads=1, width=16, block_size=16)


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


def test_no_validation_byte_is_ever_trained_on_and_all_windows_are_scored_once(corpus):
    model, data, _, options = language.make_model(0, SHAPE, 24, corpus)
    seen = torch.cat([torch.cat(data[window]) for window in range(len(data))])
    assert seen.max() == 99
    assert options["batch_size"] == 24
    held = []
    model.register_forward_hook(lambda _model, args, _out: held.append(args[0]))
    with torch.no_grad():
        scored = options["evaluate"](model)
    assert torch.cat(held).min() == 100
    assert sum(map(len, held)) == len(scored["accuracy"]) == 62  # of 1,000 bytes, at most 64
