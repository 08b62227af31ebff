"""A live run on this machine beside the same run simulated: step time, its parts, occupancy, carried groups, staleness.

    baton profile recipes/quickstart.toml --out calibration.toml
    baton train recipes/quickstart.toml run.steps=20 eval.every=0 run.name=live …      # several times
    python benchmarks/simulator/agreement.py calibration.toml RUN [RUN …] [engine_beside=1.45 …]

Runs of one recipe count as repetitions: their span is the noise. Each run is simulated with its own lengths. Live and
simulated figures are made in the same way: medians over the same steps, staleness over all tokens of their batches.
Each `engine_beside=` adds what the same simulation gives with that figure in place of the calibration's.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from baton.cost.efficiency import CalibrationSettings
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import workload_of_run
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.simulator.input_sources import RecipeSource, SimulationOptions, recorded_groups
from baton.simulator.run import simulate

RAW = Path(__file__).parent / "results" / "agreement.json"
WARM = 4
"""First steps that do not count."""
SERIES = ("histogram", "carried_by_step")
"""What has no one difference."""
Figures = dict[str, Any]


def live(path: Path) -> Figures:
    """Of a run."""
    everything = [row for row in read_metrics(path) if "perf/step_time" in row]
    rows = everything[WARM:]

    def middle(name: str) -> float:
        return statistics.median([row.get(name, 0.0) for row in rows])

    return {
        "step_s": middle("perf/step_time"),
        "wait_s": middle("time/wait_for_batch"),
        "train_s": middle("time/train"),
        "occupancy": middle("perf/slot_occupancy"),
        "carried_groups": middle("rollout/carried_groups"),
        "resumed": middle("rollout/resumed"),
        **_staleness([made_by(path, int(row["step"])) for row in rows]),
        "carried_by_step": [int(row.get("rollout/carried_groups", 0)) for row in everything],
    }


def made_by(path: Path, step: int) -> Counter[int]:
    """Versions behind the trainer → tokens of a batch."""
    found: Counter[int] = Counter()
    for group in RunDirectory.open(path).groups(step):
        for member in group.members:
            for segment in member.trajectory.segments:
                found[step - 1 - segment.policy_version] += len(segment.token_ids)
    return found


def simulated(path: Path, calibration: Path, changes: Sequence[str] = ()) -> Figures:
    """The same of the run in virtual time; changes: overrides of the calibration."""
    efficiencies = load_recipe(CalibrationSettings, calibration, changes).build()
    recipe = Recipe.model_validate(RunDirectory.open(path).recipe())
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "recipe.toml"
        copy.write_text(tomli_w.dumps(json.loads(recipe.model_dump_json(exclude_none=True))))
        source = RecipeSource(copy, efficiencies, workload_of_run(path))
        setting = source.setting(SimulationOptions(recorded=recorded_groups(path)))
    steps = simulate(setting).steps
    counts = [step.counts for step in steps]
    ends = [step.end_s for step in steps]
    each = [after - before for before, after in itertools.pairwise(ends)][WARM - 1 :]
    carried = [count.carried_groups for count in counts]
    steps = steps[WARM:]
    return {
        "step_s": statistics.median(each),
        "wait_s": statistics.median(step.wait_s for step in steps),
        "train_s": statistics.median(step.train_s for step in steps),
        "occupancy": statistics.median(c.busy_slot_s / c.slot_s for c in counts if c.slot_s),
        "carried_groups": statistics.median(counts[i].carried_groups for i in range(WARM, len(counts))),
        "resumed": statistics.median(c.resumed for c in counts),
        **_staleness([Counter(step.staleness) for step in steps]),
        "carried_by_step": carried,
    }


def _staleness(batches: list[Counter[int]]) -> Figures:
    total: Counter[int] = Counter()
    for batch in batches:
        total.update(batch)
    shares = {behind: total[behind] / total.total() for behind in sorted(total)}
    return {"staleness": sum(behind * share for behind, share in shares.items()), "histogram": shares}


def main() -> None:
    """Print both, the difference, and the noise, and add them to results/agreement.json."""
    first, *others = sys.argv[1:]
    given = [text for text in others if "=" in text]
    calibration, runs = Path(first), [Path(text) for text in others if "=" not in text]
    measured, predicted = [live(run) for run in runs], [simulated(run, calibration) for run in runs]
    print(f"{'':16}{'simulated':>12}{'live':>12}{'difference':>12}{'noise':>8}")
    for key in predicted[0]:
        if key in SERIES:
            continue
        value, seen = statistics.fmean(one[key] for one in predicted), [one[key] for one in measured]
        mean = statistics.fmean(seen)
        noise = (max(seen) - min(seen)) / mean if mean else 0.0
        difference = f"{value / mean - 1:+.0%}" if mean else f"{value - mean:+.3g}"
        print(f"{key:16}{value:12.4g}{mean:12.4g}{difference:>12}{noise:8.0%}")
    for name, found in (("simulated", predicted), ("live", measured)):
        print(f"staleness, {name}: " + "; ".join(_histogram(one["histogram"]) for one in found))
    changed = {text: [simulated(run, calibration, [f"efficiency.CPU.{text}"]) for run in runs] for text in given}
    for text, found in changed.items():
        means = {key: statistics.fmean(one[key] for one in found) for key in found[0] if key not in SERIES}
        print(f"{text}: " + ", ".join(f"{key} {value:.4g}" for key, value in means.items()))
    opened = RunDirectory.open(runs[0])
    known = json.loads(RAW.read_text()) if RAW.exists() else {}
    known[opened.recipe()["rollout"]["mode"]] = {
        "facts": {key: opened.facts().get(key) for key in ("commit", "hardware", "packages")},
        "calibration": calibration.read_text(),
        "simulated": predicted,
        "live": measured,
        "changed": changed,
    }
    RAW.write_text(json.dumps(known, indent=1) + "\n")


def _histogram(shares: dict[int, float]) -> str:
    return ", ".join(f"{behind}: {share:.0%}" for behind, share in shares.items())


if __name__ == "__main__":
    main()
