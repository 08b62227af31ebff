"""AReaL-Hex's cluster comparison in virtual time: the plans of its clusters by the rates of its table 1, simulated.

    python -m benchmarks.areal_hex.simulated          # about a minute; raw results: results/simulated.json

Each plan is simulated twice: with Baton's own way of publishing weights (every engine fetches them while it goes on
serving the old ones) and with everybody standing still for the measured time of table 2, as the paper's system does.
Lengths are not published: they are lognormal. Steps are an eighth as large as the planner's, publication an eighth as
long: ratios stay.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from baton.planner.solve import make_plan
from baton.simulator.input_sources import PlanSource, SimulationOptions
from baton.simulator.inputs import Setting
from baton.simulator.result import summarise
from baton.simulator.run import simulate
from baton.specs.workload import lognormal
from benchmarks.areal_hex.run import CLUSTERS, HOMOGENEOUS, MEASURED, TABLE_1, cluster, question, scaled
from benchmarks.machine import machine

HERE = Path(__file__).parent
STEPS, SMALLER = 16, 8
TAIL = lognormal(300, 1.0, 3000)
"""As many tokens on average as the planner has."""


def settings(size: str, h800: int, h20: int) -> tuple[Setting, float]:
    """Return the plan of a cluster as a setting, and its publication time; one type of GPUs trains."""
    asked = question(size, cluster(h800, h20), scaled(size), crossing=False)
    plan = make_plan(asked)
    breakdown = msgspec.structs.replace(plan.breakdown, sync_s=plan.breakdown.sync_s / SMALLER)
    plan = msgspec.structs.replace(plan, breakdown=breakdown)
    source = PlanSource(plan, asked.model, asked.work, cluster=asked.cluster)
    setting = source.setting(SimulationOptions((f"batch_groups={asked.work.groups // SMALLER}",), STEPS))
    return replace(setting, work=replace(setting.work, output=TAIL)), breakdown.sync_s


def speeds(size: str, h800: int, h20: int) -> dict[str, float]:
    """Return trained tokens per second and idle shares, by the way of publishing."""
    setting, sync_s = settings(size, h800, h20)
    waits = replace(setting, rules=replace(setting.rules, is_swarm=False, max_lag=0), swarm=None, publish_s=sync_s)
    found = {}
    for name, of in (("background", setting), ("all_wait", waits)):
        result = summarise(of, simulate(of))
        found[name] = result.trained_tokens_per_s
        found[f"{name}_trainer_busy"] = result.trainer_busy
        found[f"{name}_staleness"] = result.mean_staleness
    return found


def rows() -> list[dict[str, Any]]:
    """Return throughput over that of 24 H800, by model and cluster."""
    found = []
    for size in TABLE_1:
        base = speeds(size, 24, 0)
        for place, (h800, h20) in enumerate(CLUSTERS):
            own = speeds(size, h800, h20)
            ratios = {name: own[name] / base[name] for name in ("background", "all_wait")}
            measured = MEASURED[size][place] / HOMOGENEOUS[size][0]
            row = {"model": size, "cluster": f"{h800} + {h20}", **ratios, "measured": measured}
            found.append({**row, "own": own, "homogeneous": base})
    return found


def main() -> None:
    """Print the table and write it."""
    found = rows()
    print("trained tokens per second over that of 24 H800")
    print(f"{'model':6}{'cluster':9}{'background':>12}{'all wait':>10}{'measured':>10}")
    for row in found:
        numbers = f"{row['background']:12.2f}{row['all_wait']:10.2f}{row['measured']:10.2f}"
        print(f"{row['model']:6}{row['cluster']:9}{numbers}")
    path = HERE / "results" / "simulated.json"
    path.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
