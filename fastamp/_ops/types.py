"""What every backend meets (`Ops`, `HostOps`), and what they take and give: plain types only."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, IntEnum
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
COMPILED_NORMS = (1.0, 2.0, math.inf)
RegionMaker: TypeAlias = "Callable[[str, Any, bool], Region]"
NO_STATE = "no state"
OTHER_TYPE = "a parameter is of another type"


class Rule(Enum):
    """The optimizers of torch whose update is an op; AdamW is Adam with decoupled decay."""

    ADAM = "Adam"
    ADAMW = "AdamW"
    SGD = "SGD"
    ADAGRAD = "Adagrad"


class GradStats(NamedTuple):
    """What one read of the gradients tells: 0-dim tensors, made without a wait."""

    reduced: Tensor
    """float64: the sum of squares (norm_type 2), of magnitudes (1), or the largest one (inf)."""
    norm: Tensor
    """Norm of the unscaled gradients, float32, or float64 where a gradient has 64 bits."""
    found_inf: Tensor
    """1.0 where any element is inf or NaN, else 0.0."""
    clip_coef: Tensor
    """min(1, max_norm / (norm + 1e-6)), torch.nn.utils' formula; NaN stays."""
    factor: Tensor
    """clip_coef / scale: multiply the gradients by this."""
    grad_scale: Tensor
    """scale / clip_coef: or divide them by this."""
    scale: Tensor
    """The loss scale as it was read."""


class Clip(NamedTuple):
    """How gradients are to be unscaled and clipped; tensors are 0-dim float32, on their device."""

    scale: Tensor | None = None
    """Loss scale; None is 1."""
    max_norm: float | None = None
    """Longest norm of the unscaled gradients; None does not clip."""
    only_finite: bool = False
    """Leave the clip out where found_inf is 1, so that inf does not become NaN."""
    skipped: Tensor | None = None
    """Counter to add found_inf to, which then is 1, too, where grad_scale is infinite."""


class Packed(Protocol):
    """A list of tensors that a backend has looked at once, and what it does with them."""

    @property
    def device(self) -> torch.device:
        """The first tensor's, on which results lie."""

    @property
    def rest(self) -> list[int]:
        """Indices of the tensors that this backend does not take."""

    @property
    def has_float16(self) -> bool:
        """Whether any tensor that it takes is float16."""

    @property
    def has_fallback(self) -> bool:
        """Whether the fallback serves any of them."""

    def grad_stats(self, norm_type: float, clip: Clip) -> GradStats:
        """Read every element once; compiled backends take a norm_type of 1, 2 or inf.

        Args:
            norm_type: order of the norm.
            clip: how to unscale and clip; its tensors lie on `device`.
        """

    def rescale_(self, factor: Tensor) -> None:
        """Multiply every element by a 0-dim float32 tensor, rounding once; 1 writes nothing."""


class Region(Protocol):
    """One path of nested regions, in all threads, on the host's clock."""

    @property
    def path(self) -> str:
        """Its name inside the regions around it."""

    @property
    def children(self) -> dict[str, Any]:
        """Regions inside it, by name."""

    def innermost(self) -> "Region":
        """Return the innermost open region of this thread and this timer, or else this one."""

    def find(self, name: object) -> "Region | None":
        """Return the known region of a name inside the innermost open one."""

    def __enter__(self) -> object:
        """Open the region in this thread."""

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Close it, and what was opened inside and left open, except by other asyncio tasks.

        Nothing happens if it has ended with a region around it.
        """

    def add(self, duration_ns: int) -> None:
        """Count a duration that was measured elsewhere."""

    def figures(self) -> tuple[Any, ...]:
        """Return count, sum, minimum and maximum, and the histogram as a buffer of int64."""

    def reset(self) -> None:
        """Forget all figures; where it is open, it counts when it ends."""


class Update(Protocol):
    """One optimizer's update on one backend, which reads the optimizer anew at each step."""

    def read(self, groups: list[dict[str, Any]], states: dict[Tensor, Any]) -> Packed | str:
        """Return the gradients, or say why torch has to make this step.

        NO_STATE says that a parameter with a gradient has none, OTHER_TYPE that it is no plain
        tensor.
        """

    @property
    def counts_on_host(self) -> bool:
        """Whether counts lie on the host and may include steps that the device has skipped."""

    def settle(self, states: dict[Tensor, Any]) -> None:
        """Take the skipped steps out of those counts; waits for the device if there may be any."""

    def forget(self) -> None:
        """Let go of what was read."""

    def apply_(
        self, factor: Tensor | None, found_inf: Tensor | None, *, zero_grad: bool = False
    ) -> None:
        """Update parameters and states in one pass, and let go of what was read.

        Args:
            factor: multiplies the gradients before, 0-dim float32; None is 1.
            found_inf: where this is 1.0, nothing is written.
            zero_grad: set the gradients to None, rather than to what they are multiplied to.
        """


class Ops(Protocol):
    """The op table: what every backend can do with a list of tensors."""

    @property
    def name(self) -> str:
        """The backend's name, as in `fastamp.backends()`."""

    def pack(self, tensors: Sequence[Tensor]) -> Packed:
        """Look at the tensors, which lie on the device of the first one, or are left in `rest`."""

    def update(self, rule: Rule, device: torch.device) -> Update:
        """Return what updates an optimizer that follows the rule, with parameters on a device."""

    def region_maker(self) -> RegionMaker:
        """Return what makes the regions of one timer from path, `begin`, `always`.

        `begin`, the same for all, is called with the region that opens, if `always` or if torch's
        profiler is on; what it returns is called with the start and the end, in nanoseconds.
        """


class StepKind(IntEnum):
    """The augmentations of images."""

    CROP = 0
    FLIP = 1
    CUTOUT = 2


class AugmentStep(NamedTuple):
    """One augmentation, in pixels. It draws two numbers, y and x, below its bounds.

    The upper left corner of a crop or a hole lies at (y - top, x - left).
    """

    kind: StepKind
    y_bound: int
    """Of a flip: its probability times 2^32."""
    x_bound: int = 1
    top: int = 0
    left: int = 0
    height: int = 0
    """Of the crop or the hole."""
    width: int = 0


class Images(NamedTuple):
    """How the rows of a column, which are images, are augmented: planes of pixels."""

    planes: int
    height: int
    width: int
    pixel_nbytes: int
    steps: tuple[AugmentStep, ...]
    """At most 8."""
    fills: npt.NDArray[np.uint8]
    """The pixel that each step fills each plane with: (steps, planes, pixel_nbytes)."""
    row_shape: tuple[int, ...]
    """Of the augmented images."""


class Windows:
    """Windows of one sequence, as the rows of an array. They may overlap.

    Args:
        parts: the sequence, end to end: one-dimensional arrays of one dtype, none of them empty.
        step: elements from the beginning of a window to that of the next.
        shape: how many windows, and how many elements in each. All of them lie in the sequence.
    """

    def __init__(
        self, parts: Sequence[npt.NDArray[Any]], step: int, shape: tuple[int, int]
    ) -> None:
        self.parts, self.step, self.shape, self.dtype = parts, step, shape, parts[0].dtype
        self.strides = (step * self.dtype.itemsize, self.dtype.itemsize)
        self._begins = list(accumulate(map(len, parts), initial=0))
        one = len(parts) == 1
        self._rows: Any = (
            as_strided(parts[0], shape, self.strides, writeable=False) if one else None
        )

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        """Return a window, which may be a view; rows count from 0."""
        window: npt.NDArray[Any]
        if self._rows is not None:
            window = self._rows[row]
            return window
        window, done = np.empty(self.shape[1], self.dtype), 0
        while done < len(window):  # which may begin in one part and end in another
            place = row * self.step + done
            number = bisect_right(self._begins, place) - 1
            begin = place - self._begins[number]
            part = self.parts[number][begin : begin + len(window) - done]
            window[done : done + len(part)] = part
            done += len(part)
        return window

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return copies of windows."""
        if self._rows is not None:
            return np.take(self._rows, rows, axis=0)
        return np.array([self[row] for row in rows.tolist()], self.dtype).reshape(-1, self.shape[1])


class Column(NamedTuple):
    """An array on the CPU whose rows become the rows of one tensor of a batch."""

    array: Tensor | npt.NDArray[Any] | Windows
    """Rows along its first dimension; they may overlap."""
    dtype: torch.dtype
    """Of the batch: the array's own, or int64 for unsigned and 32-bit integers."""
    images: Images | None = None
    """How its rows are augmented; None copies them."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of the batch."""
        return tuple(self.array.shape[1:]) if self.images is None else self.images.row_shape


class Gatherer(Protocol):
    """Gathers batches out of columns, in the order of submission, for one consumer."""

    def submit(
        self, indices: Tensor, outputs: Sequence[Tensor], keys: Tensor | None = None
    ) -> None:
        """Add a batch: int64 indices of rows, and one contiguous tensor to fill for each column.

        `keys`, one int64 for each row, are what augmented images draw from.
        """

    def is_ready(self) -> bool:
        """Say whether the oldest batch is there, or too small to be worth a wait."""

    def wait(self) -> float:
        """Wait for the oldest batch and return the seconds that its copy took.

        Raises:
            IndexError: an index of that batch is out of bounds.
        """


class HostOps(Protocol):
    """What the backends of the host do with the samples of a batch."""

    @property
    def name(self) -> str:
        """The backend's name, as in `fastamp.backends()`."""

    def columns(
        self, samples: tuple[Any, ...], keys: tuple[Any, ...]
    ) -> Iterable[Sequence[Any]] | None:
        """Return, for each key, sample[key] of every sample; None as from `stack`."""

    def stack(
        self,
        samples: Sequence[Any],
        dtype: torch.dtype,
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
        pad: Tensor | None = None,
        multiple: int = 1,
    ) -> Tensor | None:
        """Copy samples into one tensor; None where the backend does not take them.

        Args:
            samples: at least one; all tensors or all arrays, of any shapes.
            dtype: the batch's, which is that of the first sample.
            allocate: gives memory for a shape and a dtype; called once, when all is checked.
            pad: the element that fills ragged dimensions, 0-dim on the CPU; None refuses them.
            multiple: ragged dimensions, and the only one of vectors, are rounded up to it.
        """

    def augment_image(self, images: Images, row: Tensor | npt.NDArray[Any], key: int) -> Tensor:
        """Return the bytes of what an image becomes with a sample's key, in new memory."""

    def gatherer(self, columns: Sequence[Column], depth: int) -> Gatherer:
        """Return what gathers batches out of at least one column, which it keeps alive.

        Args:
            columns: arrays with the same number of rows.
            depth: batches that may be under way.
        """


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Say whether backends take the tensors: no subclasses, such as DTensor, and no torch.func."""
    if torch.compiler.is_compiling():  # dynamo does not know the questions below
        return all(type(tensor) in _PLAIN_TYPES for tensor in tensors)
    if not {*map(type, tensors)}.issubset(_PLAIN_TYPES):
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: a DTensor's part, and all of any other."""
    return getattr(tensor, "_local_tensor", tensor)


def check_rows(indices: Tensor, num_rows: int) -> Tensor:
    """Return the rows at indices, which may count from the end, or raise torch's error."""
    rows = torch.where(indices < 0, indices + num_rows, indices)
    bad = (rows < 0) | (rows >= num_rows)
    if bad.any():
        raise index_error(int(indices[bad][0]), num_rows)
    return rows


def index_error(index: int, num_rows: int) -> IndexError:
    """Return torch's error for an index that is out of bounds."""
    msg = f"index {index} is out of bounds for dimension 0 with size {num_rows}"
    return IndexError(msg)
