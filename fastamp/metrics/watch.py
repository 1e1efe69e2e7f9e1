"""Sources that a tracker watches: scalers report every step, GPUs are polled.

Each is given `log(name, value, step=None)`, where None is the loop's latest step. In place of a
name it may pass a function, which makes scalars of the step and a list of numbers, once known.
"""

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from fastamp.metrics.series import ScalarStats
from fastamp.metrics.sinks import Scalar, require

Log: TypeAlias = Callable[..., None]

GPU_INTERVAL_S = 1.0  # NVML's utilization is a mean over 1/6 to 1 s, depending on the GPU


class ScalerWatch:
    """Logs every step of a fastamp.GradScaler; `known` are the scalars of the run so far."""

    def __init__(
        self, log: Log, scaler: Any, first_step: int, known: dict[str, ScalarStats]
    ) -> None:
        self._log, self._scaler, self._step = log, scaler, first_step
        scale, skipped = (known.get(f"train/{name}") for name in ("loss_scale", "skipped_steps"))
        self._scale = scale.last if scale else math.nan
        self._n_skipped = int(skipped.last) if skipped else 0
        # When the tracker is gone, the scaler drops the reference.
        self._reference = weakref.ref(self, scaler._observers.remove)
        scaler._observers.append(self._reference)

    def stop(self) -> None:
        """Stop watching the scaler."""
        self._scaler._observers.remove(self._reference)
        del self._reference

    def stepped(self) -> None:
        """Log the scaler's last step: in one tensor, since each costs a copy on its device."""
        self._log(self._scalars_of, self._scaler.last_step.stacked(), self._step)

    def updated(self) -> None:
        """Count a step."""
        self._step += 1

    def _scalars_of(self, step: int, values: list[float]) -> Iterator[Scalar]:
        norm, found_inf, *_, scale = values
        yield "train/grad_norm", step, norm
        if found_inf:
            self._n_skipped += 1
            yield "train/gradient_overflow", step, 1.0
            yield "train/skipped_steps", step, float(self._n_skipped)
        if scale != self._scale and self._scaler.is_enabled():
            self._scale = scale
            yield "train/loss_scale", step, scale


_GPU_FIGURES: dict[str, Callable[[Any, Any], float]] = {
    "utilization_pct": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_nbytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
}


def watch_gpu(log: Log, index: int) -> Callable[[], None]:
    """Log the state of a GPU from a thread; return the function that ends it."""
    nvml = require("pynvml", "gpu")
    try:
        # By UUID: NVML also counts what CUDA_VISIBLE_DEVICES hides, in its own order.
        uuid = str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as error:  # of the driver; the training goes on
        logging.getLogger(__name__).warning("cuda:%d is not watched: %s", index, error)
        return lambda: None
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.wait(GPU_INTERVAL_S):
            for figure, read in _GPU_FIGURES.items():
                with suppress(nvml.NVMLError):  # not every GPU has every figure
                    log(f"gpu{index}/{figure}", read(nvml, gpu))

    def stop() -> None:
        stopped.set()
        thread.join()

    thread = threading.Thread(target=poll, name="fastamp-gpu", daemon=True)
    thread.start()
    return stop
