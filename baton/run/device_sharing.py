"""One device that trainer and engine use in turn (`rollout.placement = "colocated"`).

      engine  ████████████ generate, evaluate ░ rests ░░░░░░░░░░░░░░ ████████
      trainer ░ rests ░░░░░░░░░░░░░░░░░░░░░░░ ████████ train step ██ ░ rests ░ → publish, save: from the host
                                            turn                    turn

Whoever has its turn is awake, the other rests: whoever leaves does so before the other comes, so that the device holds
the larger of the two and never their sum. The engine leaves with no lease in its hands: what was put down has been
reported. It wakes without a version, and serves the one that it is given next.
"""

from __future__ import annotations

from typing import Protocol


class Resident(Protocol):
    """Somebody who can leave the device to another, and come back."""

    def rest(self) -> None:
        """Leave the device; does nothing at rest."""
        ...

    def wake(self) -> None:
        """Come back; does nothing where it is awake."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that it holds now."""
        ...


class DeviceOwner(Resident, Protocol):
    """The resident that knows the device."""

    def take_peak_bytes(self) -> int | None:
        """Return the most bytes of the device that this process held since the last call; None where nobody counts."""
        ...


class DeviceSharing:
    """Who has the device. The engine, at the beginning."""

    def __init__(self, engine: Resident, trainer: DeviceOwner) -> None:
        """Let the trainer rest and the engine wake."""
        self._engine, self._trainer = engine, trainer
        self._peak_bytes = self._engine_bytes = self._trainer_bytes = 0
        self.to_engine()

    def to_engine(self) -> None:
        """Let the engine have the device. Does nothing where it has."""
        self._look()
        self._trainer.rest()
        self._engine.wake()
        self._look()

    def to_trainer(self) -> None:
        """Let the trainer have the device. Does nothing where it has."""
        self._look()
        self._engine.rest()
        self._trainer.wake()
        self._look()

    def metrics(self) -> dict[str, float]:
        """Return what each of them, and both together, held at most since the last call."""
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
