"""Where a loader's time goes, and one word on whether it keeps up."""

from dataclasses import dataclass

_STARVED_SHARE = 0.05


@dataclass
class LoaderStats:
    """What a loader has done since it was made. Seconds of several threads or workers add up.

    `str(stats)` is the verdict.
    """

    batches: int = 0
    """Delivered to the consumer."""
    nbytes: int = 0
    """Of the tensors in them."""
    elapsed_s: float = 0.0
    """In the consumer's loop: waiting for a batch and working on it."""
    wait_s: float = 0.0
    """Of that, waiting for a batch."""
    getitem_s: float = 0.0
    """In the dataset."""
    collate_s: float = 0.0
    """In the collate function."""
    copy_s: float = 0.0
    """Gathering rows, and starting copies to the device."""
    slot_wait_s: float = 0.0
    """Until there was memory for a batch."""

    @property
    def wait_share(self) -> float:
        """The part of the consumer's time that it waited."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def verdict(self) -> str:
        """One word: "compute-bound", or "starved 18 %: getitem", the share and its cause.

        Before the first batch: "nothing measured yet".
        """
        if not self.batches:
            return "nothing measured yet"
        if self.wait_share < _STARVED_SHARE:
            return "compute-bound"
        causes = {
            "getitem": self.getitem_s,
            "collate": self.collate_s,
            "copy": self.copy_s,
            "slot-wait": self.slot_wait_s,
        }
        cause = max(causes, key=lambda name: causes[name])
        return f"starved {100 * self.wait_share:.0f} %: {cause}"

    def __str__(self) -> str:
        return self.verdict
