"""Images augmented one by one in pure Python, with the random numbers of csrc/data/augment.h."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastamp.data.columns import AugmentStep, Images, StepKind
from fastamp.data.sample_rng import mix

_UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def paint_image(images: Images, row: Tensor | npt.NDArray[np.generic], key: int) -> Tensor:
    """Return the bytes of the augmented image, in new memory; `key` seeds its random numbers."""
    if isinstance(row, torch.Tensor):
        row = row.contiguous().view(-1).view(torch.uint8).numpy()
    pixel = np.dtype(_UNSIGNED.get(images.pixel_nbytes, f"V{images.pixel_nbytes}"))
    shape = images.planes, images.height, images.width
    planes: Any = np.ascontiguousarray(row).reshape(-1).view(pixel).reshape(shape)
    for s, (step, fill) in enumerate(zip(images.steps, images.fills.view(pixel), strict=True)):
        y, x = mix(key + 2 * s + 1) >> 32, mix(key + 2 * s + 2) >> 32
        if step.kind is not StepKind.FLIP:
            planes = _paint(planes, step, fill[:, None], y, x)
        elif y < step.y_bound:
            planes = planes[:, :, ::-1]
    return torch.from_numpy(np.array(planes, order="C").view(np.uint8).reshape(-1))


def _paint(
    planes: npt.NDArray[np.generic],
    step: AugmentStep,
    fill: npt.NDArray[np.generic],
    y: int,
    x: int,
) -> npt.NDArray[np.generic]:
    """Return a crop, or a copy with a hole, each of which may lie partly outside of the image."""
    top, left = (y * step.y_bound >> 32) - step.top, (x * step.x_bound >> 32) - step.left
    rows = slice(max(top, 0), max(top + step.height, 0))
    columns = slice(max(left, 0), max(left + step.width, 0))
    inside = planes[:, rows, columns]
    if step.kind is StepKind.CUTOUT:
        painted = planes.copy()
        painted[:, rows, columns] = fill
        return painted
    painted = np.empty((len(planes), step.height, step.width), planes.dtype)
    painted[:] = fill
    down, right = rows.start - top, columns.start - left
    painted[:, down : down + inside.shape[1], right : right + inside.shape[2]] = inside
    return painted
