"""One device that trainer and engine use alternately (`rollout.placement = "colocated"`).

      engine  ████████████ generate, evaluate ░ sleep ░░░░░░░░░░░░░░ ████████
      trainer ░ sleep ░░░░░░░░░░░░░░░░░░░░░░░ ████████ train step ██ ░ sleep ░ → publish, save: from host memory
                                            switch                 switch

One of them is awake and the other sleeps. The one that is awake leaves the device before the other returns to it, so
the peak memory is the larger of the two, not their sum. The engine goes to sleep without leases: aborted trajectories
have been reported. It wakes without weights, and serves the version that it loads next.
"""

from __future__ import annotations

from typing import Protocol


class Resident(Protocol):
    """A part that can move off the device and back."""

    def sleep(self) -> None:
        """Free the device memory. Does nothing if already asleep."""
        ...

    def wake_up(self) -> None:
        """Move back to the device. Does nothing if already awake."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory held now."""
        ...


class DeviceOwner(Resident, Protocol):
    """The part that can measure the device's memory."""

    def take_peak_bytes(self) -> int | None:
        """Return this process's peak device memory in bytes since the last call; None if the device does not measure
        it."""
        ...


class DeviceSharing:
    """Switches the device between engine and trainer. The engine has it first."""

    def __init__(self, engine: Resident, trainer: DeviceOwner) -> None:
        """Put the trainer to sleep and wake the engine."""
        self._engine, self._trainer = engine, trainer
        self._peak_bytes = self._engine_bytes = self._trainer_bytes = 0
        self.to_engine()

    def to_engine(self) -> None:
        """Give the device to the engine. Does nothing if it has the device."""
        self._look()
        self._trainer.sleep()
        self._engine.wake_up()
        self._look()

    def to_trainer(self) -> None:
        """Give the device to the trainer. Does nothing if it has the device."""
        self._look()
        self._engine.sleep()
        self._trainer.wake_up()
        self._look()

    def metrics(self) -> dict[str, float]:
        """Return the peak bytes of engine, trainer and both together since the last call."""
        measured = self._trainer.take_peak_bytes()
        peak = self._peak_bytes if measured is None else measured
        values = {
            "memory/engine_bytes": float(self._engine_bytes),
            "memory/trainer_bytes": float(self._trainer_bytes),
            "memory/peak_bytes": float(peak),
        }
        self._peak_bytes = self._engine_bytes = self._trainer_bytes = 0
        self._look()
        return values

    def _look(self) -> None:
        engine, trainer = self._engine.held_bytes, self._trainer.held_bytes
        self._engine_bytes = max(self._engine_bytes, engine)
        self._trainer_bytes = max(self._trainer_bytes, trainer)
        self._peak_bytes = max(self._peak_bytes, engine + trainer)
