"""Kills the controller, workers and environments of multi-turn runs at random moments, and checks what they trained.

    python -m benchmarks.episodes.kills --out benchmarks/episodes/results/kills.json

Each mode trains on `--steps` × 32 episodes of Sokoban. `sync` is compared with an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.machine import machine
from tests.swarm.episode_kills import Plan, have_equal_bits, play
from tests.swarm.swarm_processes import scratch_model_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--modes", nargs="+", default=["sync", "partial", "async"])
    parser.add_argument("--controller", type=int, default=10, help="kills of the controller, per mode")
    parser.add_argument("--worker", type=int, default=10)
    parser.add_argument("--environment", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    kills = {kind: getattr(args, kind) for kind in ("controller", "worker", "environment")}
    rows = []
    with tempfile.TemporaryDirectory(prefix="baton-kills-") as scratch:
        model = scratch_model_at(Path(scratch, "model"))
        for mode in args.modes:
            report, found = play(Plan(mode, args.seed, args.steps, 8, kills), model, Path(scratch, mode))
            if mode == "sync":
                _, whole = play(Plan(mode, args.seed, args.steps, 8), model, Path(scratch, "undisturbed"))
                report.bits_equal = have_equal_bits(whole, found)
            rows.append(report.as_json())
            print(json.dumps(rows[-1]), flush=True)
            args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
