"""The numbers that a simulation needs as input. A plan or a recipe is converted to these numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.rollout.settings import Rules
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.timing import Speed, TrainSpeed
from baton.swarm.leases import LeaseRules


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, or one worker of a swarm."""

    name: str
    slots: int
    speed: Speed
    kv_tokens: float = math.inf
    """Number of tokens that fit into the KV cache."""
    weight: float = 1.0
    """Throughput of one slot according to the plan. Only the ratios between the values of several engines matter."""
    num_gpus: int = 1
    kind: str = "embedded"
    """Kind of engine. Engines of the kinds in `OWN_NOISE` generate different tokens under each lease of a
    trajectory."""
    class_cost: float | None = None
    """A decode step divides its rows into length classes; each row attends over the longest context of its class
    (`cost/generate.py: scanned_tokens`). This value is the cost of each additional class. Its unit is the time to
    attend to one position. None means that there are no classes, and every row attends over its own context."""


@dataclass(frozen=True, slots=True)
class ScoringSpec:
    """The reward scorer for finished trajectories."""

    latency_s: float = 0.0
    """Mean number of seconds to score one trajectory."""
    cv: float = 0.0
    """Standard deviation of the lognormal scoring time, divided by its mean."""
    concurrency: int = 1024


@dataclass(frozen=True, slots=True)
class SwarmSpec:
    """Parameters of a hub and its workers; times are in seconds."""

    rules: LeaseRules = field(default_factory=LeaseRules)
    link_s: float = 0.02
    """Latency of a message."""
    fetch_s: float = 1.0
    """Time from the announcement of a version until a worker has fetched, verified and loaded it."""
    heartbeat_s: float = 5.0
    tick_s: float = 1.0
    report_every_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Setting:
    """All inputs of one simulated run."""

    rules: Rules
    engines: tuple[EngineSpec, ...]
    work: TrajectoryWork
    train: TrainSpeed
    judges: ScoringSpec = field(default_factory=ScoringSpec)
    publish_s: float = 0.0
    """Seconds from the end of a train step until engines serve the version or, in a swarm, can fetch it."""
    cycle_overhead_s: float = 0.0
    """Seconds that the controller is busy after each train step and its publication."""
    num_steps: int = 50
    publish_every: int = 1
    """Number of train steps from one published version to the next."""
    checkpoint_every: int = 50
    swarm: SwarmSpec | None = None
    """Hub and workers. None if the engines share one queue and load new weights at the same time."""
    train_slowdown: float = 1.0
    """Factor by which a train step is slower while engines generate on the same machine."""
    engine_slowdown: float = 1.0
    """Factor by which engines are slower during a train step."""
    handover_s: float = 0.0
    """Seconds from an engine's report of a finished trajectory until the engine receives the next trajectory of the
    queue."""
    shares_prefill: bool = True
    price_per_h: float = 0.0
    currency: str = "USD"
    notes: tuple[str, ...] = ()
    """Assumptions of this setting, one sentence each."""

    @property
    def slots(self) -> int:
        return sum(engine.slots for engine in self.engines)
