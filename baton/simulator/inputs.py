"""The inputs of a simulation as numbers, whether they come from a plan or from a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.rollout.settings import Rules
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.timing import Speed, TrainSpeed
from baton.swarm.leases import LeaseRules
from baton.swarm.version_sync import VersionSyncRules


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, or one worker of a swarm."""

    name: str
    slots: int
    speed: Speed
    kv_tokens: float = math.inf
    """Number of tokens that fit into the KV cache."""
    weight: float = 1.0
    """Throughput per slot according to the plan, relative to the other engines."""
    num_gpus: int = 1
    pads: bool = False
    """Whether every trajectory of a decode step attends over the longest running context."""


@dataclass(frozen=True, slots=True)
class ScoringSpec:
    """The reward scorer for finished trajectories."""

    latency_s: float = 0.0
    """Mean time to score one trajectory."""
    cv: float = 0.0
    """Standard deviation of the lognormal scoring time, divided by its mean."""
    concurrency: int = 1024


@dataclass(frozen=True, slots=True)
class SwarmSpec:
    """The numbers of a hub and its workers; times are in seconds."""

    rules: LeaseRules = field(default_factory=LeaseRules)
    have_want: VersionSyncRules = field(default_factory=VersionSyncRules)
    link_s: float = 0.02
    """Latency of a message."""
    fetch_s: float = 1.0
    """Time to fetch and verify an announced version."""
    activate_s: float = 0.0
    """Time to load a fetched version into the engine."""
    heartbeat_s: float = 5.0
    tick_s: float = 1.0
    report_every_s: float = 2.0
    reconnect_s: float = 0.5
    """Wait before the first attempt to reconnect. Each failed attempt doubles the wait, up to 30 s."""


@dataclass(frozen=True, slots=True)
class Setting:
    """All inputs of one simulated run."""

    rules: Rules
    engines: tuple[EngineSpec, ...]
    work: TrajectoryWork
    train: TrainSpeed
    judges: ScoringSpec = field(default_factory=ScoringSpec)
    publish_s: float = 0.0
    """Time from the end of a train step until all engines serve its version, or, in a swarm, until workers can fetch
    the version."""
    num_steps: int = 50
    publish_every: int = 1
    """Number of train steps per published version."""
    checkpoint_every: int = 50
    swarm: SwarmSpec | None = None
    """None if the engines share one queue and load new weights at the same time."""
    train_slowdown: float = 1.0
    """Factor on the time of a train step while engines use the same cores."""
    engine_slowdown: float = 1.0
    """Factor on the times of the engines during a train step."""
    handover_s: float = 0.0
    """Time from an engine's report until the engine receives the next trajectory from the shared queue."""
    shares_prefill: bool = True
    price_per_h: float = 0.0
    currency: str = "USD"
    notes: tuple[str, ...] = ()
    """Assumptions, one sentence each."""

    @property
    def slots(self) -> int:
        return sum(engine.slots for engine in self.engines)
