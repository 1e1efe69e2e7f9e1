"""ImageFolder: torchvision's layout, Pillow's pixels, damaged files, and what draws at random."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.loading import assert_same
from torch.utils.data import DataLoader, default_collate

import fastamp
from fastamp.data import images as images_module

Image = pytest.importorskip("PIL.Image")
INSTALLED = images_module.find_module("simplejpeg")


def hide(monkeypatch, hidden):
    find = images_module.find_module
    monkeypatch.setattr(images_module, "find_module", lambda n: None if n == hidden else find(n))


@pytest.fixture(params=["Pillow", "simplejpeg"])
def decoder(request, monkeypatch):
    """Run the test once for everything that decodes JPEGs."""
    if request.param == "Pillow":
        hide(monkeypatch, "simplejpeg")
    elif INSTALLED is None:
        pytest.skip("simplejpeg is not installed")
    return request.param


def photo(width, height, seed=0, mode="RGB"):
    """Return noise of several scales, the finer the fainter, as in a photograph."""
    rng = np.random.default_rng(seed)
    mean = np.full((height, width, 3), 128.0)
    for cell, strength in ((60, 0.8), (16, 0.15), (4, 0.05)):
        noise = rng.integers(0, 256, (height // cell + 2, width // cell + 2, 3), "u1")
        layer = Image.fromarray(noise).resize((width, height), Image.BICUBIC)
        mean += (np.asarray(layer) - 128.0) * strength
    return Image.fromarray(mean.clip(0, 255).astype("u1")).convert(mode)


def encode(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write(root, files):
    """Write files by their path below a folder."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def expected(data, size, scale=1):
    """Return the image by Pillow alone: all of it decoded, the part cut out, resized.

    With a scale, the edges of the part are at multiples of it.
    """
    image = Image.open(io.BytesIO(data)).convert("RGB")
    unit = min(image.width / size[1], image.height / size[0])
    height, width = (max(1, round(length * unit)) for length in size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    edges = (left, top, left + width, top + height)
    edges = [math.floor(edge / scale + 0.5) * scale for edge in edges]
    part = image.crop([*edges[:2], min(edges[2], image.width), min(edges[3], image.height)])
    return np.array(part.resize(size[::-1], Image.BILINEAR)).transpose(2, 0, 1)


def difference(actual, wanted):
    return np.abs(actual.numpy().astype(int) - wanted)


@pytest.fixture
def folder(tmp_path):
    """Two classes of three small photos."""
    names = ("b dog/0.jpg", "b dog/1.jpg", "b dog/2.jpg", "cat/0.jpg", "cat/1.png", "cat/2.jpg")
    photos = {
        n: encode(photo(40, 30, i), "PNG" if "png" in n else "JPEG") for i, n in enumerate(names)
    }
    return write(tmp_path / "two classes", photos)


def test_the_layout_is_torchvisions(tmp_path, monkeypatch):
    data = encode(photo(8, 8))
    names = ("b/2.JPG", "b/10.jpg", "b/deep/er/x.webp", "a c/y.tif", ".hidden/z.pgm", "b/.h.png")
    root = write(tmp_path / "root", dict.fromkeys(names, data))
    write(root, {"b/note.txt": b"", "b/jpg": b"", "stray.png": data})
    write(tmp_path / "elsewhere", {"deep/q.bmp": data})
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "a c/link").symlink_to(tmp_path / "elsewhere/deep")
    (root / "a c/a.ppm").symlink_to(root / "b/10.jpg")
    dataset = fastamp.ImageFolder(str(root), 4)
    assert dataset.classes == [".hidden", "a c", "b", "linked"]
    assert dataset.class_to_idx == {".hidden": 0, "a c": 1, "b": 2, "linked": 3}
    order = (".hidden/z.pgm", "a c/a.ppm", "a c/y.tif", "a c/link/q.bmp", "b/.h.png", "b/10.jpg")
    order += ("b/2.JPG", "b/deep/er/x.webp", "linked/deep/q.bmp")
    assert dataset.samples == dataset.imgs
    assert dataset.targets == [0, 1, 1, 1, 2, 2, 2, 2, 3]
    assert dataset.samples == [
        (f"{root}/{name}", label) for name, label in zip(order, dataset.targets, strict=True)
    ]
    assert [dataset[i][1] for i in range(len(dataset))] == dataset.targets
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fastamp.ImageFolder("~/root", 4).samples == dataset.samples


def test_a_folder_without_images_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        fastamp.ImageFolder(tmp_path / "missing", 4)
    write(tmp_path, {"file.jpg": b""})
    with pytest.raises(NotADirectoryError, match=r"file\.jpg"):
        fastamp.ImageFolder(tmp_path / "file.jpg", 4)
    with pytest.raises(FileNotFoundError, match="no valid file for the classes that are its"):
        fastamp.ImageFolder(tmp_path, 4)
    write(tmp_path, {"b/x.jpg": b"", "c/x.txt": b"", "a/x/y.txt": b""})
    message = r"found no valid file for the classes a, c; supported extensions are \.jpg, "
    with pytest.raises(FileNotFoundError, match=message):
        fastamp.ImageFolder(tmp_path, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size: expected an integer of at least 1, got 0"),
        ({"size": (4, 4, 3)}, "size: expected a number, or height and width, got (4, 4, 3)"),
        ({"random_crop": (0, 1)}, "random_crop: expected (least, largest) share"),
        ({"random_crop": (0.5, 1.1)}, "random_crop: expected (least, largest) share"),
        ({"random_crop": True}, "random_crop: expected (least, largest) share of the area, got T"),
        ({"flip": 0.05}, "flip: expected True or False, got 0.05"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_before_the_folder_is_read(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fastamp.ImageFolder("missing", **{"size": 4, **options})


def test_pixels_are_pillows_in_every_format(tmp_path, decoder):
    turned = b"Exif\0\0MM\0*\0\0\0\10\0\1\1\22\0\3\0\0\0\1\0\6\0\0\0\0\0\0"  # by 90 degrees
    deep = Image.fromarray(np.arange(2000, dtype="u2").reshape(50, 40) * 30)
    whole = encode(photo(67, 45))
    head, scan = whole.split(b"\xff\xda")
    files = {
        "rgb.jpg": whole,
        "odd head.jpg": head + b"odd\xff\xda" + scan,  # which Pillow does not mind
        "odd end.jpg": whole[:-2] + bytes(20) + b"\xff\xd9",
        "tall.jpg": encode(photo(31, 90), quality=90, progressive=True, subsampling=0),
        "grey.jpg": encode(photo(50, 41, mode="L"), subsampling=1),
        "cmyk.jpg": encode(photo(50, 41, mode="CMYK")),
        "small.jpg": encode(photo(9, 7)),
        "dot.jpg": encode(photo(1, 1)),
        "turned.jpg": encode(photo(60, 40), exif=turned),
        "really a png.jpg": encode(photo(40, 50), "PNG"),
        "palette.png": encode(photo(40, 50, mode="P"), "PNG"),
        "alpha.png": encode(photo(200, 133, mode="RGBA"), "PNG"),
        "grey alpha.png": encode(photo(40, 50, mode="LA"), "PNG"),
        "bits.png": encode(photo(40, 50, mode="1"), "PNG"),
        "deep.png": encode(deep, "PNG"),
        "a.bmp": encode(photo(40, 50), "BMP"),
        "a.ppm": encode(photo(40, 50), "PPM"),
        "a.pgm": encode(photo(40, 50, mode="L"), "PPM"),
        "a.tiff": encode(photo(40, 50), "TIFF"),
        "a.webp": encode(photo(40, 50), "WEBP"),
    }  # fmt: skip
    write(tmp_path / "class", files)
    for size in ((24, 24), (30, 17), (1, 90), (90, 1)):
        dataset = fastamp.ImageFolder(tmp_path, size)
        for path, label in dataset.samples:
            image, found = dataset[dataset.samples.index((path, label))]
            assert (image.dtype, image.shape, found) == (torch.uint8, (3, *size), label)
            assert image.is_contiguous()
            # Both round to 8 bits after each of the two directions.
            wanted = expected(files[path.rpartition("/")[2]], size)
            assert difference(image, wanted).max() <= 1, path


def test_a_large_jpeg_is_decoded_at_the_scale_that_is_needed(tmp_path, decoder, monkeypatch):
    """The DCT scales with another filter: the mean is within 0.4 % of 255."""
    sides, resize = [], images_module.interpolate

    def watched(pixels, size, **options):
        sides.append(pixels.shape[-1])
        return resize(pixels, size, **options)

    monkeypatch.setattr(images_module, "interpolate", watched)
    modes = ("CMYK", "L", "RGB")
    image = photo(404, 304)
    files = {f"{mode}.jpg": encode(image.convert(mode), quality=90) for mode in modes}
    files["whole.png"] = encode(image, "PNG", compress_level=1)
    write(tmp_path / "class", files)
    for size, scale in ((153, 1), (152, 2), (77, 2), (76, 4), (39, 4), (38, 8)):
        dataset = fastamp.ImageFolder(tmp_path, size)
        sides.clear()
        for i, (name, data) in enumerate(files.items()):
            decoded = scale if name.endswith("jpg") else 1
            wanted = expected(data, (size, size), decoded)
            apart = difference(dataset[i][0], wanted)
            assert apart.mean() < 1, (size, name)
            assert decoded > 1 or apart.max() <= 1
        assert sides == [304 // scale] * 3 * (304 // scale != size) + [304]


def test_it_is_a_dataset_like_any_other(folder):
    dataset = fastamp.ImageFolder(folder, (12, 16))
    samples = [dataset[i] for i in range(len(dataset))]
    assert [label for _, label in samples] == [0, 0, 0, 1, 1, 1]
    assert_same(dataset[-2], samples[4])
    with pytest.raises(IndexError, match="index out of range"):
        dataset[6]
    for copied in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert_same(copied[3], samples[3])
    for loader in (DataLoader, fastamp.DataLoader):
        assert_same(next(iter(loader(dataset, 4, num_workers=1))), default_collate(samples[:4]))


def test_what_is_damaged_is_an_error_that_names_the_file(tmp_path, decoder):
    whole, png = encode(photo(60, 40)), encode(photo(60, 40), "PNG")
    write(tmp_path, {
        "a b/0.jpg": whole[: len(whole) // 2],
        "a b/1.jpg": b"",
        "a b/2.jpg": b"\xff\xd8\xff no image",
        "a b/3.png": png[: len(png) // 2],
        "a b/4.png": b"text",
        "a b/5.jpg": whole,
    })  # fmt: skip
    dataset = fastamp.ImageFolder(tmp_path, 9)
    for i in range(5):
        path = re.escape(dataset.samples[i][0])
        with pytest.raises(OSError, match=f"^{path}: cannot be read as an image: .") as error:
            dataset[i]
        assert error.value.__cause__ is not None
    (tmp_path / "a b/5.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"a b/5\.jpg"):
        dataset[5]
    loader = fastamp.DataLoader(dataset, 2, num_workers=2, worker="thread")
    with pytest.raises(OSError, match=r"a b/0\.jpg: cannot be read as an image"):
        next(iter(loader))


def test_a_random_crop_is_a_part_of_the_asked_share_and_shape():
    rng = random.Random(0)
    image, draw = SimpleNamespace(width=400, height=300), images_module.draw_crop
    boxes = np.array([draw(image, (0.08, 1.0), rng) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    width, height = right - left, bottom - top
    assert left.min() >= 0
    assert top.min() >= 0
    assert right.max() <= 400
    assert bottom.max() <= 300
    sizes = width * height / 120_000
    assert 0.079 < sizes.min() < sizes.max() <= 1
    assert 0.74 < (width / height).min() < (width / height).max() < 1.35
    assert len({*zip(left, top, strict=True)}) > 1500
    # What never fits: the largest centered part, of the nearest shape.
    assert draw(SimpleNamespace(width=400, height=30), (1, 1), rng) == (180, 0, 220, 30)
    assert draw(SimpleNamespace(width=30, height=400), (1, 1), rng) == (0, 180, 30, 220)


def test_random_crops_and_flips_are_those_of_the_samples_generator(tmp_path, decoder):
    data = encode(photo(90, 60))
    write(tmp_path, {f"class/{i}.jpg": data for i in range(40)})
    crops = fastamp.ImageFolder(tmp_path, 16, random_crop=(0.2, 0.6), flip=True)
    options = {"batch_size": 10, "seed": 3}
    loader = fastamp.DataLoader(crops, **options)
    first, second = list(loader), list(loader)
    assert_same(list(fastamp.DataLoader(crops, num_workers=2, **options)), first)
    threads = fastamp.DataLoader(crops, num_workers=3, worker="thread", **options)
    assert_same([*threads, *threads], first + second)
    images = torch.cat([images for images, _ in first + second])
    assert len(images.flatten(1).unique(dim=0)) == 80
    # A flip alone: about half of the images are the mirror image of the others.
    still = fastamp.ImageFolder(tmp_path, 16)[0][0]
    flips = fastamp.ImageFolder(tmp_path, 16, flip=True)
    images = [flips[i][0] for i in range(40)]
    turned = [torch.equal(image, still.flip(2)) for image in images]
    assert [torch.equal(image, still) for image in images] == [not each for each in turned]
    assert 8 <= sum(turned) <= 32
    # A crop alone is what Pillow cuts out of the box.
    torch.manual_seed(5)
    image = SimpleNamespace(width=90, height=60)
    box = images_module.draw_crop(image, (0.2, 0.6), fastamp.sample_rng().python)
    torch.manual_seed(5)
    part = fastamp.ImageFolder(tmp_path, (40, 60), random_crop=(0.2, 0.6))[0][0]
    cut = Image.open(io.BytesIO(data)).crop(box).resize((60, 40), Image.BILINEAR)
    assert difference(part, np.array(cut).transpose(2, 0, 1)).max() <= 1
