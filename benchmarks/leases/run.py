"""How many trajectories a minute the lease table decides on, by itself: one core, no network, no engine.

    python benchmarks/leases/run.py

Each trajectory is wanted, granted, heard of once or more, and finished; more are wanted than there are places. A tick
is timed apart. Raw results: results/raw.json.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any

from baton.swarm.lease_events import (
    GrantLease,
    LeaseFinished,
    LeaseProgressed,
    LeaseTick,
    TaskSubmitted,
    WorkerJoined,
    WorkerSeen,
)
from baton.swarm.leases import LeaseRules, LeaseTable

HERE = Path(__file__).parent
CASES = {"64 workers of 256 slots": (64, 256, 20_000), "10,000 workers of 8 slots": (10_000, 8, 100_000)}
"""Workers, slots, tasks that are wanted at any time."""


def filled(workers: int, slots: int, tasks: int, *, is_exact: bool) -> tuple[LeaseTable, deque[GrantLease]]:
    """Return a table with everything granted that has a place, and the grants."""
    table, grants = LeaseTable(LeaseRules()), deque[GrantLease]()
    for worker in range(workers):
        table.handle(WorkerJoined(0.0, worker, slots))
        table.handle(WorkerSeen(0.0, worker, 1 if is_exact else worker % 3, 0))
    for task in range(tasks):
        said = table.handle(TaskSubmitted(0.0, task, int(is_exact), is_exact, 0, 1000))
        grants += [command for command in said if isinstance(command, GrantLease)]
    return table, grants


def pass_through(workers: int, slots: int, tasks: int, *, is_exact: bool, reports: int, target: int) -> dict[str, Any]:
    """Finish `target` trajectories; the oldest lease is always the next to be heard of, and a new one is wanted."""
    table, grants = filled(workers, slots, tasks, is_exact=is_exact)
    events, now_s, next_task = 0, 1.0, tasks
    begin = time.process_time()
    for _ in range(target):
        lease = grants.popleft().lease
        now_s += 0.001
        happens: list[Any] = [LeaseProgressed(now_s, lease, 100)] * reports
        happens += [LeaseFinished(now_s, lease), TaskSubmitted(now_s, next_task, int(is_exact), is_exact, 0, 1000)]
        next_task += 1
        for event in happens:
            events += 1
            grants += [command for command in table.handle(event) if type(command) is GrantLease]
    seconds = time.process_time() - begin
    return {
        "trajectories": target,
        "events": events,
        "seconds": seconds,
        "trajectories_per_minute": target / seconds * 60,
        "events_per_s": events / seconds,
    }


def tick(workers: int, slots: int, tasks: int, *, has_room: bool) -> float:
    """Seconds of one tick; a third of the leases are slow, and are relieved as far as there is room."""
    places = workers * (slots + slots // 4)
    table, grants = filled(workers, slots, workers * slots * 9 // 10 if has_room else max(tasks, places), is_exact=True)
    for grant in grants:
        table.handle(LeaseProgressed(9.0, grant.lease, 100 if grant.lease % 3 else 10))
    begin = time.process_time()
    for number in range(3):
        table.handle(LeaseTick(10.0 + number))
    return (time.process_time() - begin) / 3


def main() -> None:
    """Run all cases and write the table."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {
        "commit": git.stdout.strip(),
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "load_average": os.getloadavg(),
        "cases": {},
    }
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            found["cpu"] = line.split(":", 1)[1].strip()
    lines = ["| case | asks | reports each | trajectories a minute | events a second |", "|---|---|---|---|---|"]
    ticks = ["| case | leases | full: one tick | a tenth of the slots free: one tick |", "|---|---|---|---|"]
    for name, (workers, slots, tasks) in CASES.items():
        for is_exact in (True, False):
            for reports in (1, 8):
                result = pass_through(workers, slots, tasks, is_exact=is_exact, reports=reports, target=50_000)
                asks = "exactly" if is_exact else "at least, of 3"
                found["cases"][f"{name}, {asks}, {reports}"] = result
                rate, events = result["trajectories_per_minute"], result["events_per_s"]
                lines.append(f"| {name} | {asks} | {reports} | {rate:,.0f} | {events:,.0f} |")
        full_s, room_s = (tick(workers, slots, tasks, has_room=has_room) for has_room in (False, True))
        found["cases"][f"{name}, tick"] = {"full_s": full_s, "room_s": room_s}
        leases = workers * (slots + slots // 4)
        ticks.append(f"| {name} | {leases:,} | {full_s * 1e3:,.1f} ms | {room_s * 1e3:,.1f} ms |")
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "raw.json").write_text(json.dumps(found, indent=1) + "\n")
    (results / "table.md").write_text("\n".join([*lines, "", *ticks]) + "\n")
    print("\n".join([*lines, "", *ticks]))


if __name__ == "__main__":
    main()
