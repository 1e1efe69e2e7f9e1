"""Images augmented while they are gathered: as the oracle says, whoever makes the samples."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from support.loading import Rows, assert_same
from support.pictures import augmented
from torch.utils.data import DataLoader, Subset, default_collate

import fastamp
from fastamp import Cutout, RandomCrop, RandomHorizontalFlip
from fastamp.data.columns import Column, make_gatherer
from fastamp.data.sample_rng import SampleRng, current

GUARD = 0xA5
DTYPES = [torch.uint8, torch.float32, torch.bfloat16, torch.int16, torch.float64, torch.complex64]
DTYPES += [np.uint8, np.float16, np.uint32, np.int64, np.complex128, np.bool_]
KEYS = [0, -1, 2**63 - 1, -(2**63)]
CIFAR = [RandomCrop(padding=4), RandomHorizontalFlip(), Cutout(8)]


def make_images(rng, dtype, *shape):
    """Return small whole numbers, which every dtype holds, also where a row does not end."""
    values = rng.integers(0, 2 if dtype is np.bool_ else 100, (*shape[:-1], shape[-1]))
    if isinstance(dtype, torch.dtype):
        return torch.from_numpy(values).to(dtype)
    memory = bytearray(1 + values.size * np.dtype(dtype).itemsize)  # at an odd address
    array = np.frombuffer(memory, dtype, offset=1).reshape(shape)
    array[...] = values
    return array


def draw_augmentations(rng, height, width):
    """Return random augmentations of images of a size, and the same for the oracle."""
    ours, steps = [], []
    for _ in range(rng.integers(1, 9)):
        kind = rng.integers(3)
        if kind == 0:
            padding = int(rng.integers(0, rng.choice([1, 5, 20])))
            size = [int(rng.integers(1, side + 2 * padding + 1)) for side in (height, width)]
            if rng.random() < 0.5:
                ours.append(RandomCrop(None, padding))
            else:
                ours.append(RandomCrop(size, padding))
                height, width = size
            steps.append(("crop", (height, width), padding))
        elif kind == 1:
            p = float(rng.choice([0, 0.3, 1]))
            ours.append(RandomHorizontalFlip(p))
            steps.append(("flip", p))
        else:
            size = rng.integers(1, rng.choice([2, 9, 60]), 2).tolist()
            ours.append(Cutout(size))
            steps.append(("cutout", *size))
    return ours, steps


def expected_rows(array, rows, keys, steps):
    """Return what the oracle makes of the rows: every leading dimension is one of planes."""
    found = []
    for row, key in zip(rows, keys, strict=True):
        image = np.asarray(torch.as_tensor(array[row]).to(torch.complex128).real.to(torch.int64))
        result = augmented(image.reshape(-1, *image.shape[-2:]), key % 2**64, steps)
        found.append(result.reshape(*image.shape[:-2], *result.shape[1:]))
    return np.stack(found)


def check_case(seed):
    """Augment random images of a random shape, gathered and item by item."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    height, width = rng.integers(1, rng.choice([4, 40], 2) + 1).tolist()
    channels, size = int(rng.integers(1, 5)), (height, width)
    shape = [size, (channels, *size), (2, channels, *size)][rng.integers(3)]
    if len(shape) > 2 and width in (1, 3, 4) and width < min(shape[-3:-1]):
        shape = size  # refused, since they look like images with their channels last
    array = make_images(rng, dtype, 9, *shape)
    ours, steps = draw_augmentations(rng, height, width)
    dataset = fastamp.ArrayDataset(array, augment=ours)
    rows = [*rng.integers(-9, 9, 9).tolist(), 3, 3, 3, 3]
    keys = [*rng.integers(-(2**63), 2**63, 9).tolist(), *KEYS]
    expected = expected_rows(array, rows, keys, steps)

    own = torch.as_tensor(array[0]).dtype
    column = Column(array, own, *dataset.images())
    assert (len(rows), *column.row_shape) == expected.shape
    nbytes = expected.size * own.itemsize
    memory = torch.full((256 + nbytes,), GUARD, dtype=torch.uint8)
    output = memory[128 : 128 + nbytes].view(own).view(expected.shape)
    gatherer = make_gatherer([column], 1)
    gatherer.submit(torch.tensor(rows), [output], torch.tensor(keys))
    gatherer.wait()
    found = output.to(torch.complex128).real.to(torch.int64).numpy()
    np.testing.assert_array_equal(found, expected, f"seed {seed}: {ours}")
    assert (memory[:128] == GUARD).all()
    assert (memory[128 + nbytes :] == GUARD).all()
    for row, key, image in zip(rows, keys, output, strict=True):
        current.sample = SampleRng(key % 2**64)
        (item,) = dataset[row]
        current.sample = None
        assert type(item) is type(array[row])
        assert_same(torch.as_tensor(item), image)


def test_images_are_augmented_as_the_oracle_says(backend):
    for seed in range(60):
        check_case(seed)


def make_dataset(length=83):
    pixels = torch.arange(length * 3 * 10 * 9).remainder(251).to(torch.uint8).view(-1, 3, 10, 9)
    augment = [RandomCrop(padding=2), RandomHorizontalFlip(), Cutout(4)]
    return fastamp.ArrayDataset(pixels, torch.arange(length), augment=augment)


def collate(samples):
    """Return what the default does; as the user's function it keeps batches from the gather."""
    return default_collate(samples)


def load(dataset, **options):
    options = {"batch_size": 8, "shuffle": True, "seed": 5} | options
    return list(fastamp.DataLoader(dataset, **options))


def samples_of(batches):
    return [[image, label] for batch in batches for image, label in zip(*batch, strict=True)]


def subset(dataset):
    return Subset(Subset(dataset, range(70)), range(9, 60))


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, subset], ids=["", "Subset"])
def test_a_sample_is_augmented_alike_whoever_makes_it(backend, wrap):
    dataset = wrap(make_dataset())
    expected = samples_of(load(dataset))
    threads = {"num_workers": 3, "worker": "thread"}
    for options in ({}, {"collate_fn": collate}, {"collate_fn": collate, **threads}):
        assert_same(samples_of(load(dataset, batch_size=5, **options)), expected)
    ranks = [samples_of(load(dataset, world_size=2, rank=rank, batch_size=4)) for rank in (0, 1)]
    dealt = [sample for pair in zip(*ranks, strict=True) for sample in pair]
    for options in ({"world_size": 1}, {"world_size": 1, "collate_fn": collate}):
        assert_same(samples_of(load(dataset, rank=0, **options)), dealt[: len(dataset)])


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, subset], ids=["", "Subset"])
def test_worker_processes_augment_a_sample_alike(wrap):
    dataset = wrap(make_dataset())
    made = load(dataset, collate_fn=collate, num_workers=2, batch_size=11)
    assert_same(samples_of(made), samples_of(load(dataset)))


def test_a_stopped_pass_goes_on_to_the_bit(backend):
    dataset, random = make_dataset(), np.random.default_rng(3)
    for stop in random.integers(1, 10, 6).tolist():
        options = {"collate_fn": collate} if stop % 2 else {}
        shard = {"shard": True} if stop % 3 == 0 else {}
        loader = fastamp.DataLoader(dataset, 8, shuffle=True, seed=5, **shard)
        expected = [*loader, *loader]
        again = fastamp.DataLoader(dataset, 8, shuffle=True, seed=5, **shard)
        batches = iter(again)
        for batch in expected[:stop]:
            assert_same(next(batches), batch)
        state = json.loads(json.dumps(again.state_dict()))
        resumed = fastamp.DataLoader(dataset, 8, shuffle=True, seed=5, **shard, **options)
        resumed.load_state_dict(state)
        assert_same([*resumed, *resumed], expected[stop:])


def test_every_epoch_and_every_draw_of_a_sample_has_another_augmentation(backend):
    dataset = make_dataset()
    loader = fastamp.DataLoader(dataset, batch_sampler=[[7, 7], [7]], seed=0)
    images = [image.numpy().tobytes() for _ in range(3) for x, _ in loader for image in x]
    assert len({*images}) == 9
    firsts = []
    for seed in (1, 1, 2):  # of the program: the loader has none
        torch.manual_seed(seed)
        firsts.append(next(iter(fastamp.DataLoader(dataset, 8)))[0])
    assert torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[0], firsts[2])


def test_two_views_of_an_image_differ_and_the_first_is_the_gathered_one(backend):
    dataset = make_dataset()
    views = Rows(len(dataset), lambda index: (*dataset[index], dataset[index][0]))
    for (first, labels, second), expected in zip(load(views), load(dataset), strict=True):
        assert_same([first, labels], expected)
        assert not any(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_without_a_loader_of_ours_torch_seeds_the_augmentation(backend):
    dataset = make_dataset()
    for make in (lambda: dataset[3], lambda: list(DataLoader(dataset, 4))):
        found = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            found.append(make())
        assert_same(found[1], found[0])
        with pytest.raises(AssertionError):
            assert_same(found[2], found[0])
    assert_same(load(pickle.loads(pickle.dumps(dataset))), load(dataset))
    with pytest.raises(IndexError):
        dataset[83]
    with pytest.raises(TypeError, match="slice"):
        dataset[1:3]


def test_the_rest_of_a_pass_is_the_same_in_other_memory(backend):
    dataset = make_dataset()
    expected, loader = load(dataset), fastamp.DataLoader(dataset, 8, shuffle=True, seed=5)
    batches = iter(loader)
    found = [next(batches), next(batches)]
    dataset.arrays[0].set_(dataset.arrays[0].clone())
    assert_same([*found, *batches], expected)


def test_the_first_array_of_a_dict_is_augmented(backend):
    images, label = make_dataset().arrays
    arrays = {"image": images, "others": [label, {"raw": images.numpy()}]}
    dataset = fastamp.ArrayDataset(arrays, augment=CIFAR)
    expected = load(fastamp.ArrayDataset(images, label, augment=CIFAR))
    for options in ({}, {"collate_fn": collate}):
        found = load(dataset, **options)
        assert_same([[b["image"], b["others"][0]] for b in found], expected)
        raws = [batch["others"][1]["raw"] for batch in found]
        assert_same(raws, [images[rows] for _, rows in expected])


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def test_offsets_flips_and_holes_are_uniform():
    """The bounds leave out one of a million seeds; this one stays."""
    count = 20_000
    ids = torch.arange(144, dtype=torch.uint8).view(12, 12).expand(count, 12, 12)

    def load_all(*augment):
        dataset = fastamp.ArrayDataset(ids, augment=augment)
        ((images,),) = load(dataset, batch_size=count)
        return images.long()

    images = load_all(RandomCrop(padding=4), RandomHorizontalFlip())
    flipped = images[:, 6, 6] < images[:, 6, 5]
    place = torch.where(flipped, images[:, 6, 5], images[:, 6, 6])
    y, x = place // 12 - 2, place % 12 - 2
    counts = torch.bincount((y * 9 + x) * 2 + flipped, minlength=162)
    assert len(counts) == 162
    assert 80 < chi_square(counts, count / 162) < 260
    neighbours = torch.bincount(x[:-1] * 9 + x[1:], minlength=81)
    assert 30 < chi_square(neighbours, (count - 1) / 81) < 155
    flips = (load_all(RandomHorizontalFlip(0.1))[:, 0, 0] > 0).float().mean()
    assert abs(float(flips) - 0.1) < 5 * (0.09 / count) ** 0.5
    ids = ids + 1
    holes = load_all(Cutout(1)).flatten(1).argmin(1)
    assert 70 < chi_square(torch.bincount(holes, minlength=144), count / 144) < 240


IMAGES = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
NUMBER = "size: expected an integer of at least 1, got "
WRONG = {
    NUMBER + "0": lambda: RandomCrop(0),
    NUMBER + "2.5": lambda: Cutout(2.5),
    "size: expected a number, or height and width, got (1, 2, 3)": lambda: Cutout((1, 2, 3)),
    "padding: expected an integer of at least 0, got -1": lambda: RandomCrop(3, -1),
    "p: expected a number from 0 to 1, got nan": lambda: RandomHorizontalFlip(float("nan")),
    "augment[1].size: (40, 9) does not fit into the padded images, (34, 34)": lambda: make(
        [Cutout(1), RandomCrop((40, 9), 1)]
    ),
    "augment: expected at most 8 augmentations, got 9": lambda: make([RandomCrop()] * 9),
    "augment: expected a list of augmentations, got Cutout(size=(1, 1))": lambda: make(Cutout(1)),
    "augment[0]: expected RandomCrop, RandomHorizontalFlip or Cutout of fastamp, got 3": lambda: (
        make([3])
    ),
    "np.ascontiguousarray(images.transpose(0, 3, 1, 2))": lambda: make(
        CIFAR, torch.zeros(2, 32, 32, 3)
    ),
    "got (4, 5)": lambda: make(CIFAR, torch.zeros(4, 5)),
    "to augment, got torch.float32, which requires grad": lambda: make(
        CIFAR, torch.zeros(4, 3, 3, requires_grad=True)
    ),
    "augment: expected plain numbers on the CPU to augment, got >i4": lambda: make(
        CIFAR, np.zeros((4, 3, 3), ">i4")
    ),
    "augment: expected plain numbers on the CPU to augment, got list": lambda: make(
        CIFAR, [torch.zeros(4, 3, 3)]
    ),
}


def make(augment, images=IMAGES):
    return fastamp.ArrayDataset(images, augment=augment)


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named(message):
    with pytest.raises((TypeError, ValueError)) as info:
        WRONG[message]()
    assert str(info.value).endswith(message)
