"""Switch one device between trainer and engine, which use the device alternately (`rollout.placement = "colocated"`).

      engine  ████████████ generate, evaluate ░ sleep ░░░░░░░░░░░░░░ ████████
      trainer ░ sleep ░░░░░░░░░░░░░░░░░░░░░░░ ████████ train step ██ ░ sleep ░ → publish, save: from host memory
                                            switch                 switch

Engine and trainer are never awake at the same time: one frees the device before the other moves its tensors back to the
device. The peak memory is therefore the maximum of the engine's and the trainer's memory, not the sum. Before the
engine sleeps, its trajectories are aborted and reported. After `wake_up`, the engine has no weights until it loads the
next version.
"""

from __future__ import annotations

from typing import Protocol

from baton.rollout.engine import Resident


class DeviceOwner(Resident, Protocol):
    """A `Resident` that can also measure the memory of its device."""

    def take_peak_bytes(self) -> int | None:
        """Return the peak of device memory in bytes since the last call; None on devices that do not measure it."""


class DeviceSharing:
    """Switches the device between engine and trainer, beginning with the engine."""

    def __init__(self, engine: Resident, trainer: DeviceOwner) -> None:
        """Put the trainer to sleep, and wake the engine up."""
        self._engine, self._trainer = engine, trainer
        self._peak_bytes = self._engine_bytes = self._trainer_bytes = self._asleep_bytes = 0
        self.to_engine()

    def to_engine(self) -> None:
        """Switch the device to the engine. Has no effect if the engine is awake."""
        self._measure()
        self._trainer.sleep()
        self._engine.wake_up()
        self._measure()

    def to_trainer(self) -> None:
        """Switch the device to the trainer. Has no effect if the trainer is awake."""
        self._measure()
        self._engine.sleep()
        self._asleep_bytes = self._engine.held_bytes
        self._trainer.wake_up()
        self._measure()

    def metrics(self) -> dict[str, float]:
        """Return three peaks of device memory since the last call: of the engine, the trainer, and both together."""
        measured = self._trainer.take_peak_bytes()  # only the trainer's process; the engine may be in another
        peak = self._peak_bytes if measured is None else max(self._peak_bytes, measured + self._asleep_bytes)
        values = {
            "memory/engine_bytes": float(self._engine_bytes),
            "memory/trainer_bytes": float(self._trainer_bytes),
            "memory/peak_bytes": float(peak),
        }
        self._peak_bytes = self._engine_bytes = self._trainer_bytes = 0
        self._measure()
        return values

    def _measure(self) -> None:
        engine, trainer = self._engine.held_bytes, self._trainer.held_bytes
        self._engine_bytes = max(self._engine_bytes, engine)
        self._trainer_bytes = max(self._trainer_bytes, trainer)
        self._peak_bytes = max(self._peak_bytes, engine + trainer)
