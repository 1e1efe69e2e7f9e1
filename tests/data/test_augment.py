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
from fastamp.data.columns import Column
from fastamp.data.host import make_gatherer
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


def draw_augmentations(rng, height, width, channels):
    """Return random augmentations of images of a size, and the same for the oracle."""
    ours, steps = [], []
    for _ in range(rng.integers(1, 9)):
        fills = rng.integers(0, 2, channels).tolist()
        fill = rng.choice([0, 1]) if rng.random() < 0.5 else tuple(fills)
        fills = fills if isinstance(fill, tuple) else [int(fill)] * channels
        kind = rng.integers(3)
        if kind == 0:
            left, top, right, bottom = padding = rng.integers(0, rng.choice([1, 5, 20]), 4).tolist()
            most = height + top + bottom, width + left + right
            size = [int(rng.integers(1, side + 1)) for side in most]
            if rng.random() < 0.5 and height <= most[0] and width <= most[1]:
                ours.append(RandomCrop(None, padding, fill=fill))
            else:
                ours.append(RandomCrop(size, padding, fill=fill))
                height, width = size
            steps.append(("crop", (height, width), padding, fills))
        elif kind == 1:
            p = float(rng.choice([0, 0.3, 1]))
            ours.append(RandomHorizontalFlip(p))
            steps.append(("flip", p))
        else:
            size = rng.integers(1, rng.choice([2, 9, 60]), 2).tolist()
            ours.append(Cutout(size, fill=fill))
            steps.append(("cutout", *size, fills))
    return ours, steps


def expected_rows(array, rows, keys, steps, *, channels_last):
    """Return what the oracle makes of the rows: every leading dimension is one of planes."""
    found = []
    for row, key in zip(rows, keys, strict=True):
        image = np.asarray(torch.as_tensor(array[row]).to(torch.complex128).real.to(torch.int64))
        planes = np.moveaxis(image, -1, -3) if channels_last else image
        lead, steps_of_planes = planes.shape[:-2], []
        planes = planes.reshape(-1, *planes.shape[-2:])
        for step in steps:
            fills = step[-1] * (len(planes) // len(step[-1])) if step[0] != "flip" else None
            steps_of_planes.append(step if fills is None else (*step[:-1], fills))
        result = augmented(planes, key % 2**64, steps_of_planes)
        result = result.reshape(*lead, *result.shape[1:])
        found.append(np.moveaxis(result, -3, -1) if channels_last else result)
    return np.stack(found)


def check_case(seed):
    """Augment random images of a random shape, gathered and item by item."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    height, width = rng.integers(1, rng.choice([4, 40], 2) + 1).tolist()
    channels, layout = int(rng.integers(1, 5)), rng.integers(4)
    channels = channels if layout else 1
    size = (height, width)
    shape = [size, (channels, *size), (2, channels, *size), (*size, channels)][layout]
    array = make_images(rng, dtype, 9, *shape)
    ours, steps = draw_augmentations(rng, height, width, channels)
    last = bool(layout == 3)
    dataset = fastamp.ArrayDataset(array, augment=ours, channels_last=last)
    rows = [*rng.integers(-9, 9, 9).tolist(), 3, 3, 3, 3]
    keys = [*rng.integers(-(2**63), 2**63, 9).tolist(), *KEYS]
    expected = expected_rows(array, rows, keys, steps, channels_last=last)

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


def make_dataset(length=83, **options):
    pixels = torch.arange(length * 3 * 10 * 9).remainder(251).to(torch.uint8).view(-1, 3, 10, 9)
    augment = [RandomCrop(padding=2, fill=255), RandomHorizontalFlip(), Cutout(4, fill=(0, 1, 2))]
    return fastamp.ArrayDataset(pixels, torch.arange(length), augment=augment, **options)


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


def test_a_mask_is_augmented_like_its_image(backend):
    ids = 200 * torch.arange(50)[:, None, None] + torch.arange(1, 121).view(12, 10)
    steps = [RandomCrop(8, 1), RandomHorizontalFlip(), Cutout(3)]
    masks = [RandomCrop((8, 8), (1, 1, 1, 1), fill=-1), RandomHorizontalFlip(), Cutout(3, fill=-2)]
    arrays = {
        "label": {"x": ids, "y": [ids]},
        "mask": ids.int(),
        "image": ids[:, None].short().numpy(),
    }
    dataset = fastamp.ArrayDataset(arrays, augment={"image": steps, "mask": masks})
    (batch,) = load(dataset, batch_size=50)
    image, mask = batch["image"][:, 0].int(), batch["mask"]
    assert image.shape == mask.shape == (50, 8, 8)
    assert torch.equal(torch.where(mask < 0, 0, mask), image)
    assert {-1, -2} < {*mask.unique().tolist()}
    assert_same(load(dataset, batch_size=50, collate_fn=collate), [batch])
    rows = batch["label"]["x"][:, 0, 0] // 200
    assert torch.equal(batch["label"]["y"][0], ids[rows.long()])


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
    holes = load_all(Cutout(1, fill=255)).flatten(1).argmax(1)
    assert 70 < chi_square(torch.bincount(holes, minlength=144), count / 144) < 240
    flips = (load_all(RandomHorizontalFlip(0.1))[:, 0, 0] > 0).float().mean()
    assert abs(float(flips) - 0.1) < 5 * (0.09 / count) ** 0.5


IMAGES = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
WRONG = {
    "size: expected an integer of at least 1, or 2 of them, got 0": lambda: RandomCrop(0),
    "size: expected an integer of at least 1, or 2 of them, got (1, 2, 3)": lambda: Cutout(
        (1, 2, 3)
    ),
    "size: expected an integer of at least 1, or 2 of them, got 2.5": lambda: Cutout(2.5),
    "padding: expected an integer of at least 0, or 2 or 4 of them, got -1": lambda: RandomCrop(
        3, -1
    ),
    "fill: expected a number, or one for each channel, got 'red'": lambda: Cutout(1, fill="red"),
    "p: expected a number from 0 to 1, got nan": lambda: RandomHorizontalFlip(float("nan")),
    "augment[1].size: (40, 9) does not fit into the padded images, (34, 34)": lambda: make(
        [Cutout(1), RandomCrop((40, 9), 1)]
    ),
    "augment[0].fill: expected a number, or one for each of 3 channels, got (1, 2)": lambda: make(
        [Cutout(1, fill=(1, 2))]
    ),
    "augment[0].fill: expected what torch.uint8 can hold, got 0.5": lambda: make(
        [Cutout(1, fill=0.5)]
    ),
    "augment[0].fill: expected what torch.uint8 can hold, got 300": lambda: make(
        [RandomCrop(fill=300)]
    ),
    "augment: expected at most 8 augmentations, got 9": lambda: make([RandomCrop()] * 9),
    "augment: expected a list of augmentations, got Cutout(size=(1, 1), fill=0)": lambda: make(
        Cutout(1)
    ),
    "augment[0]: expected RandomCrop, RandomHorizontalFlip or Cutout of fastamp, got 3": lambda: (
        make([3])
    ),
    "augment['x']: there is no such array, only 0": lambda: make({"x": []}),
    "augment[0][0].size: (33, 33) does not fit into the padded images, (32, 32)": lambda: make(
        {0: [RandomCrop(33)]}
    ),
    "channels_last: expected True or False for images of shape (32, 32, 3), got None": lambda: make(
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
