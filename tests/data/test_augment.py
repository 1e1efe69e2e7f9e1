"""Images augmented by torch's operators: as the oracle draws them, alone and in any batch."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from support.gathering import gather
from support.loading import Rows, assert_same
from support.pictures import augmented
from torch.utils.data import DataLoader, Subset, default_collate

import fastamp
from fastamp import RandomCrop, RandomHorizontalFlip
from fastamp.data.sample_rng import SampleRng

DTYPES = [torch.uint8, torch.float32, torch.bfloat16, torch.int16, torch.float64, torch.complex64]
DTYPES += [np.uint8, np.float16, np.uint32, np.int64, np.complex128, np.bool_]
KEYS = [0, 2**64 - 1, 2**63 - 1, 2**63]
CIFAR = [RandomCrop(padding=4), RandomHorizontalFlip()]


def make_images(rng, dtype, *shape):
    """Return small whole numbers, which every dtype holds."""
    values = rng.integers(0, 2 if dtype is np.bool_ else 100, shape)
    if isinstance(dtype, torch.dtype):
        return torch.from_numpy(values).to(dtype)
    memory = bytearray(1 + values.size * np.dtype(dtype).itemsize)  # at an odd address
    array = np.frombuffer(memory, dtype, offset=1).reshape(shape)
    array[...] = values
    return array


def draw_augmentations(rng, height, width):
    """Return random augmentations of images of a size, and the same for the oracle."""
    ours, steps = [], []
    for _ in range(rng.integers(1, 6)):
        if rng.random() < 0.5:
            p = float(rng.choice([0, 0.3, 1]))
            ours.append(RandomHorizontalFlip(p))
            steps.append(("flip", p))
            continue
        padding = int(rng.integers(0, rng.choice([1, 5, 20])))
        size = [int(rng.integers(1, side + 2 * padding + 1)) for side in (height, width)]
        if rng.random() < 0.5:
            ours.append(RandomCrop(None, padding))
        else:
            ours.append(RandomCrop(size, padding))
            height, width = size
        steps.append(("crop", (height, width), padding))
    return ours, steps


def as_integers(images):
    return torch.as_tensor(images).to(torch.complex128).real.to(torch.int64).numpy()


def expected_rows(array, rows, keys, steps):
    """Return what the oracle makes of the rows: every leading dimension is one of planes."""
    found = []
    for row, key in zip(rows, keys, strict=True):
        image = as_integers(array[row])
        result = augmented(image.reshape(-1, *image.shape[-2:]), key, steps)
        found.append(result.reshape(*image.shape[:-2], *result.shape[1:]))
    return np.stack(found)


@pytest.mark.parametrize("seed", range(36))
def test_images_are_augmented_as_the_oracle_says(seed, monkeypatch):
    """Gathered and item by item, of any dtype and shape."""
    rng = np.random.default_rng(seed)
    height, width = size = rng.integers(1, rng.choice([4, 40], 2) + 1).tolist()
    channels = int(rng.integers(1, 5))
    shape = [size, (channels, *size), (2, channels, *size)][rng.integers(3)]
    if len(shape) > 2 and width in (1, 3, 4) and width < min(shape[-3:-1]):
        shape = size  # refused, since they look like images with their channels last
    array = make_images(rng, DTYPES[seed % len(DTYPES)], 9, *shape)
    ours, steps = draw_augmentations(rng, height, width)
    dataset = fastamp.ArrayDataset(array, augment=ours)
    rows = [*rng.integers(0, 9, 9).tolist(), 3, 3, 3, 3]
    keys = [*rng.integers(2**64, size=9, dtype=np.uint64).tolist(), *KEYS]
    (batch,) = gather(dataset.columns(), rows, keys)
    assert batch.dtype == torch.as_tensor(array[0]).dtype
    np.testing.assert_array_equal(as_integers(batch), expected_rows(array, rows, keys, steps))
    for row, key, image in zip(rows, keys, batch, strict=True):
        monkeypatch.setattr("fastamp.data.datasets.sample_rng", lambda key=key: SampleRng(key))
        (item,) = dataset[row]
        assert type(item) is type(array[row])
        assert_same(torch.as_tensor(item), image)


@pytest.mark.cuda
def test_images_on_a_gpu_are_augmented_there(device):
    images = torch.arange(83 * 3 * 10 * 9).remainder(251).to(torch.uint8).view(-1, 3, 10, 9)
    keys = np.arange(83) << 40
    (batch,) = gather(fastamp.ArrayDataset(images, augment=CIFAR).columns(), range(83), keys)
    columns = fastamp.ArrayDataset(images.to(device), augment=CIFAR).columns()
    (made,) = gather(columns, range(83), keys)
    assert made.device.type == device
    assert_same(made.cpu(), batch)


def make_dataset(length=83):
    pixels = torch.arange(length * 3 * 10 * 9).remainder(251).to(torch.uint8).view(-1, 3, 10, 9)
    augment = [RandomCrop(padding=2), RandomHorizontalFlip()]
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
def test_a_sample_is_augmented_alike_whoever_makes_it(wrap):
    dataset = wrap(make_dataset())
    expected = samples_of(load(dataset))
    workers = {"num_workers": 2, "batch_size": 11}
    for options in ({}, workers, {"worker": "thread", **workers}):
        assert_same(samples_of(load(dataset, collate_fn=collate, **options)), expected)
    ranks = [samples_of(load(dataset, world_size=2, rank=rank, batch_size=4)) for rank in (0, 1)]
    dealt = [sample for pair in zip(*ranks, strict=True) for sample in pair]
    assert_same(samples_of(load(dataset, rank=0, world_size=1)), dealt[: len(dataset)])


def test_every_epoch_and_every_draw_of_a_sample_has_another_augmentation():
    dataset = make_dataset()
    loader = fastamp.DataLoader(dataset, batch_sampler=[[7, 7], [7]], seed=0)
    images = [image.numpy().tobytes() for _ in range(3) for x, _ in loader for image in x]
    assert len({*images}) == 9
    views = Rows(len(dataset), lambda index: (*dataset[index], dataset[index][0]))
    for (first, labels, second), expected in zip(load(views), load(dataset), strict=True):
        assert_same([first, labels], expected)
        assert not any(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_without_a_loader_of_ours_torch_seeds_the_augmentation():
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


def test_the_first_array_of_a_dict_is_augmented():
    images, label = make_dataset().arrays
    arrays = {"image": images, "others": [label, {"raw": images.numpy()}]}
    keys = np.arange(50)
    image, expected = gather(make_dataset().columns(), range(50), keys)
    found = gather(
        fastamp.ArrayDataset(arrays, augment=make_dataset().augment).columns(), range(50), keys
    )
    assert_same([found["image"], found["others"][0]], [image, expected])
    assert_same(found["others"][1]["raw"], images[:50])


IMAGES = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
PLAIN = "augment: expected plain numbers of shape (N, height, width) or (N, channels, height, "
WRONG = {
    "size: expected an integer of at least 1, got 0": lambda: RandomCrop(0),
    "size: expected a number, or height and width, got (1, 2, 3)": lambda: RandomCrop((1, 2, 3)),
    "padding: expected an integer of at least 0, got -1": lambda: RandomCrop(3, -1),
    "p: expected a number from 0 to 1, got nan": lambda: RandomHorizontalFlip(float("nan")),
    "size: (40, 9) does not fit into the padded images, (34, 34)": lambda: make(
        [RandomHorizontalFlip(), RandomCrop((40, 9), 1)]
    ),
    "of fastamp, got RandomCrop(size=(1, 1), padding=0)": lambda: make(RandomCrop(1)),
    "RandomCrop or RandomHorizontalFlip of fastamp, got [3]": lambda: make([3]),
    "pass images.permute(0, 3, 1, 2).contiguous()": lambda: make(CIFAR, torch.zeros(2, 32, 32, 3)),
    PLAIN + "width), without gradient, got torch.float32 of shape (4, 5)": lambda: make(
        CIFAR, torch.zeros(4, 5)
    ),
    "torch.float32 of shape (4, 3, 3)": lambda: make(
        CIFAR, torch.zeros(4, 3, 3, requires_grad=True)
    ),
    "got >i4 of shape (4, 3, 3)": lambda: make(CIFAR, np.zeros((4, 3, 3), ">i4")),
}


def make(augment, images=IMAGES):
    return fastamp.ArrayDataset(images, augment=augment)


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named(message):
    with pytest.raises((TypeError, ValueError)) as info:
        WRONG[message]()
    assert str(info.value).endswith(message)
