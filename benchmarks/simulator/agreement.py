"""A live run on this machine beside the same run simulated: step time, its parts, occupancy, carried groups, staleness.

    baton profile recipes/quickstart.toml --out calibration.toml
    baton train recipes/quickstart.toml run.steps=20 eval.every=0 run.name=live …      # several times
    python benchmarks/simulator/agreement.py calibration.toml RUN [RUN …]

Runs of one recipe count as repetitions: their span is the noise. Lengths are those of the first.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import tomli_w

from baton.config import Recipe, load_recipe
from baton.cost.efficiency import CalibrationSettings
from baton.metrics import read_metrics
from baton.planning import workload_of_run
from baton.runs import RunDirectory
from baton.simulator.result import summarise
from baton.simulator.run import simulate
from baton.simulator.sources import RecipeSource, Wishes

RAW = Path(__file__).parent / "results" / "agreement.json"
WARM = 4
"""First steps of a live run that do not count."""


def live(path: Path) -> dict[str, float]:
    """Medians over a run's steps."""
    rows = [row for row in read_metrics(path) if "perf/step_time" in row][WARM:]

    def middle(name: str) -> float:
        return statistics.median([row.get(name, 0.0) for row in rows])

    return {
        "step_s": middle("perf/step_time"),
        "generate_s": middle("time/generate") + middle("time/judge"),
        "train_s": middle("time/train"),
        "occupancy": middle("perf/slot_occupancy"),
        "carried_groups": middle("rollout/carried_groups"),
        "staleness": middle("staleness/mean"),
    }


def simulated(path: Path, calibration: Path) -> dict[str, float]:
    """The same of the run in virtual time."""
    efficiencies = load_recipe(CalibrationSettings, calibration).build()
    recipe = Recipe.model_validate(RunDirectory.open(path).recipe())
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "recipe.toml"
        copy.write_text(tomli_w.dumps(json.loads(recipe.model_dump_json(exclude_none=True))))
        source = RecipeSource(copy, efficiencies, workload_of_run(path))
        setting = source.setting(Wishes())
    result = summarise(setting, simulate(setting))
    return {
        "step_s": result.step_s,
        "generate_s": result.wait_s,
        "train_s": result.train_s,
        "occupancy": result.rollout_occupancy,
        "carried_groups": result.carried_groups,
        "staleness": result.mean_staleness,
    }


def main() -> None:
    """Print both, the difference, and the noise, and add them to results/agreement.json."""
    calibration, runs = Path(sys.argv[1]), [Path(text) for text in sys.argv[2:]]
    measured, predicted = [live(run) for run in runs], simulated(runs[0], calibration)
    print(f"{'':16}{'simulated':>12}{'live':>12}{'difference':>12}{'noise':>8}")
    for key, value in predicted.items():
        seen = [one[key] for one in measured]
        mean = statistics.fmean(seen)
        noise = (max(seen) - min(seen)) / mean if mean else 0.0
        difference = f"{value / mean - 1:+.0%}" if mean else f"{value - mean:+.3g}"
        print(f"{key:16}{value:12.4g}{mean:12.4g}{difference:>12}{noise:8.0%}")
    opened = RunDirectory.open(runs[0])
    known = json.loads(RAW.read_text()) if RAW.exists() else {}
    known[opened.recipe()["rollout"]["mode"]] = {
        "facts": {key: opened.facts().get(key) for key in ("commit", "hardware", "packages")},
        "calibration": calibration.read_text(),
        "simulated": predicted,
        "live": measured,
    }
    RAW.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
