"""How much overprovision = "auto" gains over whole runs, compared with `sync` and fixed values. A simulation: the
scheduler of a run in virtual time.

    python -m benchmarks.auto_provision.run                # two minutes of one core; writes results/, needs matplotlib
    python -m benchmarks.auto_provision.run --record RUN   # writes results/quickstart_lengths.json from a run

All arms of a seed have the same response lengths, in the order in which groups are opened.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.rollout.settings import RolloutSettings
from baton.simulator.input_sources import recorded_groups
from baton.simulator.inputs import EngineSpec, Setting
from baton.simulator.run import build
from baton.simulator.scripted_trajectories import ScriptedGroup, TrajectoryWork
from baton.simulator.simulation import EventObserver, RunOptions, Simulation
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.workload import constant, lognormal
from benchmarks.machine import machine

RESULTS = Path(__file__).parent / "results"
LENGTHS = RESULTS / "quickstart_lengths.json"
GROUPS, SIZE, SLOTS, STEPS = 16, 8, 256, 60
PROMPT, LONGEST, WARM_UP = 200, 16384, 10
ENGINES = {
    "memory-bound": FlatSpeed(0.02, 1e-6, token_s=3e-5),
    "compute-bound": FlatSpeed(0.001, 8e-5, token_s=3e-5),
}
"""Step times as in docs/papers.md: the time of a decode step hardly depends on its width, or is proportional to it."""
TRAIN = TrainSpeed(1.0, 1.4e-5, 0.0)
ARMS: dict[str, dict[str, Any]] = {
    "sync": {},
    **{f"{value:g}": {"mode": "partial", "overprovision": value} for value in (1.25, 1.5, 2.0, 3.0)},
    "auto": {"mode": "partial", "overprovision": "auto"},
}


def _lognormal(rng: np.random.Generator, mean: float, cv: float, count: int) -> Any:
    """Lognormal lengths of groups. Half of the variance of the logarithm is between groups."""
    values = np.asarray(lognormal(mean, cv, LONGEST).values)
    score = np.sqrt(0.5) * (rng.standard_normal((count, 1)) + rng.standard_normal((count, SIZE)))
    ranks = np.array([[0.5 * (1 + math.erf(x / math.sqrt(2))) for x in row] for row in score])
    return values[np.minimum((ranks * len(values)).astype(int), len(values) - 1)]


def lengths(tail: str, seed: int, count: int) -> Any:
    """Return the response lengths of `count` groups, shape [count, SIZE]."""
    rng = np.random.default_rng([seed, len(tail)])
    if tail == "light":
        return _lognormal(rng, 1000, 0.4, count)
    if tail == "heavy":
        return _lognormal(rng, 1000, 1.5, count)
    if tail == "bimodal":  # one of ten responses is ten times as long, in half of the groups none
        is_hard = rng.random((count, 1)) < 0.5
        is_long = is_hard & (rng.random((count, SIZE)) < 0.2)
        return np.where(is_long, _lognormal(rng, 5000, 0.2, count), _lognormal(rng, 500, 0.2, count))
    if tail == "shifting":  # light, then heavy, then light and twice as long
        third = GROUPS * STEPS // 3
        parts = ((1000, 0.4, third), (1000, 1.5, third), (2000, 0.4, count - 2 * third))
        return np.concatenate([_lognormal(rng, mean, cv, num) for mean, cv, num in parts])
    recorded = json.loads(LENGTHS.read_text())["lengths"]
    groups = np.asarray(recorded)
    # neighbouring groups exchange places, so that seeds differ and the drift of the run remains
    order = np.argsort(np.arange(len(groups)) + rng.uniform(0, 2 * GROUPS, len(groups)))
    return np.resize(groups[order], (count, SIZE))


TAILS = ("light", "heavy", "bimodal", "shifting", "quickstart")
"""`quickstart`: the lengths that a training run of recipes/quickstart.toml generated."""


class _Course(EventObserver):
    """Over-provision at each version."""

    world: Simulation

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_event(self, event: object) -> None:
        pass

    def on_command(self, command: object) -> None:
        pass

    def settled(self, event: object) -> None:
        if self.world.version == len(self.values):
            self.values.append(self.world.scheduler.overprovision)


def simulate(tail: str, engine: str, arm: str, seed: int) -> dict[str, Any]:
    """Simulate one run; return its figures, the start included, and the course of over-provision."""
    drawn = lengths(tail, seed, GROUPS * (STEPS + 8))
    groups = tuple(ScriptedGroup(PROMPT, tuple(int(max(1, n)) for n in row), True) for row in drawn)
    settings = RolloutSettings.model_validate({"batch_groups": GROUPS, "group_size": SIZE, **ARMS[arm]})
    setting = Setting(
        settings.rules(),
        (EngineSpec("engine", SLOTS, ENGINES[engine]),),
        TrajectoryWork(constant(PROMPT), constant(1), recorded=groups),
        TRAIN,
        publish_s=1.0,
        num_steps=STEPS,
    )
    world, course = build(setting, RunOptions(seed)), _Course()
    course.world = world
    world.watches.append(course)
    record = world.run()
    course.settled(None)
    steps = record.steps
    consumed = sum(step.counts.consumed_tokens for step in steps)
    masked = sum(step.counts.masked_tokens for step in steps)
    stale = sum(age * num for step in steps for age, num in step.staleness.items())
    # since the last groups of a run are not over-provisioned, its end costs all arms alike
    late = steps[WARM_UP:]
    return {
        "hours": record.seconds / 3600,
        "steps_per_h": STEPS / record.seconds * 3600,
        "trained_tokens_per_s": (consumed - masked) / record.seconds,
        "mean_staleness": stale / max(1, consumed),
        "masked_frac": masked / max(1, consumed),
        "reprefilled_frac": sum(s.counts.reprefilled_tokens for s in steps)
        / max(1, sum(s.counts.generated_tokens for s in steps)),
        "occupancy": sum(s.counts.busy_slot_s for s in late) / max(1e-9, sum(s.counts.slot_s for s in late)),
        "overprovision": [round(value, 3) for value in course.values],
    }


def record_lengths(run: Path) -> None:
    """Write the response lengths of a run's groups, in the order in which they were opened."""
    groups = recorded_groups(run)
    commit = json.loads((run / "run.json").read_text())["commit"]
    RESULTS.mkdir(exist_ok=True)
    content = {"run": "recipes/quickstart.toml", "commit": commit, "lengths": [group.lengths for group in groups]}
    LENGTHS.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def main() -> None:
    """Simulate all arms, and write the results, the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="directory of a run whose response lengths are written")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS, help="simulate only this arm, and keep the results of the others")
    parser.add_argument("--table", action="store_true", help="only write table and picture from results.json")
    arguments = parser.parse_args()
    if arguments.record is not None:
        record_lengths(arguments.record)
        return
    path = RESULTS / "results.json"
    if not arguments.table:
        shape = {"groups": GROUPS, "size": SIZE, "slots": SLOTS, "steps": STEPS}
        known = json.loads(path.read_text())["rows"] if arguments.arm else []
        rows = [row for row in known if row["arm"] != arguments.arm]
        found: dict[str, Any] = {"machine": machine(), **shape, "rows": rows}
        for seed in range(arguments.seeds):
            for engine in ENGINES:
                for tail in TAILS:
                    for arm in [arguments.arm] if arguments.arm else ARMS:
                        about = {"engine": engine, "tail": tail, "arm": arm, "seed": seed}
                        found["rows"].append(about | simulate(tail, engine, arm, seed))
                    print(seed, engine, tail, flush=True)
                    path.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    rows = json.loads(path.read_text())["rows"]
    (RESULTS / "table.md").write_text(make_table(rows))
    draw(rows, RESULTS / "auto_provision.png")
    print(make_table(rows))


STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}
"""Number of seeds → 97.5 % quantile of Student's distribution."""


def ratios(rows: Sequence[dict[str, Any]], engine: str, tail: str, arm: str, base: str = "sync") -> list[float]:
    """Return, for each seed, the trained tokens per second of an arm divided by those of `base`."""
    rate = {
        (r["arm"], r["seed"]): r["trained_tokens_per_s"] for r in rows if (r["engine"], r["tail"]) == (engine, tail)
    }
    return [rate[arm, seed] / rate[base, seed] for name, seed in rate if name == arm]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of the 95 % interval."""
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), half


def make_table(rows: Sequence[dict[str, Any]]) -> str:
    """One row per engine, tail and arm: means over the seeds, with intervals of the speed."""
    lines = []
    for engine in ENGINES:
        lines += [
            f"**{engine} engine, simulated**",
            "",
            "| lengths | arm | trained tokens/s ÷ `sync` | ÷ best fixed | steps per hour | mean staleness "
            "| masked tokens | prefilled again | slots in use |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for tail in TAILS:
            fixed = [arm for arm in ARMS if arm not in ("sync", "auto")]
            best = max(fixed, key=lambda arm: statistics.fmean(ratios(rows, engine, tail, arm)))
            for arm in ARMS:
                some = [r for r in rows if (r["engine"], r["tail"], r["arm"]) == (engine, tail, arm)]
                speed, half = interval(ratios(rows, engine, tail, arm))
                of_best, half_of_best = interval(ratios(rows, engine, tail, arm, best))
                name = "**auto**" if arm == "auto" else f"{arm} (best fixed)" if arm == best else arm
                beside = f"{of_best:.2f} ± {half_of_best:.2f}" if arm == "auto" else f"{of_best:.2f}"
                mean = {key: statistics.fmean(r[key] for r in some) for key in some[0] if key.endswith(_MEANS)}
                cells = [tail, name, f"{speed:.2f}" + (f" ± {half:.2f}" if arm != "sync" else ""), beside]
                cells += [f"{mean['steps_per_h']:.0f}", f"{mean['mean_staleness']:.2f}"]
                cells += [f"{100 * mean[key]:.0f} %" for key in ("masked_frac", "reprefilled_frac", "occupancy")]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


_MEANS = ("_h", "staleness", "_frac", "occupancy")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed of all arms by lengths, and the course of `auto`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(ENGINES), figsize=(9.5, 5.4), layout="constrained", squeeze=False)
    for column, engine in enumerate(ENGINES):
        above, below = axes[0][column], axes[1][column]
        for number, arm in enumerate(ARMS):
            found = [interval(ratios(rows, engine, tail, arm)) for tail in TAILS]
            places = [place + 0.14 * (number - (len(ARMS) - 1) / 2) for place in range(len(TAILS))]
            color = "black" if arm == "auto" else f"C{number}"
            above.bar(places, [v for v, _ in found], 0.13, yerr=[h for _, h in found], color=color, label=arm,
                      error_kw={"linewidth": 0.7})  # fmt: skip
        above.set_xticks(range(len(TAILS)), TAILS, fontsize=8)
        above.set_title(f"trained tokens/s ÷ sync, {engine} engine (simulated)", fontsize=9, loc="left")
        for number, tail in enumerate(TAILS):
            runs = [r["overprovision"] for r in rows if (r["engine"], r["tail"], r["arm"]) == (engine, tail, "auto")]
            below.plot([statistics.fmean(each) for each in zip(*runs, strict=True)], color=f"C{number}", label=tail)
        below.set_title("over-provision that auto chose, mean of the seeds (simulated)", fontsize=9, loc="left")
        below.set_xlabel("batch")
        below.set_ylim(0.9, 4.1)
        for part in (above, below):
            part.grid(alpha=0.25)
            part.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    axes[1][0].legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
