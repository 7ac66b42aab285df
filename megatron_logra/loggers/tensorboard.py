"""Owns the TensorBoard event files of a run. A start that fails is a warning, and the run goes on without them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_logra.loggers.base import SampleRecord

_log = logging.getLogger(__name__)


class TensorBoardLogger:
    """Writes scalars under their metric names, and samples as text, to `folder`.

    `resume_step` is the step of the checkpoint that was loaded, None for a new run: TensorBoard hides what an earlier
    process wrote to the same folder for later steps.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        self._writer = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = 0 if resume_step is None else resume_step + 1
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        except Exception as error:  # any failure of an optional destination
            _log.warning("TensorBoard is off: %s: %s", type(error).__name__, " ".join(str(error).split()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar a metric."""
        try:
            if self._writer is not None:
                for name, value in metrics.items():
                    self._writer.add_scalar(name, value, step)
                self._writer.flush()
        except Exception as error:  # any failure of an optional destination
            self._stop(error)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Write the samples as preformatted text."""
        try:
            if self._writer is not None:
                for number, sample in enumerate(samples):
                    text = f"reward {sample.reward:g}\n\n{sample.prompt}\n\n>>> {sample.response}"
                    preformatted = "\n".join("    " + line for line in text.splitlines())
                    self._writer.add_text(f"samples/{number}", preformatted, step)
        except Exception as error:  # any failure of an optional destination
            self._stop(error)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _stop(self, error: Exception) -> None:
        _log.warning("TensorBoard is off from here on: %s: %s", type(error).__name__, " ".join(str(error).split()))
        self._writer = None
