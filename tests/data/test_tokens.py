"""Datasets of tokens: windows of files and arrays, in order or at random places."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from support.gathering import gather
from support.loading import assert_same, make_array
from torch.utils.data import Subset, default_collate

import fastamp
from fastamp.data.sample_rng import find_pass_key, mix

DTYPES = ["u1", "u2", "u4", "i4", "i8"]


def windows_of(tokens, size):
    """Return x and y of all windows that do not overlap."""
    end = (len(tokens) - 1) // size * size
    parts = (tokens[:end], tokens[1 : end + 1])
    return [torch.from_numpy(part.astype("i8")).view(-1, size) for part in parts]


def scatter(tokens, lengths, folder):
    """Return sources of the tokens, end to end: raw files, .npy files, arrays and tensors."""
    sources = []
    for number, part in enumerate(np.split(tokens, np.cumsum(lengths))):
        raw, saved = (folder / f"{len(lengths)} {number}.{kind}" for kind in ("bin", "npy"))
        raw.write_bytes(part.tobytes())
        np.save(saved, part)
        sources.append((raw, saved, part, torch.from_numpy(part))[number % 4])
    return sources


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lengths", [[], [200], [100, 0, 1, 1, 150, 7, 0, 240], [40] * 12], ids=["one", "two", "9", "13"]
)
def test_several_sources_are_one_sequence(dtype, lengths, tmp_path):
    tokens = make_array(dtype, 501)
    dataset = fastamp.TokenDataset(scatter(tokens, lengths, tmp_path), 16, dtype)
    x, y = windows_of(tokens, 16)
    assert len(dataset) == len(x) == 31
    assert_same(dataset[-1], (x[-1], y[-1]))
    assert_same([*zip(*dataset, strict=True)], [tuple(x), tuple(y)])
    order = torch.randperm(31, generator=torch.Generator().manual_seed(3))
    loader = fastamp.DataLoader(dataset, 7, shuffle=True, seed=3)
    assert_same(list(loader), [[x[rows], y[rows]] for rows in order.split(7)])
    columns = dataset.columns()
    if lengths:
        assert columns == f"the tokens lie in {sum(map(bool, split_lengths(lengths)))} parts"
    else:
        assert_same(gather(columns, order), [x[order], y[order]])


def split_lengths(lengths):
    """Return the lengths that np.split makes of 501 tokens cut at the sums."""
    ends = np.minimum([*np.cumsum(lengths), 501], 501)
    return np.diff([0, *ends])


def test_the_windows_of_a_mapped_file_are_gathered_out_of_it(tmp_path):
    """Without a copy, at random places too, and at odd addresses after a header of 3 bytes."""
    tokens = make_array("u4", 91)
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"\xff" * 3 + tokens.tobytes())
    dataset = fastamp.TokenDataset(path, 8, np.uint32, header=3)
    assert_same(gather(dataset.columns(), range(11)), windows_of(tokens, 8))
    drawn = fastamp.TokenDataset(path, 8, np.uint32, header=3, random_offsets=True)
    columns, keys = drawn.columns(), np.arange(5, dtype=np.uint64)
    starts = columns.starts(keys)
    expected = [tokens[start:][:9].astype("i8") for start in starts.tolist()]
    x, y = gather(columns, [0, 1, 2, 3, 4], keys)
    assert torch.cat([x, y[:, -1:]], 1).tolist() == np.stack(expected).tolist()
    storage = columns.arrays[0].untyped_storage()
    assert storage.nbytes() == tokens.nbytes
    assert [array.untyped_storage().data_ptr() for array in columns.arrays] == [
        storage.data_ptr()
    ] * 2


def test_the_header_of_every_raw_file_is_skipped(tmp_path):
    tokens = make_array("u4", 90)
    for header in (1024, 3):
        paths = [tmp_path / name for name in ("a", "b", "c")]
        for path, part in zip(paths, np.split(tokens, [30, 30]), strict=True):
            path.write_bytes(b"\xff" * header + part.tobytes())
        dataset = fastamp.TokenDataset(paths, 8, np.uint32, header)
        assert_same([*fastamp.DataLoader(dataset, 11)], [windows_of(tokens, 8)])


def random_windows(tokens, size, seed, epoch, places):
    """Return x and y of the samples at places of an epoch, as the documentation says."""
    key = find_pass_key(seed, epoch)
    starts = [mix(key ^ place) % (len(tokens) - size) for place in places]
    parts = [[tokens[start + shift :][:size] for start in starts] for shift in (0, 1)]
    return [torch.from_numpy(np.array(part).astype("i8")) for part in parts]


def same_collate(batch):
    return default_collate(batch)


@pytest.mark.parametrize("lengths", [[], [200, 0, 1, 150, 7]], ids=["one", "several"])
def test_windows_at_random_offsets_are_those_of_their_places(lengths, tmp_path):
    """However they are made; an epoch that is sharded and padded has places beyond its length."""
    tokens = make_array("u2", 501)
    dataset = fastamp.TokenDataset(scatter(tokens, lengths, tmp_path), 16, random_offsets=True)
    assert len(dataset) == 31
    ways = (
        {},
        {"shuffle": True},
        {"collate_fn": same_collate},
        {"num_workers": 2, "collate_fn": same_collate},
        {"num_workers": 2, "worker": "thread", "collate_fn": same_collate},
        {"dataset": Subset(dataset, range(30, -1, -1))},
        {"dataset": Subset(dataset, range(30, -1, -1)), "collate_fn": same_collate},
        {"batch_size": None},
        *({"rank": rank, "world_size": 3, "shuffle": True} for rank in range(3)),
    )
    for way in ways:
        loader = fastamp.DataLoader(**{"dataset": dataset, "batch_size": 4, "seed": 7, **way})
        places = [*range(way.get("rank", 0), 33 if "rank" in way else 31, way.get("world_size", 1))]
        for epoch in range(2):
            parts = zip(*loader, strict=True)
            found = [torch.cat([part.view(-1, 16) for part in column]) for column in parts]
            assert_same(found, random_windows(tokens, 16, 7, epoch, places))


def test_offsets_reach_the_last_window_and_an_item_alone_draws_by_torchs_seed():
    dataset = fastamp.TokenDataset(np.arange(72), 8, random_offsets=True)
    loader = fastamp.DataLoader(dataset, 8, seed=0)
    starts = torch.cat([x[:, 0] for _ in range(100) for x, _ in loader])
    assert sorted({*starts.tolist()}) == [*range(64)]
    torch.manual_seed(3)
    first = [dataset[0], dataset[0]]
    torch.manual_seed(3)
    assert_same([dataset[5], dataset[-1]], first)
    with pytest.raises(AssertionError):
        assert_same(*first)


def test_an_index_out_of_bounds_is_named_at_random_offsets():
    dataset = fastamp.TokenDataset(np.arange(72), 8, random_offsets=True)
    for bad in (8, -9):
        for index in (
            dataset.__getitem__,
            lambda i: list(fastamp.DataLoader(dataset, sampler=[i])),
        ):
            with pytest.raises(IndexError, match=f"index {bad} is out of bounds .* size 8"):
                index(bad)


def test_tokens_that_do_not_fit_are_refused_by_name(tmp_path):
    raw, saved = tmp_path / "t.bin", tmp_path / "t.npy"
    raw.write_bytes(b"\1" * 9)
    damaged = tmp_path / "damaged.npy"
    damaged.write_bytes(b"x" * 80)
    tokens = np.arange(9, dtype="u2")
    np.save(saved, tokens)
    for name in ("block_size", "header"):
        for bad in (-1, 2.0, "2", True):
            with pytest.raises(ValueError, match=f"{name}: expected an integer of .* got {bad!r}"):
                fastamp.TokenDataset(raw, **{"block_size": 2, name: bad})
    for sources, options, message in (
        (raw, {}, r"path_or_array\[0\]: .*t.bin cannot be read: .* not a multiple"),
        *((raw, {"header": n}, f"t.bin .*: header={n}: .* file's 9 bytes") for n in (10, 11, 9999)),
        (saved, {"header": 4}, "header=4: expected 0 for all but raw tokens"),
        ([raw, tokens], {"header": 1}, "header=1: expected 0 for all but"),
        *((tokens, {"dtype": d}, "^dtype: expected uint8, .* got dtype") for d in ("f4", ">u2")),
        ([tokens, np.zeros((3, 3), "u2")], {}, r"array\[1\]: expected one dimension .* \(3, 3\)"),
        ([tokens, np.zeros(9, "u4")], {}, r"\[1\]: expected one dimension of uint16 .* of uint32"),
        ([tokens, saved], {"dtype": "i4"}, r"\[0\]: expected one dimension of int32 .* of uint16"),
        (tokens.astype("f4"), {}, "expected one dimension of uint8, uint16, .* of float32"),
        (tokens.astype(">u2"), {}, "in this machine's byte order, got .* of >u2"),
        (torch.zeros(9, device="meta"), {}, "meta"),
        ([tokens[:1], tokens[:1]], {}, "block_size=2: 2 tokens are too few for one window"),
        ([saved, damaged], {}, r"\[1\]: .*damaged.npy cannot be read: the magic string"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            fastamp.TokenDataset(sources, 2, **options)
    for missing in ("missing.bin", "missing.npy"):
        with pytest.raises(FileNotFoundError, match="missing"):
            fastamp.TokenDataset([raw, tmp_path / missing], 2, "u1")
    with pytest.raises(TypeError, match="'no dtype'"):
        fastamp.TokenDataset(raw, 2, "no dtype")


def test_token_files_travel_as_their_paths_to_any_folder(tmp_path, monkeypatch):
    make_array("u2", 99).tofile(tmp_path / "tokens.bin")
    for source in ("tokens.bin", ["tokens.bin", tmp_path / "tokens.bin"]):
        monkeypatch.chdir(tmp_path)
        dataset = fastamp.TokenDataset(source, 4, "u2", header=20, random_offsets=True)
        assert len(pickle.dumps(dataset)) < 500
        monkeypatch.chdir("/")
        copied = pickle.loads(pickle.dumps(dataset))
        assert len(copied) == len(dataset)
        drawn = [torch.manual_seed(0) and one[-1] for one in (copied, dataset)]
        assert_same(*drawn)


@pytest.mark.parametrize("several", [False, True])
def test_tokens_with_strides_are_read_as_they_are_indexed(several):
    tokens = np.arange(600, dtype=np.int32)
    views = [tokens[::-1], tokens.reshape(200, 3)[:, 1], np.broadcast_to(tokens[7], 99)]
    for view in [*views, torch.from_numpy(tokens)[::2]]:
        expected = windows_of(np.asarray(view), 5)
        dataset = fastamp.TokenDataset([view] if several else view, 5)
        assert_same([*fastamp.DataLoader(dataset, len(dataset))], [expected])
        assert_same([*dataset[2]], [part[2] for part in expected])


def test_a_dataset_of_a_tensor_of_16_bits_travels():
    dataset = fastamp.TokenDataset(torch.arange(100).to(torch.uint16), 5)
    assert_same([*pickle.loads(pickle.dumps(dataset))[3]], [*dataset[3]])
