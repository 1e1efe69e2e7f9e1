"""Sources that a tracker watches: scalers report every step, timers, loaders and GPUs are polled.

Each is given `log(name, value, step=None)`, where None is the loop's latest step. In place of a
name it may pass a function that makes scalars of the step and the value, once the value is known.
"""

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch

from fastamp.data.own_threads import start
from fastamp.metrics.series import ScalarStats
from fastamp.metrics.sinks import Scalar, require

Log: TypeAlias = Callable[..., None]

GPU_INTERVAL_S = 1.0  # NVML's utilization is a mean over 1/6 to 1 s, depending on the GPU


class ScalerWatch:
    """Logs every step of a fastamp.GradScaler; `known` are the scalars of the run so far.

    `step` is the number of the next one.
    """

    def __init__(
        self, log: Log, scaler: Any, first_step: int, known: dict[str, ScalarStats]
    ) -> None:
        self._log, self._scaler, self.step = log, scaler, first_step
        scale, skipped = (known.get(f"train/{name}") for name in ("loss_scale", "skipped_steps"))
        self._scale = scale.last if scale else math.nan
        self._n_skipped = int(skipped.last) if skipped and math.isfinite(skipped.last) else 0
        # When the tracker is gone, the scaler drops the reference.
        self._reference = weakref.ref(self, partial(_forget, scaler._observers))
        scaler._observers.append(self._reference)

    def stop(self) -> None:
        """Stop watching the scaler."""
        _forget(self._scaler._observers, self._reference)

    def stepped(self) -> None:
        """Log the scaler's last step, and the scale that it had."""
        report, scale = self._scaler.last_step, getattr(self._scaler, "_scale", None)
        self._log("train/grad_norm", report.norm, self.step)
        self._log(self._of_found_inf, report.found_inf, self.step)
        if scale is not None:  # else scaling is not enabled
            self._log(self._of_scale, scale, self.step)

    def updated(self) -> None:
        """Count a step."""
        self.step += 1

    def _of_found_inf(self, step: int, found_inf: float) -> Iterator[Scalar]:
        if found_inf:
            self._n_skipped += 1
            yield "train/gradient_overflow", step, 1.0
            yield "train/skipped_steps", step, float(self._n_skipped)

    def _of_scale(self, step: int, scale: float) -> Iterator[Scalar]:
        if scale != self._scale:
            self._scale = scale
            yield "train/loss_scale", step, scale


def _forget(observers: list[Any], reference: Any) -> None:
    if reference in observers:
        observers.remove(reference)


def watch_means(log: Log, source: Any) -> Callable[[], None]:
    """Return a function that logs the means of a timer's or loader's totals since its last call."""
    before: dict[str, tuple[int, float]] = {}
    resets = getattr(source, "_resets", 0)  # of a timer

    def sample() -> None:
        nonlocal before, resets
        if resets != (resets := getattr(source, "_resets", 0)):
            before = {}
        totals = _totals_of(source)
        for name, (count, total) in totals.items():
            count_before, total_before = before.get(name, (0, 0.0))
            if count > count_before:
                log(name, (total - total_before) / (count - count_before))
        before = totals

    return sample


def _totals_of(source: Any) -> dict[str, tuple[int, float]]:
    if hasattr(source, "summary"):
        return {f"timer/{name}": (s.count, s.total) for name, s in source.summary().items()}
    stats = vars(source.stats())
    return {f"loader/{k}": (stats["batches"], v) for k, v in stats.items() if k.endswith("_s")}


class GpuWatch:
    """Logs the state of GPUs from one thread, which starts with the first of them."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._handles: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    def add(self, device: torch.device) -> None:
        """Watch one more GPU."""
        self._nvml = require("pynvml", "gpu")
        index = torch.cuda.current_device() if str(device) == "cuda" else device.index
        try:
            self._handles[index] = self._find(index)
        except self._nvml.NVMLError as error:  # of the driver; the training goes on
            logging.getLogger(__name__).warning("cuda:%d is not watched: %s", index, error)
            return
        if self._thread is None:
            self._stopped = threading.Event()
            self._thread = threading.Thread(target=self._poll, name="fastamp-gpu", daemon=True)
            start(self._thread)

    def _find(self, index: int) -> Any:
        """Return NVML's handle of a GPU, or of a part of one (MIG).

        By UUID: NVML also counts the devices that CUDA_VISIBLE_DEVICES hides, in its own order.
        """
        uuid = str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")
        self._nvml.nvmlInit()
        with suppress(self._nvml.NVMLError):
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid.removeprefix('MIG-')}")

    def stop(self) -> None:
        """Forget the GPUs and end the thread."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
        self._thread, self._handles = None, {}

    def _poll(self) -> None:
        while not self._stopped.wait(GPU_INTERVAL_S):
            for index, handle in list(self._handles.items()):
                for figure, read in _GPU_FIGURES.items():
                    with suppress(self._nvml.NVMLError):  # not every GPU has every figure
                        self._log(f"gpu{index}/{figure}", read(self._nvml, handle))


_GPU_FIGURES: dict[str, Callable[[Any, Any], float]] = {
    "utilization_pct": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_nbytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
}
