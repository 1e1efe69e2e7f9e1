"""Where a loader's time goes, and one word on whether it keeps up."""

from dataclasses import dataclass

_STARVED_SHARE = 0.05
_EXPLAINED_SHARE = 0.75  # of the waiting, by the cause that is named


@dataclass
class LoaderStats:
    """What a loader has done since it was made. Seconds of several threads or workers add up.

    `str(stats)` is the verdict.

    Example:
        >>> loader = fastamp.DataLoader(torch.arange(8), batch_size=4)
        >>> print(loader.stats())
        nothing measured yet
        >>> for batch in loader:
        ...     pass
        >>> loader.stats().batches
        2
    """

    batches: int = 0
    """Batches delivered to the consumer."""
    elapsed_s: float = 0.0
    """Time in the consumer's loop: waiting for a batch and working on it."""
    wait_s: float = 0.0
    """The part of it spent waiting for a batch."""
    getitem_s: float = 0.0
    """Time in the dataset: reading and transforming items."""
    collate_s: float = 0.0
    """Time in the collate function: making batches of them."""
    copy_s: float = 0.0
    """Time gathering rows."""
    thread_cpu_s: float = 0.0
    """Processor time of thread workers, most of which holds the GIL if they run Python."""
    path: str = ""
    """How batches are made: "gathered", or "item by item: " and the reason."""

    @property
    def wait_share(self) -> float:
        """The part of the consumer's time that it waited."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def verdict(self) -> str:
        """In a few words: "compute-bound", or "starved 18 %: getitem", the share and its cause.

        "compute-bound": the loop waits for less than 5 % of its time. With thread workers it is not
        said: the loop's own Python waits for the GIL while theirs holds it, and that is no waiting
        for a batch; the verdict then gives their processor time. Otherwise the cause is the
        largest of the times above, "getitem", "collate" or "copy". It is named only if it is at
        least three quarters of the waiting, and so explains it; else: "starved 18 %". Before the
        first batch: "nothing measured yet".
        """
        if not self.batches:
            return "nothing measured yet"
        if self.wait_share < _STARVED_SHARE and not self.thread_cpu_s:
            return "compute-bound"
        if self.wait_share < _STARVED_SHARE:
            busy = self.thread_cpu_s / self.elapsed_s if self.elapsed_s else 0.0
            return (
                f"waits {100 * self.wait_share:.0f} %; threads compute for {100 * busy:.0f} % of "
                "the time and may hold the GIL: time some steps with worker='process' too"
            )
        causes = {"getitem": self.getitem_s, "collate": self.collate_s, "copy": self.copy_s}
        cause = max(causes, key=lambda name: causes[name])
        share = f"starved {100 * self.wait_share:.0f} %"
        return f"{share}: {cause}" if causes[cause] >= _EXPLAINED_SHARE * self.wait_s else share

    def __str__(self) -> str:
        return self.verdict
