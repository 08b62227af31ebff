"""Share of an engine's slots that are in use while slow environments work.

python -m benchmarks.occupancy.run simulate      # in virtual time
python -m benchmarks.occupancy.run live          # in real time: 64 slots, 390 s with slow tools, 390 s without
python -m benchmarks.occupancy.run plot          # needs matplotlib
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.environments.calls import EnvironmentSpec
from baton.environments.pool import EnvironmentPool
from baton.environments.settings import EnvironmentSettings
from baton.environments.token_bridge import TokenBridge
from baton.policy.tokenizer import load_tokenizer
from baton.records.journal import Journal
from benchmarks.machine import machine
from tests.rollout import occupancy_cases
from tests.rollout.occupancy_cases import Load, NamedEpisodes, OccupancyRun, RealTime, simulate

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
RATIOS, LATENCIES = (1, 2, 4, 8), ("none", "lognormal", "constant")
COLORS = {"none": "tab:blue", "lognormal": "tab:orange", "constant": "tab:green"}
STEP_S, TURNS = 0.1, (16, 32)
"""Of simulations: mean tokens of a turn, of 1.6 s and 3.2 s."""
RAMP_S, SIMULATED_S = 120.0, 480.0
LIVE = Load(step_s=STEP_S, turn_tokens=32, open_per_slot=4)
LIVE_RAMP_S, LIVE_S = 90.0, 390.0
WINDOW_S = 15.0


def row(run: OccupancyRun, begin_s: float, end_s: float) -> dict[str, Any]:
    """Return what a run has measured between two times."""
    load, scheduler = run.load, run.controller.scheduler
    samples = [sample for sample in run.samples if begin_s <= sample[0] <= end_s]
    return {
        "turn_s": load.turn_tokens * load.step_s,
        "latency": load.latency,
        "open_per_slot": load.open_per_slot,
        "seed": load.seed,
        "occupancy": round(run.transport.occupancy(begin_s, end_s), 4),
        "unfinished_per_slot": round(statistics.fmean(sample[1] for sample in samples) / load.slots, 2),
        "acting_per_slot": round(statistics.fmean(sample[2] for sample in samples) / load.slots, 2),
        "masked_frac": round(scheduler.ledger.masked / max(1, scheduler.ledger.generated), 4),
        "lost_tokens": scheduler.ledger.lost.total(),
        "batches": run.version,
    }


def simulations() -> None:
    """Simulate all loads, and one with a bound on concurrent calls."""
    loads = [
        Load(step_s=STEP_S, turn_tokens=turn, latency=latency, open_per_slot=ratio, seed=seed)
        for seed in range(3)
        for turn in TURNS
        for ratio in RATIOS
        for latency in LATENCIES
        if seed == 0 or (ratio >= 4 and latency != "constant")
    ]
    loads += [Load(step_s=STEP_S, turn_tokens=16, open_per_slot=8, max_concurrent=most) for most in (128, 64, 32)]
    rows = []
    for load in loads:
        began_s = time.perf_counter()
        run, environments = simulate(load, SIMULATED_S)
        found = row(run, RAMP_S, SIMULATED_S)
        if load.max_concurrent < 1e9:
            queue_s = sorted(environments.queue_s)
            found |= {"max_concurrent": load.max_concurrent, "queue_mean_s": round(statistics.fmean(queue_s), 2)}
        rows.append(found | {"simulated_in_s": round(time.perf_counter() - began_s, 1)})
        print(json.dumps(rows[-1]), flush=True)
    write("simulated.json", {"machine": machine(), "ramp_s": RAMP_S, "seconds": SIMULATED_S, "rows": rows})


def live() -> None:
    """Run with slow tools and without, in real time, with real environment processes, token bridge and journal."""
    rows = [live_row(replace(LIVE, latency=latency)) for latency in ("lognormal", "none")]
    write("live.json", {"machine": machine(), "ramp_s": LIVE_RAMP_S, "seconds": LIVE_S, "rows": rows})


def live_row(load: Load) -> dict[str, Any]:
    args = {"latency": load.latency, "latency_s": load.latency_s, "seed": load.seed, "max_turns": load.max_turns}
    spec = EnvironmentSpec("sleep", f"{Path(occupancy_cases.__file__)}:SleepingEnvironment", args)
    settings = EnvironmentSettings(processes=2, max_concurrent=512, timeout_s=600.0)
    with tempfile.TemporaryDirectory() as scratch:
        bridge = TokenBridge(load_tokenizer(str(ROOT / "models" / "quickstart")))
        journal = Journal(Path(scratch) / "journal.sqlite", keeps_partials=True)
        pool = EnvironmentPool({"sleep": spec}, settings)
        try:
            run = OccupancyRun(load, RealTime(), NamedEpisodes(pool), bridge=bridge, journal=journal)
            began_s, worked_s = time.monotonic(), time.process_time()
            run.run(LIVE_S)
            taken_s, worked_s = time.monotonic() - began_s, time.process_time() - worked_s
            metrics = run.controller.take_episode_metrics()
        finally:
            pool.close()
            journal.close()
    found = row(run, began_s + LIVE_RAMP_S, began_s + LIVE_S)
    windows = [began_s + WINDOW_S * index for index in range(int(LIVE_S / WINDOW_S))]
    found["occupancy_by_window"] = [round(run.transport.occupancy(s, s + WINDOW_S), 4) for s in windows]
    found["controller_cpu_frac"] = round(worked_s / taken_s, 3)
    found["metrics"] = {name: round(value, 4) for name, value in metrics.items()}
    found["simulated_occupancy"] = round(simulate(load, LIVE_S)[0].transport.occupancy(LIVE_RAMP_S, LIVE_S), 4)
    print(json.dumps(found), flush=True)
    return found


def write(name: str, found: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps(found, indent=1) + "\n")


def plot() -> None:
    """Draw occupancy over open episodes, and that of the live runs over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained", sharey=True)
    rows = [one for one in json.loads((RESULTS / "simulated.json").read_text())["rows"] if "max_concurrent" not in one]
    for part, turn in zip(axes, TURNS, strict=False):
        turn_s = turn * STEP_S
        for latency in LATENCIES:
            own = [one for one in rows if one["turn_s"] == turn_s and one["latency"] == latency]
            means = [statistics.fmean(one["occupancy"] for one in own if one["open_per_slot"] == r) for r in RATIOS]
            part.plot(RATIOS, means, marker="o", markersize=3, color=COLORS[latency], label=latency)
        part.set_xscale("log", base=2)
        part.set_xticks(RATIOS, [f"{ratio}" for ratio in RATIOS])
        part.set_xlabel("open episodes per slot (bound)")
        part.set_title(f"simulated, turns of {turn_s:g} s", fontsize=10, loc="left")
    axes[0].legend(frameon=False, fontsize=8, title="latency of tools (mean 2 s)", title_fontsize=8)
    for one in json.loads((RESULTS / "live.json").read_text())["rows"]:
        windows = one["occupancy_by_window"]
        middles_s = [WINDOW_S * (index + 0.5) for index in range(len(windows))]
        axes[2].plot(middles_s, windows, color=COLORS[one["latency"]])
    axes[2].set_xlabel("seconds")
    axes[2].set_title(f"live, turns of 3.2 s, {LIVE.open_per_slot} per slot", fontsize=10, loc="left")
    axes[0].set_ylabel("occupancy")
    axes[0].set_ylim(0, 1.02)
    for part in axes:
        part.grid(alpha=0.25)
        part.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "occupancy.png", dpi=130)


if __name__ == "__main__":
    {"simulate": simulations, "live": live, "plot": plot}[sys.argv[1]]()
