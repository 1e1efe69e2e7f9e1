"""The oracle of augmented images: one step after the other, on (planes, height, width)."""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1


def draw(key, n):
    """Return 32 bits of splitmix64's output for a key and a count."""
    x = (key + n + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return (x ^ x >> 31) >> 32


def crop(image, y, x, height, width, padding):
    """Pad with zeros and cut a window out."""
    padded = [np.pad(plane, padding) for plane in image]
    return np.stack(padded)[:, y : y + height, x : x + width]


def augmented(image, key, steps):
    """Return an image after steps: ("flip", p) or ("crop", size, padding)."""
    for i, (kind, *options) in enumerate(steps):
        first, second = draw(key, 2 * i + 1), draw(key, 2 * i + 2)
        if kind == "flip":
            image = image[:, :, ::-1] if first < round(options[0] * 2**32) else image
        else:
            size, padding = options
            height, width = (side + 2 * padding for side in image.shape[1:])
            y, x = first * (height - size[0] + 1) >> 32, second * (width - size[1] + 1) >> 32
            image = crop(image, y, x, *size, padding)
    return image
