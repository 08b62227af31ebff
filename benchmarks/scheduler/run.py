"""How many trajectories a minute the scheduler decides on, by itself: one core, no engine.

    python benchmarks/scheduler/run.py

Each trajectory is assigned, reported on once or more, finished, judged and delivered. Raw results: results/raw.json.
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

from baton.rollout.events import (
    Assign,
    BatchRequested,
    Capacity,
    Deliver,
    Finished,
    LeaseEnded,
    Load,
    Rewarded,
    TokensReceived,
    VersionServed,
    VersionTrained,
)
from baton.rollout.scheduler import RolloutScheduler
from baton.rollout.settings import RolloutSettings

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    "sync, 256 x 8": {"mode": "sync", "batch_groups": 256},
    "partial, 256 x 8": {"mode": "partial", "batch_groups": 256, "overprovision": 2.0},
    "async, 256 x 8": {"mode": "async", "batch_groups": 256},
    "async, 4096 x 16": {"mode": "async", "batch_groups": 4096, "group_size": 16},
}
SLOTS = 64 * 256


def run(settings: RolloutSettings, reports: int, target: int) -> dict[str, Any]:
    """Deliver `target` trajectories; the oldest lease is always the next to be heard of."""
    scheduler = RolloutScheduler(settings.rules())
    leases: deque[tuple[int, int]] = deque()
    delivered = events = version = 0
    queue: deque[Any] = deque([VersionTrained(0.0, 0)])
    queue.append(Capacity(0.0, SLOTS))
    queue.append(BatchRequested(0.0))
    begin = time.process_time()
    while delivered < target:
        if not queue:
            key = leases.popleft()
            queue += [TokensReceived(0.0, *key, version, 100)] * reports
            queue += [Finished(0.0, *key), Rewarded(0.0, *key, float(key[1] % 2))]
        events += 1
        for command in scheduler.handle(queue.popleft()):
            kind = type(command)
            if kind is Assign:
                leases.append((command.group_id, command.sample_index))
            elif kind is Load:
                queue.append(VersionServed(0.0, command.version))
            elif kind is Deliver:
                delivered += len(command.group_ids) * settings.group_size
                version += 1
                queue += [LeaseEnded(0.0, *key) for key in leases]
                leases.clear()
                queue += [VersionTrained(0.0, version), BatchRequested(0.0)]
    seconds = time.process_time() - begin
    return {
        "trajectories": delivered,
        "events": events,
        "seconds": seconds,
        "trajectories_per_minute": delivered / seconds * 60,
        "events_per_s": events / seconds,
    }


def main() -> None:
    """Run all cases and write the table."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {
        "commit": git.stdout.strip(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        "cases": {},
    }
    lines = ["| case | reports each | trajectories a minute | events a second |", "|---|---|---|---|"]
    for name, values in CASES.items():
        target = 131_072 if "4096" in name else 40_960
        for reports in (1, 8):
            result = run(RolloutSettings.model_validate(values), reports, target)
            found["cases"][f"{name}, {reports}"] = result
            rate, events = result["trajectories_per_minute"], result["events_per_s"]
            lines.append(f"| {name} | {reports} | {rate:,.0f} | {events:,.0f} |")
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "raw.json").write_text(json.dumps(found, indent=1) + "\n")
    (results / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
