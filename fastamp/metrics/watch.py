"""What a tracker watches: scalers tell every step, timers and loaders are asked, so is NVML."""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from fastamp.metrics.sinks import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastamp.metrics.sinks import Scalar
    from fastamp.metrics.tracker import MetricsTracker

GPU_INTERVAL_S = 1.0  # NVML's utilisation is a mean over 1/6 to 1 s, depending on the GPU


class ScalerWatch:
    """Hears of every step and update of a fastamp.GradScaler; its tensors are read later."""

    def __init__(self, tracker: MetricsTracker, scaler: Any, first_step: int) -> None:
        self._tracker, self._scaler = tracker, scaler
        known = tracker.summary() if first_step else {}  # of the run that is resumed
        scale, skipped = (known.get(f"train/{name}") for name in ("loss_scale", "skipped_steps"))
        self._step, self._scale = first_step, scale.last if scale else math.nan
        self._n_skipped = int(skipped.last) if skipped else 0
        scaler._observers.append(self)

    def stop(self) -> None:
        """Leave the scaler."""
        self._scaler._observers.remove(self)

    def stepped(self) -> None:
        """Queue what the scaler's last step found, and the scale that it had."""
        report, scale = self._scaler.last_step, getattr(self._scaler, "_scale", None)
        self._tracker._put("train/grad_norm", report.norm, self._step)
        self._tracker._put(self._of_found_inf, report.found_inf, self._step)
        if scale is not None:  # else scaling is not enabled
            self._tracker._put(self._of_scale, scale, self._step)

    def updated(self) -> None:
        """Count a step."""
        self._step += 1

    def _of_found_inf(self, step: int, found_inf: float) -> Iterator[Scalar]:
        if found_inf:
            self._n_skipped += 1
            yield "train/gradient_overflow", step, 1.0
            yield "train/skipped_steps", step, float(self._n_skipped)

    def _of_scale(self, step: int, scale: float) -> Iterator[Scalar]:
        if scale != self._scale:
            self._scale = scale
            yield "train/loss_scale", step, scale


class MeansWatch:
    """Asks a timer or a loader for its totals, and makes means since the last flush of them."""

    def __init__(self, tracker: MetricsTracker, source: Any) -> None:
        self._tracker, self._source = tracker, source
        self._totals: dict[str, tuple[int, float]] = {}

    def sample(self) -> None:
        """Log a mean of everything that went on."""
        before, self._totals = self._totals, _totals_of(self._source)
        for name, (count, total) in self._totals.items():
            count_before, total_before = before.get(name, (0, 0.0))
            if count > count_before:
                mean = (total - total_before) / (count - count_before)
                self._tracker._put(name, mean, self._tracker.last_step)


def _totals_of(source: Any) -> dict[str, tuple[int, float]]:
    if hasattr(source, "summary"):
        return {f"timer/{name}": (s.count, s.total) for name, s in source.summary().items()}
    stats = vars(source.stats())
    return {f"loader/{k}": (stats["batches"], v) for k, v in stats.items() if k.endswith("_s")}


class GpuWatch:
    """The GPUs that a tracker watches, with one thread, which ends with the tracker."""

    def __init__(self, tracker: MetricsTracker) -> None:
        self._tracker = tracker
        self._handles: dict[int, Any] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="fastamp-gpu", daemon=True)

    def add(self, device: torch.device) -> None:
        """Watch one more GPU."""
        self._nvml = require("pynvml", "gpu")
        index = torch.cuda.current_device() if str(device) == "cuda" else device.index
        # By UUID: NVML also counts the devices that CUDA_VISIBLE_DEVICES hides, in its own order.
        uuid = str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")
        self._nvml.nvmlInit()
        self._handles[index] = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _poll(self) -> None:
        while not self._stopped.wait(GPU_INTERVAL_S):
            for index, handle in list(self._handles.items()):
                for figure, ask in _GPU_FIGURES.items():
                    with suppress(self._nvml.NVMLError):  # not every GPU has every figure
                        value = ask(self._nvml, handle)
                        self._tracker._put(f"gpu{index}/{figure}", value, self._tracker.last_step)


_GPU_FIGURES: dict[str, Callable[[Any, Any], float]] = {
    "utilization_pct": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_nbytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
}
