"""Simulates thousands of random cases with faults: `make chaos`. The number of a case is the seed of its mode, settings
and faults.

    python -m tests.simulator.chaos [CASES] [FIRST]

Every invariant is checked at every event. If a case violates an invariant, its number and the shortest event log found
that reproduces the violation are printed, and the exit code is 1.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from baton.console import out
from baton.rollout.settings import RolloutSettings
from baton.simulator.clock import NoProgress
from baton.simulator.faults import KINDS, FaultSettings, RandomSettings, draw_faults
from baton.simulator.inputs import EngineSpec, ScoringSpec, Setting, SwarmSpec
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.seeds import choices
from baton.simulator.simulation import RunOptions
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.workload import constant, lognormal
from baton.swarm.leases import LeaseRules
from tests.simulator.violations import broken_law, simulate_checked

MODES = ("sync", "partial", "async")
DAYS = 10_000
UNTIL_S = 40.0
"""Time before which all faults begin."""
HELP_S = 200.0
"""Time at which a worker joins, so that a run that has lost all its workers can end."""
LOT = 50
"""Number of cases that a process simulates per task."""


@dataclass(slots=True)
class ChaosSummary:
    """Counts over many cases."""

    days: Counter[str] = field(default_factory=Counter)
    """Number of cases by mode."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of faults and of reactions to them, by name."""
    tokens: int = 0
    violations: dict[int, str] = field(default_factory=dict)
    """Violated invariant, and the event log up to the violation, by case."""

    def add(self, other: ChaosSummary) -> None:
        self.days += other.days
        self.outcomes += other.outcomes
        self.tokens += other.tokens
        self.violations |= other.violations


def random_case(number: int) -> tuple[Setting, RunOptions]:
    """Return the setting and options of a case: three workers, with timeouts of seconds in place of minutes."""
    draw = choices(number, "day")
    mode = MODES[number % len(MODES)]
    keys: dict[str, object] = {
        "mode": mode,
        "batch_groups": 4,
        "group_size": 2,
        "dynamic_sampling": draw.random() < 0.3,
    }
    bound, every = 0, 1
    if mode != "sync":
        bound = draw.randint(1, 4)
        keys |= {"stale": draw.choice(("mask", "drop")), "max_staleness": bound, "max_requeues": 1}
    if mode == "partial":
        keys["overprovision"] = min(bound + 1.0, draw.choice((1.0, 1.5, 2.0, 3.0)))
    if mode == "async":
        keys["on_new_version"] = draw.choice(("resume", "keep"))
        every = min(bound, draw.randint(1, 3))
    rules = RolloutSettings.model_validate(keys).rules()
    if mode == "async":
        rules = replace(rules, is_swarm=True, max_lag=bound - every + 1 if bound >= 2 * every - 1 else 0)
    leases = LeaseRules(
        restarts=mode == "sync", heartbeat_timeout_s=6, progress_timeout_s=10, starve_s=30, backup_lease_after_s=2
    )
    setting = Setting(
        rules,
        tuple(EngineSpec(f"w{index}", 4, FlatSpeed(0.02, 1e-4, 1e-8, 1e-5)) for index in range(3)),
        TrajectoryWork(constant(16), lognormal(60, 1.0, 400), 0.5, trained_share=draw.choice((0.8, 1.0))),
        TrainSpeed(0.5, 1e-6, 0.0),
        ScoringSpec(draw.choice((0.0, 0.05, 0.3)), 1.0, 4),
        publish_s=0.1,
        num_steps=draw.randint(4, 8),
        publish_every=every,
        checkpoint_every=3,
        swarm=SwarmSpec(leases, report_every_s=1.0, heartbeat_s=1.0, fetch_s=0.3),
    )
    faults = draw_faults(choices(number, "faults"), RandomSettings(faults=draw.randint(0, 12), until_s=UNTIL_S))
    if draw.random() < 0.5:  # engines of two kinds, of which one has noise of its own; a worker with wrong tokens
        kinds = (draw.choice(("embedded", "vllm")) for _ in setting.engines)
        own = tuple(replace(spec, kind=kind) for spec, kind in zip(setting.engines, kinds, strict=True))
        setting = replace(setting, engines=own)
        for_s = draw.choice((0.0, 5.0))
        faults.append(FaultSettings(kind="wrong", at_s=round(draw.random() * UNTIL_S / 2, 3), for_s=for_s))
    return setting, RunOptions(number, [*faults, FaultSettings(kind="join", at_s=HELP_S)])


def live_through(numbers: Iterable[int]) -> ChaosSummary:
    """Simulate these cases."""
    found = ChaosSummary()
    for number in numbers:
        setting, options = random_case(number)
        found.days[setting.rules.mode] += 1
        try:
            record = simulate_checked(setting, options)
        except (AssertionError, NoProgress) as error:
            violation = broken_law(setting, options)
            found.violations[number] = violation.sentence() if violation is not None else f"not reproduced: {error}"
            continue
        found.outcomes += record.outcomes
        found.tokens += record.generated
    return found


def survey(days: int, first: int = 0, processes: int = 1) -> ChaosSummary:
    """Simulate `days` cases from number `first` on, in several processes."""
    lots = [range(start, min(start + LOT, first + days)) for start in range(first, first + days, LOT)]
    found = ChaosSummary()
    if processes == 1:
        for lot in lots:
            found.add(live_through(lot))
        return found
    with ProcessPoolExecutor(processes) as pool:
        for part in pool.map(live_through, lots):
            found.add(part)
    return found


def sentences(found: ChaosSummary, seconds: float) -> Iterator[str]:
    """Yield the lines of the summary."""
    modes = ", ".join(f"{count:,} {mode}" for mode, count in found.days.items())
    yield f"{found.days.total():,} random cases ({modes}), {found.tokens:,} tokens, {seconds:.0f} s"
    faults = {kind: found.outcomes[f"fault: {kind}"] for kind in KINDS}
    yield f"{sum(faults.values()):,} faults: " + ", ".join(f"{count:,} {kind}" for kind, count in faults.items())
    done = {name: count for name, count in sorted(found.outcomes.items()) if not name.startswith("fault: ")}
    yield "outcomes: " + ", ".join(f"{count:,} × {name}" for name, count in done.items())
    for number, sentence in found.violations.items():
        yield f"\ncase {number}: {sentence}"
    yield f"cases with a violated invariant: {len(found.violations)}"


def main(arguments: list[str]) -> int:
    """Simulate cases and print the results; return 1 if an invariant was violated."""
    numbers = [int(text) for text in arguments]
    begin_s = time.monotonic()
    days, first = [*numbers, *(DAYS, 0)[len(numbers) :]][:2]
    found = survey(days, first, os.cpu_count() or 1)
    for sentence in sentences(found, time.monotonic() - begin_s):
        out.print(sentence, soft_wrap=True)
    return int(bool(found.violations))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
