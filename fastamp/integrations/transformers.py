"""The Hugging Face Trainer with fastamp's step, and skipped steps in the Trainer's logs."""

from typing import Any

from fastamp.integrations.accelerate import prepare
from fastamp.step import GradScaler

__all__ = ["AmpTrainer"]


class AmpTrainer:
    """A mixin for `transformers.Trainer`, or any class of its kind: fastamp clips and steps.

    `class Trainer(AmpTrainer, transformers.Trainer): pass` is all that it takes; see
    `fastamp.integrations.accelerate.prepare` for what differs. The rows of the Trainer's log have
    its own "grad_norm"; "skipped_steps", the number of steps that an overflow has skipped since the
    start or the resume; and with scaling "loss_scale". Checkpoints are the Trainer's own; either
    Trainer resumes from them. A `get_train_dataloader` may return
    `self.accelerator.prepare(fastamp.DataLoader(...))`.

    Raises:
        TypeError: a class has the Trainer before this one among its bases.
        ValueError: FSDP1, DeepSpeed, Megatron-LM or XLA clip and step by themselves.

    Example:
        >>> import transformers
        >>> class Trainer(AmpTrainer, transformers.Trainer):
        ...     pass
        >>> options = transformers.TrainingArguments("run", use_cpu=True, report_to=[])
        >>> Trainer(model=torch.nn.Linear(4, 1), args=options).scaler.is_enabled()
        False
    """

    accelerator: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse an order of bases in which the Trainer's own methods would be called."""
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[1 : cls.__mro__.index(AmpTrainer)]
        wrong = [each.__name__ for each in before if not issubclass(each, AmpTrainer)]
        if wrong:
            msg = f"{cls.__name__}: expected AmpTrainer before {wrong[0]} among its bases"
            raise TypeError(msg)

    @property
    def scaler(self) -> GradScaler:
        """The scaler that makes the steps; its `last_step` reports the latest one."""
        return self.accelerator._stepper  # type: ignore[no-any-return]

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator, for each trial of a search too, and prepare it."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        prepare(self.accelerator)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log a row; one with the loss gets the skipped steps and the loss scale."""
        if "loss" in logs:
            logs["skipped_steps"] = self.scaler.skipped_steps
            if self.scaler.is_enabled():
                logs["loss_scale"] = self.scaler.get_scale()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
