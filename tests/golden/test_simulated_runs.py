"""Simulated runs decide, and measure, as they did when they were recorded: see `test_decisions.py`.

Times are left out of the logs, and figures are rounded to six digits: the last bits of a drawn length or latency may
depend on the CPU. After a deliberate change of a decision, of the simulator or of its figures, and only then:

    python tests/golden/test_simulated_runs.py --record
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from neutral import LEASES, SCHEDULER, Draw, canonical, difference, digest, row, text
from scheduler_story import draw_rules

from baton.simulator.faults import FaultSettings, RandomSettings, draw_faults
from baton.simulator.inputs import EngineSpec, ScoringSpec, Setting, SwarmSpec
from baton.simulator.result import Result, summarise
from baton.simulator.run import build
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.seeds import choices
from baton.simulator.simulation import EventObserver, RunOptions
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.workload import constant, lognormal
from baton.swarm import lease_events
from baton.swarm.leases import LeaseRules

FOLDER = Path(__file__).parent / "decisions"
SEEDS = 20
"""Even ones run engines behind a queue, odd ones a swarm with faults."""
MODES = ("sync", "partial", "async")
HEADER = """\
# Simulated runs in mode {mode}, by seed: digest and length of the log of decisions, then figures of the run.
# Recorded by `python tests/golden/test_simulated_runs.py --record`; run it only for a deliberate change.
"""


class Watch(EventObserver):
    """Keeps every event and command without its time."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_event(self, event: msgspec.Struct) -> None:
        self.add(">", event)

    def on_command(self, command: msgspec.Struct) -> None:
        self.add("<", command)

    def add(self, mark: str, message: msgspec.Struct) -> None:
        is_lease = type(message).__module__ == lease_events.__name__
        dialect, mark = (LEASES, f"hub {mark}") if is_lease else (SCHEDULER, mark)
        self.lines.append(f"{mark} {text(dialect, row(dialect, message), first=int(mark.endswith('>')))}")


def setting(mode: str, seed: int) -> Setting:
    """Two engines of which one is slower, lengths that differ much; in a swarm everything takes seconds."""
    rules, every = draw_rules(Draw(f"simulated/{mode}/{seed}"), mode)
    rules = replace(rules, batch_groups=4, group_size=2, dynamic_sampling=False, is_swarm=False, max_lag=0)
    fast, slow = FlatSpeed(0.02, 1e-4, 1e-8, 1e-5), FlatSpeed(0.05, 1e-4, 1e-8, 1e-5)
    queue = Setting(
        rules,
        (EngineSpec("fast", 8, fast), EngineSpec("slow", 4, slow)),
        TrajectoryWork(constant(16), lognormal(60, 1.0, 400), 0.5),
        TrainSpeed(0.5, 1e-6, 0.0),
        ScoringSpec(0.05, 1.0, 4),
        publish_s=0.1,
        num_steps=6,
        checkpoint_every=3,
    )
    if seed % 2 == 0:
        return queue
    if mode == "async":
        every = min(every, rules.max_staleness + 1)
        rules = replace(rules, is_swarm=True, max_lag=every if rules.max_staleness >= 2 * every - 1 else 0)
    leases = LeaseRules(
        restarts=mode == "sync", heartbeat_timeout_s=6, progress_timeout_s=10, starve_s=30, backup_lease_after_s=2
    )
    spec = SwarmSpec(leases, report_every_s=1.0, heartbeat_s=1.0, fetch_s=0.3)
    return replace(queue, rules=rules, swarm=spec, publish_every=every if mode == "async" else 1)


def figures(result: Result) -> Mapping[str, object]:
    """The numbers of a summary, by neutral names."""
    tokens = list(result.tokens.values())
    times_s = (result.seconds, result.step_s, result.step_s_spread, result.wait_s, result.train_s)
    rates_per_s = (result.trained_tokens_per_s, result.generated_tokens_per_s, result.trajectories_per_s)
    return {
        "times": _rounded(times_s),
        "rates": _rounded(rates_per_s),
        "busy": _rounded((result.trainer_busy, result.rollout_occupancy)),
        "staleness": {str(lag): f"{share:.6g}" for lag, share in result.staleness.items()},
        "carried": _rounded((result.carried_groups, result.carry_age, result.reprefilled_share, result.masked_share)),
        "tokens": tuple(
            tokens[:7] + sorted(tokens[7:])
        ),  # those that were lost are in the order of their causes' names
    }


def _rounded(values: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(f"{value:.6g}" for value in values)


def text_of(mode: str) -> str:
    """Return what a golden file says."""
    lines = [HEADER.format(mode=mode)]
    for seed in range(SEEDS):
        of = setting(mode, seed)
        drawn = draw_faults(choices(seed, "faults"), RandomSettings(faults=5, until_s=15.0)) if of.swarm else []
        faults = [*drawn, FaultSettings(kind="join", at_s=100.0)] if of.swarm else []
        watch = Watch()
        result = summarise(of, build(of, RunOptions(seed, faults, log=watch)).run())
        lines.append(f"{seed} {digest(watch.lines)} {len(watch.lines)} {canonical(figures(result))}\n")
    return "".join(lines)


@pytest.mark.parametrize("mode", MODES)
def test_simulated_runs_are_those_that_were_recorded(mode: str) -> None:
    golden, now = (FOLDER / f"simulated-{mode}.txt").read_text(), text_of(mode)
    if now != golden:
        pytest.fail(f"{mode}: other runs than were recorded\n{difference(golden, now)}", pytrace=False)


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit(f"{__doc__}")
    for chosen in MODES:
        (FOLDER / f"simulated-{chosen}.txt").write_text(text_of(chosen))
