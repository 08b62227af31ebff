"""Small settings for the simulator's tests, in round numbers."""

from __future__ import annotations

from dataclasses import replace

from baton.rollout.settings import RolloutSettings, Rules
from baton.simulator.faults import FaultSettings, RandomSettings, draw_faults
from baton.simulator.inputs import EngineSpec, ScoringSpec, Setting, SwarmSpec
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.seeds import choices
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.workload import constant, lognormal
from baton.swarm.leases import LeaseRules

MODES = ("sync", "partial", "async")


def rules(mode: str = "sync", **changes: object) -> Rules:
    return RolloutSettings.model_validate({"mode": mode, "batch_groups": 4, "group_size": 2, **changes}).rules()


def setting(mode: str = "sync", *, engines: int = 2, slots: int = 8, steps: int = 10, **changes: object) -> Setting:
    """Engines behind a queue. A step takes 20 ms and a bit for each row; half of a length is its group's."""
    speed = FlatSpeed(0.02, 1e-4, 1e-8, 1e-5)
    base = Setting(
        rules(mode),
        tuple(EngineSpec(f"w{i}", slots, speed) for i in range(engines)),
        TrajectoryWork(constant(16), lognormal(60, 1.0, 400), 0.5),
        TrainSpeed(0.5, 1e-6, 0.0),
        ScoringSpec(0.05, 1.0, 4),
        publish_s=0.1,
        num_steps=steps,
        checkpoint_every=3,
    )
    return replace(base, **changes)


def swarm(mode: str = "async", *, engines: int = 3, slots: int = 4, steps: int = 8, **changes: object) -> Setting:
    """The same as a swarm of impatient people: everything that takes minutes takes seconds."""
    restarts = mode == "sync"
    leases = LeaseRules(
        restarts=restarts, heartbeat_timeout_s=6, progress_timeout_s=10, starve_s=30, backup_lease_after_s=2
    )
    base = setting(mode, engines=engines, slots=slots, steps=steps)
    own = replace(base.rules, is_swarm=True) if mode == "async" else base.rules
    spec = SwarmSpec(leases, report_every_s=1.0, heartbeat_s=1.0, fetch_s=0.3)
    return replace(replace(base, rules=own, swarm=spec), **changes)


def random_case(seed: int, faults: int = 6, until_s: float = 40.0) -> list[FaultSettings]:
    """Random faults; somebody comes in the end, so that the run can go on."""
    drawn = draw_faults(choices(seed, "faults"), RandomSettings(faults=faults, until_s=until_s))
    return [*drawn, FaultSettings(kind="join", at_s=200.0)]
