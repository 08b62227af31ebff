"""Which response lengths are over-represented when a batch stops before its longest responses, and what does it cost to
correct this? A simulation: the scheduler and controller of a run, with an engine without a model.

    python -m benchmarks.length_bias.run             # ten minutes of one core; writes results/, needs matplotlib

All arms have the same slots, lengths and number of batches. The clock counts decode steps, each of which takes the same
time, and prefill is free. Response lengths are lognormal with a maximum, and correlated within groups.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from baton.profile.bench import FlatTransport, NoJudges, NumberedPrompts, ScriptedLengths
from baton.records.journal import StreamCursor
from baton.rollout.controller import RolloutController
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import FakeEngine
from baton.rollout.settings import RolloutSettings
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.types import Group, PolicyVersion, SamplingParams
from benchmarks.machine import machine

RESULTS = Path(__file__).parent / "results"
GROUPS, SIZE, SLOTS = 32, 8, 256
BATCHES, WARM_UP, FIRST = 100, 20, 3
MEAN, LONGEST, WITHIN = 85, 512, 0.6
TAILS = {"same lengths in all groups": 0.0, "groups differ": 0.6}
"""Standard deviation of the logarithm of the length between groups."""
ARMS: dict[str, dict[str, Any]] = {
    "sync": {},
    "partial 1.25": {"mode": "partial", "overprovision": 1.25},
    "partial 1.5": {"mode": "partial", "overprovision": 1.5},
    "partial 2": {"mode": "partial", "overprovision": 2.0},
    "partial 4": {"mode": "partial", "overprovision": 4.0},
    "partial 2, stalest first": {"mode": "partial", "overprovision": 2.0, "consume": "stalest"},
    "partial 2, submission": {"mode": "partial", "overprovision": 2.0, "consume": "submission"},
    "partial 2, bound 1": {"mode": "partial", "overprovision": 2.0, "max_staleness": 1},
    "partial 2, bound 1, drop": {"mode": "partial", "overprovision": 2.0, "max_staleness": 1, "stale": "drop"},
}


def simulate(settings: RolloutSettings, lengths: ScriptedLengths) -> dict[str, Any]:
    """Run one arm; return its batches and its decode steps."""
    engine_settings = EngineSettings(slots=SLOTS, max_context_tokens=lengths.longest + 8)
    engine = FakeEngine(engine_settings, PolicyVersion("bias", 0), lambda group, sample: 10**9)
    sampling = SeededSampling(SamplingParams(1), noise_seed=1)
    worker = WorkerClient(FlatTransport(engine, lengths))
    controller = RolloutController(worker, settings.rules(), NumberedPrompts(), NoJudges(), sampling)
    controller.begin(0, StreamCursor(0, {}))
    controller.publish({}, PolicyVersion("bias", 0))
    batches, steps, masked, consumed, dropped = [], [], 0, 0, 0
    for version in range(BATCHES):
        begin = engine.stats.decode_steps
        batches.append([trained for group in controller.next_batch() for trained in _trained(group, version)])
        steps.append(engine.stats.decode_steps - begin)
        counts = controller.scheduler.take_step_counts()
        if version >= WARM_UP:
            masked, consumed = masked + counts.masked_tokens, consumed + counts.consumed_tokens
            dropped += counts.requeued_groups + counts.dropped_groups
        controller.publish({}, PolicyVersion("bias", version + 1))
    return {"batches": batches, "steps": steps, "masked": masked, "consumed": consumed, "requeued_groups": dropped}


def _trained(group: Group, version: int) -> Iterable[tuple[int, int]]:
    """Yield the length and the staleness of the oldest token of each trajectory."""
    for member in group.members:
        trajectory = member.trajectory
        yield trajectory.num_tokens, version - min(segment.policy_version for segment in trajectory.segments)


def summarise(found: dict[str, Any], lengths: ScriptedLengths) -> dict[str, Any]:
    """Compare the trained lengths with the lengths of all groups in the order of submission."""
    population = sorted(lengths.length(g, s) for g in range(GROUPS * BATCHES) for s in range(SIZE))
    mean, long = statistics.fmean(population), population[int(0.9 * len(population))]
    batches = found["batches"]

    def ratio(some: list[list[tuple[int, int]]]) -> float:
        return statistics.fmean(length for batch in some for length, _ in batch) / mean

    steady = [one for batch in batches[WARM_UP:] for one in batch]
    staleness = [
        statistics.fmean(age for _, age in part) if (part := _decile(steady, population, tenth)) else None
        for tenth in range(10)
    ]
    by_batch = [statistics.fmean(length for length, _ in batch) / mean for batch in batches]
    return {
        "first_batch": ratio(batches[:1]),
        "first_batches": ratio(batches[:FIRST]),
        "steady": ratio(batches[WARM_UP:]),
        "longest_tenth_in_first": statistics.fmean(length > long for batch in batches[:1] for length, _ in batch),
        "longest_tenth_steady": statistics.fmean(length > long for length, _ in steady),
        "staleness_by_decile": staleness,
        "masked_frac": found["masked"] / max(1, found["consumed"]),
        "requeued_groups": found["requeued_groups"],
        "steps_per_batch": statistics.fmean(found["steps"][WARM_UP:]),
        "by_batch": [round(value, 4) for value in by_batch],
    }


def _decile(trained: list[tuple[int, int]], population: list[int], tenth: int) -> list[tuple[int, int]]:
    edges = [population[min(len(population) - 1, len(population) * each // 10)] for each in (tenth, tenth + 1)]
    low, high = edges[0] if tenth else 0, edges[1] if tenth < 9 else population[-1] + 1
    return [one for one in trained if low <= one[0] < high]


def main() -> None:
    """Simulate all arms, and write the results, the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    for tail, between in TAILS.items():
        for arm, changes in ARMS.items():
            settings = RolloutSettings.model_validate({"batch_groups": GROUPS, "group_size": SIZE, **changes})
            for seed in range(arguments.seeds):
                lengths = ScriptedLengths(MEAN, LONGEST, between, WITHIN, seed)
                found = summarise(simulate(settings, lengths), lengths)
                rows.append({"tail": tail, "arm": arm, "seed": seed, **found})
            print(tail, arm, {key: rows[-1][key] for key in ("first_batch", "steady", "steps_per_batch")}, flush=True)
    RESULTS.mkdir(exist_ok=True)
    shape = {"groups": GROUPS, "size": SIZE, "slots": SLOTS, "batches": BATCHES, "mean": MEAN, "longest": LONGEST}
    (RESULTS / "results.json").write_text(json.dumps({"machine": machine(), **shape, "rows": rows}) + "\n")
    table = make_table(rows)
    (RESULTS / "table.md").write_text(table)
    draw(rows, RESULTS / "length_bias.png")
    print(table)


def make_table(rows: list[dict[str, Any]]) -> str:
    """One row per arm: means over the seeds."""
    lines = []
    for tail in TAILS:
        lines += [f"**{tail}**", ""]
        lines += [
            "| arm | mean length, first batch | first 3 | later | longest tenth: first batch | later "
            "| staleness, shortest / longest tenth | masked tokens | decode steps per batch, ÷ sync |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        base = _mean(rows, tail, "sync", "steps_per_batch")
        for arm in ARMS:
            share = [
                f"{100 * _mean(rows, tail, arm, key):.1f} %"
                for key in ("longest_tenth_in_first", "longest_tenth_steady")
            ]
            ages = [
                statistics.fmean(
                    r["staleness_by_decile"][tenth] or 0.0 for r in rows if (r["tail"], r["arm"]) == (tail, arm)
                )
                for tenth in (0, 9)
            ]
            cells = [arm, *(f"{_mean(rows, tail, arm, key):.3f}" for key in ("first_batch", "first_batches", "steady"))]
            cells += [*share, f"{ages[0]:.2f} / {ages[1]:.2f}", f"{100 * _mean(rows, tail, arm, 'masked_frac'):.1f} %"]
            cells.append(f"{_mean(rows, tail, arm, 'steps_per_batch') / base:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _mean(rows: list[dict[str, Any]], tail: str, arm: str, key: str) -> float:
    return statistics.fmean(row[key] for row in rows if (row["tail"], row["arm"]) == (tail, arm))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean length of each batch by arm, and staleness by length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
    shown = ("sync", "partial 1.5", "partial 2", "partial 4", "partial 2, submission")
    for number, arm in enumerate(shown):
        some = [row for row in rows if (row["tail"], row["arm"]) == ("groups differ", arm)]
        curve = [statistics.fmean(values) for values in zip(*(row["by_batch"][:30] for row in some), strict=True)]
        left.plot(range(1, len(curve) + 1), curve, color=f"C{number}", linewidth=1.2, label=arm)
        ages = [
            statistics.fmean(v or 0.0 for v in each)
            for each in zip(*(r["staleness_by_decile"] for r in some), strict=True)
        ]
        right.plot(range(1, 11), ages, "o-", color=f"C{number}", linewidth=1.2, markersize=3)
    left.set_title("mean length of a batch ÷ mean of all responses (simulated)", fontsize=10, loc="left")
    left.set_xlabel("batch")
    left.legend(frameon=False, fontsize=8)
    right.set_title("versions since a response's first token (simulated)", fontsize=10, loc="left")
    right.set_xlabel("tenth of the response lengths, shortest first")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
