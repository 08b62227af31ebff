"""What `baton plan` answers for AReaL-Hex's clusters by the command of docs/planner.md, without --rates: which GPUs
train and generate, and the throughput relative to 24 H800.

python -m benchmarks.areal_hex.planned [--out benchmarks/areal_hex/results/planned.json]     # half a minute
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from baton.cost.calibration import calibrate
from baton.planner.instance import Inputs
from baton.planner.solve import make_plan
from baton.recipe.workload import read_workload
from baton.specs.model import read_model
from baton.specs.plan import Plan
from benchmarks.areal_hex.run import CLUSTERS, HERE, HOMOGENEOUS, MEASURED, cluster
from benchmarks.machine import machine

WORKLOAD = Path(__file__).parents[2] / "recipes" / "planner" / "math-27k.toml"


def roles(plan: Plan) -> dict[str, dict[str, int]]:
    """Return the number of GPUs of each type that train and that generate."""
    found: dict[str, dict[str, int]] = {"trains": {}, "generates": {}}
    parts = [("trains", part.gpu, part.gpu_ids) for part in plan.training.stages]
    for role, gpu, ids in [*parts, *(("generates", part.gpu, part.gpu_ids) for part in plan.replicas)]:
        found[role][gpu] = found[role].get(gpu, 0) + len(ids)
    return found


def rows(size: str, *, crossing: bool) -> list[dict[str, object]]:
    """Return a model's rows. `crossing`: whether a training pipeline may span GPU types."""
    work, model = read_workload(WORKLOAD), read_model(HERE / "models" / f"r1-distill-qwen-{size}")
    found: list[dict[str, object]] = []
    base_tokens_per_s = 0.0
    for place, gpus in enumerate([(24, 0), *CLUSTERS]):
        of = cluster(*gpus)
        given = calibrate(node.gpu for node in of.nodes).at()
        plan = make_plan(Inputs(of, model, work, given, cross_types=crossing))
        base_tokens_per_s = base_tokens_per_s or plan.tokens_per_s
        measured = MEASURED[size][place - 1] / HOMOGENEOUS[size][0] if place else 1.0
        parts = {name: getattr(plan.breakdown, f"{name}_s") for name in ("step", "sync", "rollout", "train")}
        row = {"model": size, "cluster": plan.cluster, "types_may_mix": crossing, "measured": measured}
        found.append({**row, "ratio": plan.tokens_per_s / base_tokens_per_s, **roles(plan), "seconds": parts})
    return found


def main() -> None:
    """Print the rows and write them as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results" / "planned.json")
    out = parser.parse_args().out
    found = [row for size in HOMOGENEOUS for crossing in (True, False) for row in rows(size, crossing=crossing)]
    for row in found:
        print(f"{row['model']:5} {row['cluster']:18} mixed {row['types_may_mix']!s:6}", end="")
        print(f"{row['ratio']:5.2f} measured {row['measured']:.2f}  {row['trains']} train, {row['generates']} generate")
    out.write_text(json.dumps({"rows": found, "machine": machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
