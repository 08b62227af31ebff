"""What is simulated: a run in numbers, wherever they come from."""

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
    """Its share of the work by the plan, against others of as many slots."""
    num_gpus: int = 1
    pads: bool = False
    """Whether a step reads as far for every row as for the longest that runs."""


@dataclass(frozen=True, slots=True)
class ScoringSpec:
    """Whoever judges finished trajectories."""

    latency_s: float = 0.0
    """Mean."""
    cv: float = 0.0
    """Standard deviation over mean; lognormal."""
    concurrency: int = 1024


@dataclass(frozen=True, slots=True)
class SwarmSpec:
    """A hub and its workers; times in seconds."""

    rules: LeaseRules = field(default_factory=LeaseRules)
    have_want: VersionSyncRules = field(default_factory=VersionSyncRules)
    link_s: float = 0.02
    """A message on its way."""
    fetch_s: float = 1.0
    """A worker's fetching and verifying a version that is announced."""
    activate_s: float = 0.0
    """Switching the engine to it."""
    heartbeat_s: float = 5.0
    tick_s: float = 1.0
    report_every_s: float = 2.0
    reconnect_s: float = 0.5
    """First wait after a cut; doubled each time, at most 30 s."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A run."""

    rules: Rules
    engines: tuple[EngineSpec, ...]
    work: TrajectoryWork
    train: TrainSpeed
    judges: ScoringSpec = field(default_factory=ScoringSpec)
    publish_s: float = 0.0
    """From the end of a train step until all engines serve its version, or, in a swarm, until it can be fetched."""
    num_steps: int = 50
    publish_every: int = 1
    """Versions of which one is published."""
    checkpoint_every: int = 50
    swarm: SwarmSpec | None = None
    """None: engines behind one queue, that exchange weights together."""
    train_slowdown: float = 1.0
    """Factor on the trainer while engines work: cores that they share."""
    engine_slowdown: float = 1.0
    """Factor on engines while the trainer works."""
    handover_s: float = 0.0
    """From an engine's report until the next trajectory is with it, where a queue feeds engines."""
    shares_prefill: bool = True
    trainer_gpus: int = 0
    price_per_h: float = 0.0
    currency: str = "USD"
    notes: tuple[str, ...] = ()
    """What was assumed, in sentences."""

    @property
    def slots(self) -> int:
        return sum(engine.slots for engine in self.engines)
