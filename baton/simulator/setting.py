"""What is simulated: a run in numbers, independent of their source."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.rollout.settings import Rules
from baton.simulator.script import TrajectoryWork
from baton.simulator.timing import Speed, TrainSpeed
from baton.swarm.lease_rules import LeaseRules
from baton.swarm.version_sync import VersionSyncRules


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, or one worker of a swarm."""

    name: str
    slots: int
    speed: Speed
    kv_tokens: float = math.inf
    """Tokens that its KV cache holds."""
    weight: float = 1.0
    """Share of the work per slot by the plan, relative to other engines."""
    num_gpus: int = 1
    pads: bool = False
    """Whether every row of a step attends over the longest running context."""


@dataclass(frozen=True, slots=True)
class ScoringSpec:
    """The reward scorer for finished trajectories."""

    latency_s: float = 0.0
    """Mean time of one scoring."""
    cv: float = 0.0
    """Standard deviation over mean; lognormal."""
    concurrency: int = 1024


@dataclass(frozen=True, slots=True)
class SwarmSpec:
    """A hub and its workers; times in seconds."""

    rules: LeaseRules = field(default_factory=LeaseRules)
    have_want: VersionSyncRules = field(default_factory=VersionSyncRules)
    link_s: float = 0.02
    """Latency of a message."""
    fetch_s: float = 1.0
    """Time in which a worker fetches and verifies an announced version."""
    activate_s: float = 0.0
    """Time in which the engine switches to it."""
    heartbeat_s: float = 5.0
    tick_s: float = 1.0
    report_every_s: float = 2.0
    reconnect_s: float = 0.5
    """First wait before reconnecting; doubled after each failure, at most 30 s."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    rules: Rules
    engines: tuple[EngineSpec, ...]
    work: TrajectoryWork
    train: TrainSpeed
    judges: ScoringSpec = field(default_factory=ScoringSpec)
    publish_s: float = 0.0
    """Time from the end of a train step until all engines serve its version, or, in a swarm, until it can be
    fetched."""
    num_steps: int = 50
    publish_every: int = 1
    """One of this many versions is published."""
    checkpoint_every: int = 50
    swarm: SwarmSpec | None = None
    """None: engines share one queue and exchange weights together."""
    train_slowdown: float = 1.0
    """Slowdown of the trainer while engines work on the same cores."""
    engine_slowdown: float = 1.0
    """Slowdown of the engines while the trainer works."""
    handover_s: float = 0.0
    """Time from an engine's report until it receives the next trajectory, if a queue feeds engines."""
    shares_prefill: bool = True
    trainer_gpus: int = 0
    price_per_h: float = 0.0
    currency: str = "USD"
    notes: tuple[str, ...] = ()
    """Assumptions, one sentence each."""

    @property
    def slots(self) -> int:
        return sum(engine.slots for engine in self.engines)
