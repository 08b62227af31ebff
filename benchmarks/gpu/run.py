"""Engine, trainer and scheduler on one GPU, with models of random weights: one command of at most eight minutes.

    python benchmarks/gpu/run.py                      # on the GPU of this machine
    python benchmarks/gpu/run.py --device cpu --tiny  # the same code at toy size

Raw results go to results/raw.json, written anew after each part; the table to results/table.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from decode import WAYS, measure_decode
from modes import measure_modes, simulate_modes, steps_needed
from shapes import FULL, TINY, Scale, copied_bytes_per_s, known_gpu
from table import make_table
from train import measure_train

from baton.errors import UserError
from baton.policy.load import torch_device
from baton.policy.threads import set_up_threads

HERE = Path(__file__).parent
MARGIN = 1.4
"""An estimate of the long-tail benchmark's time is taken for so much longer."""


def main() -> None:
    """Measure everything for which there is time, and write raw results and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: whether it runs, not what it measures")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds after which nothing new is begun")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    device, scale = torch_device(arguments.device), TINY if arguments.tiny else FULL
    set_up_threads(torch.get_num_threads())
    begin_s = time.monotonic()
    found: dict[str, Any] = {"machine": machine(device), "is_tiny": arguments.tiny, "skipped": []}
    arguments.out.mkdir(exist_ok=True, parents=True)

    def keep() -> None:
        found["seconds"] = time.monotonic() - begin_s
        (arguments.out / "raw.json").write_text(json.dumps(found, indent=1) + "\n")

    def left_s() -> float:
        return float(arguments.budget) - (time.monotonic() - begin_s)

    measure(found, scale, device, left_s, keep)
    table = make_table(found)
    (arguments.out / "table.md").write_text(table)
    print(table)


def measure(
    found: dict[str, Any], scale: Scale, device: torch.device, left_s: Callable[[], float], keep: Callable[[], None]
) -> None:
    """Do all parts, the cheap ones first."""
    gpu = known_gpu(device)
    copied = copied_bytes_per_s(device, 1 << (30 if device.type == "cuda" else 22))
    bytes_per_s = gpu.hbm_bytes_per_s if gpu is not None else copied
    found["device"] = {"copied_bytes_per_s": copied, "bytes_per_s": bytes_per_s, "flops": gpu and gpu.flops}
    found |= {"decode": [], "train": [], "modes": [], "simulated": []}
    for shape in scale.shapes:
        for way in WAYS if device.type == "cuda" else ("plain",):
            try:
                found["decode"] += measure_decode(shape, scale, device, bytes_per_s, way=way)
            except (UserError, RuntimeError, NotImplementedError) as error:
                if way == "plain":
                    raise
                found["skipped"].append(f"decode of {shape} by {way}: {type(error).__name__}: {error}"[:500])
            free(device)
            keep()
        found["train"].append(measure_train(shape, scale, device, gpu.flops if gpu is not None else None))
        free(device)
        keep()
    for place, shape in enumerate(scale.shapes):
        share_s = left_s() / (len(scale.shapes) - place)
        decode = fastest(found["decode"], shape)
        step_s = max(case["step_s"] for case in decode) * MARGIN
        cap = next((cap for cap in scale.caps if steps_needed(cap, scale) * step_s < share_s), None)
        prefill_s = 0.0
        if cap is None:
            found["skipped"].append(
                f"the long-tail benchmark of {shape}: {share_s:.0f} s left, steps of {step_s:.3f} s"
            )
        else:
            found["modes"].append(measure_modes(shape, scale, device, cap=cap, way=decode[0]["way"]))
            prefill_s = found["modes"][-1]["prefill_ms_per_token"] / 1000
        found["simulated"] += simulate_modes(shape, scale, decode, prefill_s)
        free(device)
        keep()


def fastest(cases: list[dict[str, Any]], shape: str) -> list[dict[str, Any]]:
    """Return a shape's decode cases of equal rows, in the fastest way."""
    sides = [[c for c in cases if c["shape"] == shape and c["way"] == way and c["context"] != "mixed"] for way in WAYS]
    return min((side for side in sides if side), key=lambda side: sum(case["step_s"] for case in side))


def free(device: torch.device) -> None:
    """Give back what the last part held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def machine(device: torch.device) -> dict[str, Any]:
    """Describe where and with what this was measured."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    on_cuda = device.type == "cuda"
    return {
        "commit": commit,
        "device": torch.cuda.get_device_name(device) if on_cuda else platform.processor() or platform.machine(),
        "cuda": torch.version.cuda if on_cuda else None,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_cuda else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers")},
        "time": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


if __name__ == "__main__":
    main()
