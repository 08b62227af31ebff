"""Decides whether the workers keep the trainer busy, by the provisioning rule of Echo-2 (arXiv 2602.02192).

While the trainer computes κ train steps, the workers must receive one new version and generate κ·R trajectories:

    κ·T_train ≥ T_broadcast + κ·R / Σμ        so        Σμ ≥ κ·R / (κ·T_train − T_broadcast)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.types import Group

MEMORY = 2048
"""The rate of finished trajectories per second is computed from this number of the latest trajectories."""


@dataclass(frozen=True, slots=True)
class Provisioning:
    """The quantities of the provisioning rule, measured at one time of a run."""

    publish_every: int
    """κ: number of train steps from one published version to the next."""
    train_s: float
    """T_train: seconds of a train step."""
    broadcast_s: float
    """T_broadcast: seconds from the end of a train step until the workers serve the new version; 0 if the workers get
    leases while they fetch that version."""
    trajectories_per_step: int
    """R: number of trajectories that one train step consumes."""
    trajectories_per_s: float
    """Σμ: number of trajectories that all workers together finish per second. Time in which no worker holds a lease is
    not counted."""

    @property
    def needed_per_s(self) -> float | None:
        """Trajectories per second that would keep the trainer busy; None if no number of workers could keep it busy."""
        window_s = self.publish_every * self.train_s - self.broadcast_s
        return self.publish_every * self.trajectories_per_step / window_s if window_s > 0 else None

    @property
    def slack_s(self) -> float | None:
        """Seconds by which the workers finish earlier than the trainer in each period of `publish_every` train steps.
        Negative if the trainer must wait; None before the first trajectory is measured."""
        if not self.trajectories_per_s:
            return None
        generating_s = self.publish_every * self.trajectories_per_step / self.trajectories_per_s
        return self.publish_every * self.train_s - self.broadcast_s - generating_s

    @property
    def idle_share(self) -> float | None:
        """Predicted fraction of the time in which the trainer waits for trajectories; None before the first
        trajectory."""
        slack_s = self.slack_s
        if slack_s is None:
            return None
        waiting_s = max(0.0, -slack_s)
        return waiting_s / max(1e-9, self.publish_every * self.train_s + waiting_s)

    def sentence(self) -> str:
        """Return the result as a sentence for users."""
        if not self.train_s or not self.trajectories_per_s:
            missing = "train step" if not self.train_s else "trajectory"
            return f"no {missing} has finished yet, so it is unknown whether the workers are enough"
        needed = self.needed_per_s
        has = f"workers finish {self.trajectories_per_s:.1f} trajectories/s"
        if needed is None:
            return (
                f"{has}; no number of workers keeps the trainer busy: a version takes {self.broadcast_s:.1f} s to "
                f"reach them, but {self.publish_every} train steps take {self.publish_every * self.train_s:.1f} s; "
                "raise swarm.publish_every"
            )
        verdict = "enough" if self.trajectories_per_s >= needed else "too few"
        return f"{has}, which is {verdict}: the trainer needs {needed:.1f}"


@dataclass(slots=True)
class ThroughputTracker:
    """Measurements of one hub. The hub's thread writes these measurements, and the controller's thread reads them."""

    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    """Seconds between consecutive finished trajectories. Time in which no worker had a lease is not counted."""
    last_s: float = 0.0
    announced: dict[int, float] = field(default_factory=dict)
    """Version → time at which the trainer published it. An entry is removed when all workers serve the version."""
    broadcast_s: float = 0.0
    """Seconds from the publication of a version until all workers served it. Measured for the latest version that all
    workers have served."""

    def finish(self, now_s: float, busy_since_s: float) -> None:
        """Record a finished trajectory. `busy_since_s`: start of the current period in which workers have leases."""
        self.gaps_s.append(max(0.0, now_s - max(self.last_s, busy_since_s)))
        self.last_s = now_s

    def per_s(self) -> float:
        """Return the trajectories per second over the last `MEMORY` trajectories; 0 for fewer than two."""
        gaps = list(self.gaps_s)
        return len(gaps) / max(1e-6, sum(gaps)) if len(gaps) > 1 else 0.0

    def serve(self, now_s: float, served: Iterable[int | None]) -> None:
        """Update `broadcast_s`. `served`: version number of each connected worker; None if it serves no version."""
        slowest = min((-1 if number is None else number for number in served), default=-1)
        for number in [n for n in self.announced if n <= slowest]:
            self.broadcast_s = now_s - self.announced.pop(number)


@dataclass(slots=True)
class TrainingProgress:
    """Progress of the trainer. The controller's thread writes these values, and the hub's thread reads them."""

    publish_every: int
    trajectories_per_step: int
    is_broadcast_hidden: bool = False
    """True if workers get leases while they fetch a version, so that they never wait for a version. This is the case if
    `swarm.max_lag` ≥ `publish_every`."""
    step: int = 0
    train_s: float = 0.0
    """Duration of the last train step in seconds."""
    staleness: dict[str, float] = field(default_factory=dict)
    """Staleness in versions → share of the last batch's tokens."""

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        self.step = step
        trajectories = [member.trajectory for group in groups for member in group.members]
        ages = Counter(step - 1 - version for t in trajectories for version in t.policy_versions)
        self.staleness = {str(age): num / max(1, ages.total()) for age, num in sorted(ages.items())}

    def provisioning(self, pace: ThroughputTracker) -> Provisioning:
        broadcast_s = 0.0 if self.is_broadcast_hidden else pace.broadcast_s
        return Provisioning(self.publish_every, self.train_s, broadcast_s, self.trajectories_per_step, pace.per_s())
