"""`--method paper` beside `exact` where both plan with the cost model instead of Table 1's rates.

python -m benchmarks.areal_hex.cost_model      # two minutes; raw: results/cost_model.json
"""

from __future__ import annotations

import json

from baton.planner.problem import Inputs
from baton.planner.solve import make_plan
from baton.specs.model import read_model
from baton.specs.workload import WorkloadSettings
from benchmarks.areal_hex.run import CLUSTERS, HERE, TABLE_1, cluster
from benchmarks.machine import machine

LENGTHS = ((200, 2000), (500, 6000))
"""Mean prompt and response tokens; the paper publishes neither."""


def share(size: str, gpus: tuple[int, int], prompt: int, response: int) -> float:
    """Return the predicted throughput of the paper's division over that of the exact one."""
    keys = {"groups": 64, "group_size": 16, "max_staleness": 4}
    work = WorkloadSettings.model_validate(
        {**keys, "prompt_tokens": {"mean": prompt}, "output_tokens": {"mean": response}}
    ).build()
    model = read_model(HERE / "models" / f"r1-distill-qwen-{size}")
    asked = Inputs(cluster(*gpus), model, work, cross_types=False)  # the method of the paper has no mixed stages
    return make_plan(asked, "paper").tokens_per_s / make_plan(asked, "exact").tokens_per_s


def main() -> None:
    """Print the shares and write them as JSON."""
    rows = [
        {"model": size, "h800": gpus[0], "h20": gpus[1], "prompt": prompt, "response": response}
        | {"paper_over_exact": share(size, gpus, prompt, response)}
        for prompt, response in LENGTHS
        for size in TABLE_1
        for gpus in CLUSTERS
    ]
    (HERE / "results" / "cost_model.json").write_text(json.dumps({"rows": rows, "machine": machine()}, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
