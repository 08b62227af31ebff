"""How much of a version's way through the host is serial, and what this allows on four threads.

    pip install py-spy
    python benchmarks/publication/serial_shares.py

Each stage of `host_path.py` runs again and again with one coding thread, while py-spy samples it twice: all threads
that are active, and the thread that holds the interpreter's lock. Serial is what the caller's thread does, and what
another thread does while it holds the lock. The rest can run in several threads at once, except that one thread stores
the chunks. Raw results: results/serial_shares.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
RESULTS = HERE / "results" / "serial_shares.json"
STAGES = ("publish a keyframe", "fetch a keyframe", "publish a delta", "fetch a delta")
SAMPLES_PER_S = 500
THREADS = 4
DELTAS = 8
"""Number of versions that a worker fetches one after another."""


def main() -> None:
    """Sample each stage in a process of its own, write the results, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=40_000_000)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--pyspy", default="py-spy", help="the program py-spy")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage:
        repeat(given.stage, given.params)
        return
    from machine import machine

    shares = {stage: sampled(stage, given) for stage in STAGES}
    raw = {**machine(), "params": given.params, "seconds": given.seconds, "shares": shares}
    RESULTS.write_text(json.dumps(raw, indent=1) + "\n")
    print(table(shares))


def sampled(stage: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the shares of the time of a stage."""
    command = [sys.executable, __file__, "--stage", stage, "--params", str(given.params)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1])
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "ready", "the stage did not start"
        active, lock = (stacks(process.pid, given, *mode) for mode in ((), ("--gil",)))
    finally:
        process.kill()
        process.wait()
    whole = given.seconds * SAMPLES_PER_S
    caller = sum(n for stack, n in active.items() if "MainThread" in stack)
    locked = sum(n for stack, n in lock.items() if "MainThread" not in stack)
    storing = sum(n for stack, n in active.items() if "put_chunk" in stack)
    work = sum(active.values())
    top: Counter[str] = Counter()
    for stack, n in lock.items():
        top[stack.split(";")[-1]] += n
    for stack, n in active.items():
        if "MainThread" in stack:
            top["caller: " + stack.split(";")[-1]] += n
    serial = caller + locked
    return {
        "active": work / whole,
        "lock": sum(lock.values()) / work,
        "serial": serial / work,
        "storing": storing / work,
        "gain": min(work, whole) / max(serial + (work - serial) / THREADS, storing),
        "largest": {name: n / work for name, n in top.most_common(12)},
    }


def stacks(pid: int, given: argparse.Namespace, *mode: str) -> Counter[str]:
    """Sample a process and return stack → number of samples, for stacks of Baton's code."""
    with tempfile.NamedTemporaryFile(suffix=".raw") as file:
        how = ["--rate", str(SAMPLES_PER_S), "--duration", str(given.seconds), "--threads", "--format", "raw", *mode]
        command = [given.pyspy, "record", "--pid", str(pid), "--output", file.name, *how]
        subprocess.run(command, check=True, capture_output=True, timeout=10 * given.seconds + 60)
        found: Counter[str] = Counter()
        for line in Path(file.name).read_text().splitlines():
            stack, _, number = line.rpartition(" ")
            if "(baton/" in stack and "Condition.wait" not in stack:  # py-spy counts some waits as active
                found[stack] += int(number)
        return found


def repeat(stage: str, params: int) -> None:
    """Run a stage until this process is killed."""
    import torch

    from baton import clock
    from baton.policy.tensors import weights_digest
    from baton.types import PolicyVersion
    from baton.weights.fetcher import Fetcher
    from baton.weights.publisher import Publisher
    from baton.weights.settings import WeightsSettings
    from baton.weights.sources import StoreSource
    from baton.weights.store import Store

    torch.set_num_threads(1)
    clock.CODERS = 1  # type: ignore[misc]
    random = torch.Generator().manual_seed(0)
    first = {
        f"layer{i}": (torch.randn(params // 24 // 4096, 4096, generator=random) * 0.02).bfloat16() for i in range(24)
    }
    second = {name: tensor.clone() for name, tensor in first.items()}
    for tensor in second.values():
        tensor.view(torch.int16)[torch.rand(tensor.shape, generator=random) < 0.01] += 1
    both = [(tensors, weights_digest(tensors)) for tensors in (first, second)]
    settings = WeightsSettings(keyframe_every=10**6)

    def version(number: int) -> PolicyVersion:
        return PolicyVersion("benchmark", number, both[number % 2][1])

    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        numbers = count()
        store = Store(f"{scratch}/store")
        publisher = Publisher(store, settings)

        def publish_keyframe() -> None:
            publisher = Publisher(Store(f"{scratch}/{next(numbers) % 4}"), settings)
            publisher.publish(first, PolicyVersion("benchmark", next(numbers), both[0][1]))

        def publish_delta() -> None:
            number = next(numbers)
            publisher.publish(both[number % 2][0], version(number))

        def fetch_keyframe() -> None:
            Fetcher([StoreSource(store)]).fetch(version(0), deadline_s=600)

        def fetch_deltas() -> None:
            fetcher = Fetcher([StoreSource(store)])
            fetcher.hold(version(0), first)
            for number in range(1, DELTAS):
                fetcher.fetch(version(number), deadline_s=600)

        work: dict[str, Callable[[], None]] = dict(
            zip(STAGES, (publish_keyframe, fetch_keyframe, publish_delta, fetch_deltas), strict=True)
        )
        for _ in range(DELTAS):
            publish_delta()
        until_s = time.monotonic() + 600
        print("ready", flush=True)
        while time.monotonic() < until_s:
            work[stage]()


def table(shares: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown table of shares by stage."""
    lines = [
        "| stage | holds the lock | serial | stores chunks | computed gain on 4 threads |",
        "|---|---|---|---|---|",
    ]
    for stage, found in shares.items():
        cells = [f"{found[key]:.1%}" for key in ("lock", "serial", "storing")]
        lines.append(f"| {stage} | {' | '.join(cells)} | {found['gain']:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
