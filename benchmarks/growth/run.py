"""How cost grows: processor time, memory and journal bytes against open trajectories, workers, context and group size.

    python benchmarks/growth/run.py            # all cases: about 15 minutes of one core
    python benchmarks/growth/run.py controller # one case

Each point runs in a process of its own. Raw results: results/raw.json.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    x, y = ([math.log(max(one, 1e-9)) for one in found] for found in (sizes, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def main() -> None:
    """Run the named cases, or all, each point in a process of its own; print the exponents."""
    from cases import CASES
    from machine import machine

    file = HERE / "results" / "raw.json"
    raw = json.loads(file.read_text()) if file.is_file() else {"cases": {}}
    raw["machine"] = machine()
    for name in sys.argv[1:] or CASES:
        sizes, points = CASES[name][1], []
        for size in sizes:
            command = [sys.executable, str(HERE / "cases.py"), name, str(size)]
            found = subprocess.run(command, capture_output=True, text=True, check=False)
            if found.returncode:
                print(f"{name} {size}: {found.stderr.strip().splitlines()[-1:]}", flush=True)
                break
            points.append({"size": size, **json.loads(found.stdout.splitlines()[-1])})
        keys = [key for key in points[0] if key != "size"] if len(points) > 1 else []
        fits = {}
        for key in keys:
            sizes_done, values = [p["size"] for p in points], [p[key] for p in points]
            fits[key] = {"all": exponent(sizes_done, values), "last": exponent(sizes_done[-2:], values[-2:])}
            shown = ", ".join(f"{value:.4g}" for value in values)
            print(f"{name} {key}: {shown}; exponent {fits[key]['all']:.2f}, last {fits[key]['last']:.2f}", flush=True)
        raw["cases"][name] = {"points": points, "exponents": fits, "commit": raw["machine"]["commit"]}
        file.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
