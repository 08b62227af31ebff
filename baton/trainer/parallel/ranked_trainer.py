"""The controller's side of a trainer whose ranks run in other processes."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from baton.errors import Fault, TrainingDiverged
from baton.files import atomic_directory
from baton.trainer.parallel import messages
from baton.trainer.trainer import PublishedWeights, Trainer
from baton.types import Batch, PolicyVersion

Answer = TypeVar("Answer")
REQUEST_TIMEOUT_S = 1800.0
"""Maximum seconds of a request to the ranks (start, step, publication, checkpoint), before all ranks are ended."""


class RankedTrainer(Trainer):
    """Trains a model sharded over ranks. Every request ends within `timeout_s` with an answer or an error. RankLost
    means that all ranks were ended."""

    def __init__(self, ranks: messages.Ranks, setup: messages.TrainerSetup, timeout_s: float) -> None:
        """Connect the ranks and construct their trainers. Raises UserError for invalid settings, and RankLost."""
        self._ranks, self._timeout_s, self._version = ranks, timeout_s, setup.version
        self._peak_bytes: int | None = None
        """Peak of `DeviceMemory` since the last call of `take_peak_bytes`."""
        try:
            store = self._ask(messages.Listen(), messages.Listening)[0]
            self._ask(messages.RankSetup(setup, store.host, store.port, timeout_s), messages.Ready)
        except BaseException:
            ranks.close()
            raise

    @property
    def version(self) -> PolicyVersion:
        return self._version

    def step(self, batch: Batch) -> dict[str, float]:
        """Run one train step on all ranks. Raises the errors of `LocalTrainer.step`, or RankLost."""
        answers = self._ask(messages.TrainStep(batch), messages.Stepped)
        self._version = answers[0].version
        return next(answer.metrics for answer in answers if answer.metrics)  # the last pipeline stage has them

    def sleep(self) -> None:
        """Move the tensors of all ranks to the host. `publish`, `save` and `restore` still work, and use the device for
        one tensor at a time."""
        self._turn(is_awake=False)

    def wake_up(self) -> None:
        """Move the tensors of all ranks back to their devices, as `step` requires."""
        self._turn(is_awake=True)

    @property
    def held_bytes(self) -> int:
        """Device memory of weights, gradients and moments, on the rank that has most."""
        return self._turn(is_awake=None)

    def take_peak_bytes(self) -> int | None:
        """Return the peak of device memory since the last call, on the rank that used most; None on a CPU."""
        self._turn(is_awake=None)
        peak, self._peak_bytes = self._peak_bytes, None
        return peak

    def _turn(self, *, is_awake: bool | None) -> int:
        answers = self._ask(messages.Turn(is_awake), messages.DeviceMemory)
        peaks = [each.peak_bytes for each in answers if each.peak_bytes is not None]
        self._peak_bytes = max((*peaks, self._peak_bytes or 0)) if peaks else self._peak_bytes
        return max(answer.held_bytes for answer in answers)

    def publish(self) -> PublishedWeights:
        """Return the current weights, or the adapter alone, mapped from the file that the first rank has written."""
        answer = self._ask(messages.Publish(), messages.Published)[0]
        self._version = answer.version
        return PublishedWeights.of_file(self._version, self._ranks.bring(answer.path))

    def save(self, directory: Path) -> None:
        """Write a checkpoint atomically; each rank writes its part."""
        with atomic_directory(directory) as unfinished:
            self._version = self._ask(messages.Save(str(unfinished)), messages.Ready)[0].version

    def restore(self, directory: Path) -> None:
        """Load a checkpoint that any number of ranks may have written."""
        self._version = self._ask(messages.Restore(str(directory.absolute())), messages.Ready)[0].version

    def close(self) -> None:
        self._ranks.close()

    def _ask(self, message: messages.ToRank, kind: type[Answer]) -> list[Answer]:
        answers = self._ranks.ask(message, self._timeout_s)
        error = messages.error_of(dict(enumerate(answers)))
        if error is not None:
            if not (isinstance(error, TrainingDiverged) and all(isinstance(answer, Fault) for answer in answers)):
                self.close()  # after a failure of some ranks, the ranks hold different states
            raise error
        found: list[Answer] = [answer for answer in answers if isinstance(answer, kind)]
        assert len(found) == len(answers), f"ranks answered {message.__class__.__name__} with {answers}"
        return found
