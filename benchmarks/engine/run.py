"""Baton's embedded engine against transformers' two ways of generating, and against its own bare forwards.

    python benchmarks/engine/run.py            # everything: about ten minutes of one idle core
    python benchmarks/engine/run.py --sizes 1M --dtypes float32 --repetitions 2

One process, one thread. Within a repetition the sides take turns, so that whatever else the machine does hits all of
them. Raw results go to results/raw.json, the table to results/table.md.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from sides import SLOTS, Baton, ContinuousBatching, Generate, Timing
from transformers.utils.logging import disable_progress_bar
from workload import PROMPT_TOKENS, SIZES, Request, requests, save_model

HERE = Path(__file__).parent
SEED = 0
REPETITIONS = {"1M": 3, "10M": 2, "30M": 1}
REQUESTS = 512
BATCH_TOKENS = {"1M": 512, "10M": 512, "30M": 256}
"""Of continuous batching: the best of 64, 128, 256 and 512."""


def main() -> None:
    """Measure what is asked for, and write raw results and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, help=f"of each size; without it {REPETITIONS}")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--table-only", action="store_true", help="make the table from the raw results that are there")
    arguments = parser.parse_args()
    raw = arguments.out / "raw.json"
    if not arguments.table_only:
        torch.set_num_threads(1)
        disable_progress_bar()
        found: dict[str, Any] = {"machine": machine(), "cases": []}
        for size in arguments.sizes:
            for dtype in arguments.dtypes:
                found["cases"] += measure(size, dtype, arguments.repetitions or REPETITIONS[size])
        found["load_average_after"] = os.getloadavg()
        arguments.out.mkdir(exist_ok=True)
        raw.write_text(json.dumps(found, indent=1) + "\n")
    table = make_table(json.loads(raw.read_text())["cases"])
    (arguments.out / "table.md").write_text(table)
    print(table)


def measure(size: str, dtype: str, repetitions: int) -> list[dict[str, Any]]:
    """Measure one model in both workloads; one record for each workload."""
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        parameters = save_model(size, Path(scratch))
        baton, generate = Baton(Path(scratch), dtype), Generate(Path(scratch), dtype)
        batching = ContinuousBatching(Path(scratch), dtype, BATCH_TOKENS[size])
        for workload in ("lognormal", "equal"):
            wanted = requests(workload, REQUESTS, SEED)
            sides = {"baton": baton.run, "generate": generate.run}
            if workload == "lognormal":
                sides["continuous"] = batching.run
            for name, run in sides.items():  # warm up: kernels are made for shapes when first met
                timed(name, run, [Request(r.prompt_ids, 4) for r in wanted[:SLOTS]])
            passes: list[dict[str, Any]] = []
            for _ in range(repetitions):
                taken = {name: asdict(timed(name, run, wanted)) for name, run in sides.items()}
                taken["bare_decode"] = asdict(baton.bare_decode())
                taken["bare_prefill"] = asdict(baton.bare_prefill())
                passes.append({"load_average": os.getloadavg()[0], **taken})
                print(size, dtype, workload, {name: round(t["cpu_s"], 2) for name, t in taken.items()}, flush=True)
            lengths = [request.num_tokens for request in wanted]
            records.append(
                {
                    "size": size,
                    "parameters": parameters,
                    "dtype": dtype,
                    "workload": workload,
                    "requests": len(lengths),
                    "tokens": sum(lengths),
                    "longest": max(lengths),
                    "engine_start_s": baton.start_s,
                    "passes": passes,
                }
            )
    return records


def timed(name: str, run: Any, wanted: list[Request]) -> Timing:
    """Run one side, Baton's with the deterministic algorithms that it always has."""
    torch.use_deterministic_algorithms(name == "baton")
    torch.utils.deterministic.fill_uninitialized_memory = False
    result: Timing = run(wanted)
    torch.use_deterministic_algorithms(False)
    return result


def make_table(cases: list[dict[str, Any]]) -> str:
    """Two tables: tokens per second with ratios to `generate`; and the engine against its bare forwards."""
    speed = [
        "| model | dtype | lengths | Baton tok/s | generate | continuous | × generate (range) | × continuous | "
        "decode tok/s: Baton, generate | prefill tok/s: Baton, generate |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    bare = [
        "| model | dtype | lengths | decode ÷ bare decode (range) | all ÷ bare decode and prefill | "
        "all ÷ bare decode | prefill, share | rows in use | decode widths kept |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        name = [f"{case['parameters'] / 1e6:.2g} M", case["dtype"], case["workload"]]
        speed.append(_line([*name, *_speeds(case)]))
        bare.append(_line([*name, *_bare(case)]))
    return "\n".join(speed) + "\n\n" + "\n".join(bare) + "\n"


def _speeds(case: dict[str, Any]) -> list[str]:
    cpu = {side: _median(case, lambda p, side=side: p[side]["cpu_s"]) for side in ("baton", "generate")}
    prefill = {side: _median(case, lambda p, side=side: p[side]["prefill_s"]) for side in cpu}
    ratios = sorted(p["generate"]["cpu_s"] / p["baton"]["cpu_s"] for p in case["passes"])
    tokens, prompt_tokens = case["tokens"], case["requests"] * PROMPT_TOKENS
    continuous = ["", ""]
    if "continuous" in case["passes"][0]:
        other = _median(case, lambda p: p["continuous"]["cpu_s"])
        continuous = [f"{tokens / other:,.0f}", f"{other / cpu['baton']:.2f}"]
    return [
        f"{tokens / cpu['baton']:,.0f}",
        f"{tokens / cpu['generate']:,.0f}",
        continuous[0],
        f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f} – {ratios[-1]:.2f})",
        continuous[1],
        ", ".join(f"{tokens / (cpu[side] - prefill[side]):,.0f}" for side in cpu),
        ", ".join(f"{prompt_tokens / prefill[side]:,.0f}" for side in cpu),
    ]


def _bare(case: dict[str, Any]) -> list[str]:
    decode = sorted((p["baton"]["cpu_s"] - p["baton"]["prefill_s"]) / p["bare_decode"]["cpu_s"] for p in case["passes"])
    both = _median(case, lambda p: p["baton"]["cpu_s"] / (p["bare_decode"]["cpu_s"] + p["bare_prefill"]["cpu_s"]))
    whole = _median(case, lambda p: p["baton"]["cpu_s"] / p["bare_decode"]["cpu_s"])
    share = _median(case, lambda p: p["baton"]["prefill_s"] / p["baton"]["cpu_s"])
    facts = case["passes"][0]["baton"]["facts"]
    return [
        f"**{statistics.median(decode):.2f}** ({decode[0]:.2f} – {decode[-1]:.2f})",
        f"{both:.2f}",
        f"{whole:.2f}",
        f"{share:.0%}",
        f"{facts['occupancy']:.0%}",
        " ".join(map(str, facts["widths_possible"])),
    ]


def _median(case: dict[str, Any], value: Any) -> float:
    return statistics.median(value(p) for p in case["passes"])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return {
        "processor": names[0] if names else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "commit": git.stdout.strip(),
        "packages": {name: metadata.version(name) for name in ("torch", "transformers", "numpy")},
        "python": platform.python_version(),
        "seed": SEED,
        "load_average_before": os.getloadavg(),
    }


if __name__ == "__main__":
    main()
