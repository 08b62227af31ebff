"""The simulator before and after it runs the live controller, on equal random cases.

    git worktree add ../before e015173d
    PYTHONPATH=../before python benchmarks/simulator/side_by_side.py run before.jsonl [CASES] [FIRST]
    PYTHONPATH=. python benchmarks/simulator/side_by_side.py run after.jsonl [CASES] [FIRST]
    PYTHONPATH=. python benchmarks/simulator/side_by_side.py run no_wait.jsonl [CASES] [FIRST] 1e-6
    PYTHONPATH=. python benchmarks/simulator/side_by_side.py compare before.jsonl after.jsonl no_wait.jsonl

`run` simulates random cases with all invariants checked at every event, and appends one line for each case: ledger,
outcomes, invariants, steps and staleness. The script runs in both versions. The third number replaces
`SHORT_WAIT_S`, the longest wait of the live controller while rewards or the end of a train step may arrive. `compare`
divides the cases into kinds (a pool, a swarm without faults, a swarm with faults, with and without a restart of the
controller), counts what differs from the first file in each kind, and writes results/side_by_side.json.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.rollout import controller, worker_client
from baton.rollout.settings import RolloutSettings
from baton.simulator.faults import FaultSettings
from baton.simulator.inputs import EngineSpec, ScoringSpec, Setting, SwarmSpec
from baton.simulator.result import RunRecord
from baton.simulator.run import RunOptions, simulate  # in older versions, RunOptions is defined there
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.workload import constant, lognormal
from baton.swarm.leases import LeaseRules

RAW = Path(__file__).parent / "results" / "side_by_side.json"
CASES = 10_000
UNTIL_S = 40.0
ACCOUNTS = ("generated", "trained", "masked", "filtered", "dropped", "carried", "unreported")
KINDS = ("crash", "hang", "slow", "join", "leave", "restart", "partition", "storm")
EQUAL_S = 1e-4
"""Two times count as equal if they differ by at most this number of seconds."""


def case(number: int) -> tuple[str, Setting, list[FaultSettings]]:
    """Return the kind, the setting and the faults of a case. Of ten cases, two are pools and two swarms without faults.
    The draws use no generator of the package, because both versions must simulate equal cases."""
    draw = random.Random(f"side by side {number}")
    mode = ("sync", "partial", "async")[number % 3]
    kind = "pool" if number % 10 < 2 else "swarm" if number % 10 < 4 else "faults"
    keys: dict[str, Any] = {"mode": mode, "batch_groups": 4, "group_size": 2, "dynamic_sampling": draw.random() < 0.3}
    bound, every = 0, 1
    if mode != "sync":
        bound = draw.randint(1, 4)
        keys |= {"stale": draw.choice(("mask", "drop")), "max_staleness": bound, "max_requeues": 1}
    if mode == "partial":
        keys["overprovision"] = min(bound + 1.0, draw.choice((1.0, 1.5, 2.0, 3.0)))
    if mode == "async":
        keys["on_new_version"] = draw.choice(("resume", "keep"))
        every = min(bound, draw.randint(1, 3)) if kind != "pool" else 1
    rules = RolloutSettings.model_validate(keys).rules()
    if mode == "async" and kind != "pool":
        rules = replace(rules, is_swarm=True, max_lag=bound - every + 1 if bound >= 2 * every - 1 else 0)
    leases = LeaseRules(
        restarts=mode == "sync", heartbeat_timeout_s=6, progress_timeout_s=10, starve_s=30, backup_lease_after_s=2
    )
    setting = Setting(
        rules,
        tuple(EngineSpec(f"w{index}", 4, FlatSpeed(0.02, 1e-4, 1e-8, 1e-5)) for index in range(3)),
        TrajectoryWork(constant(16), lognormal(60, 1.0, 400), 0.5, trained_share=draw.choice((0.8, 1.0))),
        TrainSpeed(0.5, 1e-6, 0.0),
        ScoringSpec(draw.choice((0.0, 0.05, 0.3)), 1.0, 4),
        publish_s=0.1,
        num_steps=draw.randint(4, 8),
        publish_every=every,
        checkpoint_every=3,
        swarm=None if kind == "pool" else SwarmSpec(leases, report_every_s=1.0, heartbeat_s=1.0, fetch_s=0.3),
    )
    faults: list[FaultSettings] = []
    for _ in range(draw.randint(1, 8) if kind == "faults" else 0):
        what = draw.choice(KINDS)
        values: dict[str, Any] = {"kind": what, "at_s": round(draw.random() * UNTIL_S, 3)}
        values["for_s"] = round(UNTIL_S * draw.choice((0.01, 0.05, 0.2)) * (0.5 + draw.random()), 3)
        if what == "slow":
            values["factor"] = draw.choice((2.0, 5.0, 20.0))
        if what == "storm":
            for key in draw.sample(("loss", "duplicate", "reorder", "delay_s", "corrupt"), 2):
                values[key] = draw.choice((0.02, 0.2, 0.5)) * (4 if key == "delay_s" else 1)
        faults.append(FaultSettings.model_validate(values))
    if kind == "faults":
        kind = "restarts" if any(fault.kind == "restart" for fault in faults) else "faults"
        faults.append(FaultSettings(kind="join", at_s=200.0))
    return kind, setting, faults


def checked(setting: Setting, number: int, faults: list[FaultSettings]) -> RunRecord:
    """Simulate a case with all invariants checked. In the earlier version, an option of the simulator checks them."""
    try:
        from tests.simulator.violations import simulate_checked
    except ImportError:
        return simulate(setting, RunOptions(number, faults, laws=True))  # type: ignore[call-arg]
    return simulate_checked(setting, RunOptions(number, faults))


def simulated(number: int) -> dict[str, Any]:
    """Simulate a case and return its line."""
    kind, setting, faults = case(number)
    told: dict[str, Any] = {"number": number, "kind": kind, "mode": setting.rules.mode}
    try:
        record = checked(setting, number, faults)
    except Exception as error:  # noqa: BLE001  # an invariant does not hold, or the run makes no progress
        return told | {"error": f"{type(error).__name__}: {error}"[:300]}
    done = [step for step in record.steps if getattr(step, "is_trained", True)]
    return told | {
        "ledger": {name: getattr(record, name) for name in ACCOUNTS} | {"lost": dict(sorted(record.lost.items()))},
        "outcomes": dict(sorted(record.outcomes.items())),
        "ends_s": [step.end_s for step in done],
        "begins_s": [step.begin_s for step in done],
        "staleness": [{str(lag): count for lag, count in sorted(step.staleness.items())} for step in done],
        "tokens": [step.tokens for step in done],
    }


def run(path: Path, count: int, first: int) -> None:
    """Simulate cases, without those that the file has."""
    known = {json.loads(line)["number"] for line in path.read_text().splitlines()} if path.exists() else set()
    with path.open("a") as file:
        for number in range(first, first + count):
            if number not in known:
                file.write(json.dumps(simulated(number)) + "\n")


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the names of what differs in a case."""
    if "error" in old or "error" in new:
        return [] if old.get("error") == new.get("error") else ["invariants or progress"]
    found = [f"ledger: {name}" for name in (*ACCOUNTS, "lost") if old["ledger"][name] != new["ledger"][name]]
    names = sorted(old["outcomes"].keys() | new["outcomes"].keys())
    found += [f"outcome: {name}" for name in names if old["outcomes"].get(name, 0) != new["outcomes"].get(name, 0)]
    found += ["staleness"] if old["staleness"] != new["staleness"] else []
    pairs = [*zip(old["ends_s"], new["ends_s"], strict=False)]
    is_late = len(old["ends_s"]) != len(new["ends_s"]) or any(abs(a - b) > EQUAL_S for a, b in pairs)
    return [*found, *(["step times"] if is_late else [])]


def compare(before: Path, after: Path) -> dict[str, Any]:
    """Compare the cases that both files have."""
    olds, news = (
        {one["number"]: one for one in map(json.loads, path.read_text().splitlines())} for path in (before, after)
    )
    shared = sorted(olds.keys() & news.keys())
    found: dict[str, Any] = {"cases": len(shared), "kinds": {}}
    for key in sorted({f"{olds[n]['kind']}, {olds[n]['mode']}" for n in shared}):
        numbers = [n for n in shared if f"{olds[n]['kind']}, {olds[n]['mode']}" == key]
        each = {n: differences(olds[n], news[n]) for n in numbers}
        whole = [n for n in numbers if "error" not in olds[n] and "error" not in news[n]]
        ratios = [news[n]["ends_s"][-1] / olds[n]["ends_s"][-1] for n in whole]
        totals = {name: [sum(side[n]["ledger"][name] for n in whole) for side in (olds, news)] for name in ACCOUNTS}
        totals["lost"] = [sum(sum(side[n]["ledger"]["lost"].values()) for n in whole) for side in (olds, news)]
        first, second = (sum((Counter(side[n]["outcomes"]) for n in whole), Counter()) for side in (olds, news))
        found["kinds"][key] = {
            "cases": len(numbers),
            "equal": sum(not names for names in each.values()),
            "equal but for times": sum(names in ([], ["step times"]) for names in each.values()),
            "differing": dict(Counter(name for names in each.values() for name in names).most_common()),
            "errors": [sum("error" in side[n] for n in numbers) for side in (olds, news)],
            "time of the run, relative": {
                "mean": statistics.fmean(ratios),
                "median": statistics.median(ratios),
                "from": min(ratios),
                "to": max(ratios),
            },
            "tokens": totals,
            "outcomes": {name: [first[name], second[name]] for name in sorted(first | second)},
        }
    return found


def main() -> None:
    """Run cases, or compare files."""
    what, first, *others = sys.argv[1:]
    if what == "run":
        count, begin, *wait_s = [*others, *(str(CASES), "0")[len(others) :]]
        if wait_s:
            for module in (controller, worker_client):
                vars(module)["SHORT_WAIT_S"] = float(wait_s[0])
        run(Path(first), int(count), int(begin))
        return
    found = {Path(other).stem: compare(Path(first), Path(other)) for other in others}
    RAW.write_text(json.dumps(found, indent=1) + "\n")
    for name, table in found.items():
        print(f"{name}: {table['cases']} cases")
        for kind, row in table["kinds"].items():
            mean = row["time of the run, relative"]["mean"]
            print(f"  {kind}: {row['cases']} cases, {row['equal']} equal, errors {row['errors']}, time {mean:.4f}")
            print(f"    {row['differing']}")


if __name__ == "__main__":
    main()
