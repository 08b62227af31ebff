"""The trainer in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.simulator.clock import VirtualClock
from baton.simulator.inputs import Setting
from baton.simulator.transport import SimulatedTransport
from baton.trainer.trainer import Pending, PublishedWeights
from baton.types import Batch, PolicyVersion

CLOSE = 1e-9
"""Relative tolerance for the end of a train step, because of rounding errors."""


@dataclass(slots=True, eq=False)
class VirtualTrainer:
    """A `StepTrainer` whose train steps only take time."""

    setting: Setting
    clock: VirtualClock
    port: SimulatedTransport
    is_generating: Callable[[], bool]
    """Whether a trajectory is leased."""
    version: PolicyVersion

    def start(self, batch: Batch, *, in_background: bool) -> Pending:
        return VirtualStep(self, batch, in_background=in_background)

    def publish(self) -> PublishedWeights:
        return PublishedWeights(self.version, {})


class VirtualStep(Pending):
    """A train step in virtual time. With `in_background`, trainer and engines are slower while both are busy. `result`
    returns the metrics `begin_s` and `end_s`."""

    def __init__(self, trainer: VirtualTrainer, batch: Batch, *, in_background: bool) -> None:
        self._trainer, self._clock, self._step = trainer, trainer.clock, batch.step
        self._in_background = in_background
        self._left_s = trainer.setting.train.step_s(batch.groups)
        """Remaining time of the step under the assumption that no trajectory runs."""
        self._begin_s = self._last_s = self._clock.now_s
        self._slowdown = 0.0
        """Slowdown of the step since `_last_s`: the ratio of its actual duration to its duration without running
        trajectories. 0 before the first call to `_has_ended`."""
        if in_background:
            trainer.port.slow(trainer.setting.engine_slowdown)

    def wait(self, timeout_s: float) -> bool:
        return self._clock.poll(timeout_s, self._has_ended)

    def result(self) -> dict[str, float]:
        while not self.wait(1.0):
            pass
        self._trainer.version = PolicyVersion(self._trainer.version.lineage, self._step, f"digest {self._step}")
        return {"begin_s": self._begin_s, "end_s": self._clock.now_s}

    def close(self) -> None:
        self._trainer.port.slow(1.0)

    def _has_ended(self) -> bool:
        clock, trainer = self._clock, self._trainer
        if self._slowdown:
            self._left_s -= (clock.now_s - self._last_s) / self._slowdown
        is_slow = self._in_background and trainer.is_generating()
        self._last_s, slowdown = clock.now_s, trainer.setting.train_slowdown if is_slow else 1.0
        if slowdown != self._slowdown and self._left_s > 0:
            self._slowdown = slowdown
            clock.after(self._left_s * slowdown, lambda: None)
        return self._left_s <= CLOSE * max(1.0, clock.now_s)
