"""What `baton plan` answers for AReaL-Hex's clusters by the command of docs/planner.md, without --rates: which GPUs
train and generate, and the throughput relative to 24 H800.

python -m benchmarks.areal_hex.planned [--out benchmarks/areal_hex/results/planned.json]     # about two minutes
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Literal

import msgspec

from baton.cost.calibration import Parameter, calibrate
from baton.plan import plan
from baton.planner.problem import Inputs
from baton.planner.solve import make_plan
from baton.recipe.workload import read_workload
from baton.specs.model import read_model
from baton.specs.plan import Plan
from baton.specs.trainer_shapes import Trainer
from benchmarks.areal_hex.run import CLUSTERS, HERE, HOMOGENEOUS, MEASURED, cluster
from benchmarks.machine import machine

Option = Literal["", "--mixed-stages", "--symmetric-only"]
WORKLOAD = Path(__file__).parents[2] / "recipes" / "planner" / "math-27k.toml"


def roles(plan: Plan) -> dict[str, dict[str, int]]:
    """Return the number of GPUs of each type that train and that generate."""
    found: dict[str, dict[str, int]] = {"trains": {}, "generates": {}}
    parts = [("trains", part.gpu, part.gpu_ids) for part in plan.training.stages]
    for role, gpu, ids in [*parts, *(("generates", part.gpu, part.gpu_ids) for part in plan.replicas)]:
        found[role][gpu] = found[role].get(gpu, 0) + len(ids)
    return found


def rows(size: str, trainer: Trainer, option: Option) -> list[dict[str, object]]:
    """Return a model's rows. `option`: an option of `baton plan`, or "" for none."""
    work, model = read_workload(WORKLOAD), read_model(HERE / "models" / f"r1-distill-qwen-{size}")
    work = msgspec.structs.replace(work, trainer=trainer)
    found: list[dict[str, object]] = []
    base_tokens_per_s = 0.0
    for place, gpus in enumerate([(24, 0), *CLUSTERS]):
        of = cluster(*gpus)
        given = calibrate(node.gpu for node in of.nodes).at()
        crosses, mixes = option != "--symmetric-only", option == "--mixed-stages"
        made = make_plan(Inputs(of, model, work, given, cross_types=crosses, mixed_stages=mixes))
        base_tokens_per_s = base_tokens_per_s or made.tokens_per_s
        measured = MEASURED[size][place - 1] / HOMOGENEOUS[size][0] if place else 1.0
        parts = {name: getattr(made.breakdown, f"{name}_s") for name in ("step", "sync", "rollout", "train")}
        row = {"model": size, "trainer": trainer, "cluster": made.cluster, "option": option}
        row["measured"] = measured
        found.append({**row, "ratio": made.tokens_per_s / base_tokens_per_s, **roles(made), "seconds": parts})
    return found


def ranges(size: str) -> list[dict[str, object]]:
    """Return how sure the usual and the robust plan on 8 + 48 are."""
    of, model = WORKLOAD.with_name("areal-hex-56.toml"), HERE / "models" / f"r1-distill-qwen-{size}"
    results = {robust: plan(model, WORKLOAD, of, robust=robust) for robust in (False, True)}
    return [
        {"model": size, "robust": robust, **roles(result.plan), "certainty": msgspec.to_builtins(result.certainty)}
        for robust, result in results.items()
    ]


def sensitivity(size: str) -> list[dict[str, object]]:
    """Return the throughput of 8 + 48 relative to 24 H800 with one parameter of the calibration at each end of its
    range; and, for `rollout`, at values in between. GPUs of one type train, as in the paper."""
    work, model = read_workload(WORKLOAD), read_model(HERE / "models" / f"r1-distill-qwen-{size}")
    of = {name: cluster(*gpus) for name, gpus in (("base", (24, 0)), ("mixed", (8, 48)))}
    given = {name: calibrate(node.gpu for node in each.nodes) for name, each in of.items()}
    found = []
    for parameter in given["mixed"].parameters:
        if parameter.gpu not in ("", "H800-paper", "H20-paper") or parameter.low == parameter.high:
            continue
        between = (0.45, 0.4, 0.35, 0.32) if parameter.key == "rollout" else ()
        for value in (parameter.low, *between, parameter.high):

            def at(each: Parameter, wanted: Parameter = parameter, value: float = value) -> float:
                return value if (each.gpu, each.key) == (wanted.gpu, wanted.key) else each.value

            speed = {
                name: make_plan(Inputs(each, model, work, given[name].at(at), cross_types=False)).tokens_per_s
                for name, each in of.items()
            }
            found.append({"parameter": parameter.name, "value": value, "ratio": speed["mixed"] / speed["base"]})
    return found


def main() -> None:
    """Print the rows and write them as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results" / "planned.json")
    out = parser.parse_args().out
    ways: list[tuple[Trainer, Option]] = [
        ("baton", ""), ("baton", "--mixed-stages"), ("baton", "--symmetric-only"),
        ("idealised", ""), ("idealised", "--symmetric-only"),
    ]  # fmt: skip
    found = [row for size in HOMOGENEOUS for way, option in ways for row in rows(size, way, option)]
    for row in found:
        print(f"{row['model']:5} {row['trainer']:9} {row['cluster']:18} {row['option']:16}", end="")
        print(f"{row['ratio']:5.2f} measured {row['measured']:.2f}  {row['trains']} train, {row['generates']} generate")
    sure = ranges("7b")
    print(json.dumps(sure, indent=1))
    single = sensitivity("7b")
    for row in single:
        print(f"7b on 8 + 48 with {row['parameter']} = {row['value']:.3g}: {row['ratio']:.2f} x 24 H800")
    content = {"rows": found, "ranges": sure, "sensitivity": single, "machine": machine()}
    out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
