"""Rates of a version's way through the host: cast, digest, copy, code, store, fetch, with one thread and with several.

    python benchmarks/publication/host_path.py                      # all numbers of threads up to the number of cores
    python benchmarks/publication/host_path.py --out FILE --before COMMIT

The model is random: float32 weights of normal distribution, published in bfloat16, and changes of one unit in the last
place at random places. --before measures the code of another commit too, in a temporary worktree. Each figure is the
best of several rounds; each process has one torch thread. Raw results: results/host_path.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DENSITY = 0.01


def main() -> None:
    """Measure in processes of their own, write the results, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=32_000_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--before", help="another commit to measure")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "host_path.json")
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.threads is not None:
        print(json.dumps(measure(given.params, given.rounds, given.threads)))
        return
    sys.path.insert(0, str(HERE.parent))
    from machine import machine

    raw: dict[str, Any] = {
        **machine(),
        "params": given.params,
        "density": DENSITY,
        "rounds": given.rounds,
        "seconds": {},
    }
    if given.before:
        raw["before"] = given.before
        with tempfile.TemporaryDirectory() as scratch:
            tree = f"{scratch}/tree"
            subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, given.before], cwd=ROOT, check=True)
            try:
                raw["seconds"]["before"] = measured(given, 0, tree)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    for threads in range(1, raw["cores"] + 1):
        raw["seconds"][str(threads)] = measured(given, threads, str(ROOT))
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(raw, indent=1) + "\n")
    print(table(raw))


def measured(given: argparse.Namespace, threads: int, tree: str) -> dict[str, float]:
    """Run `measure` in a process that imports Baton from `tree`."""
    own = ["--params", str(given.params), "--rounds", str(given.rounds), "--threads", str(threads)]
    environment = {**os.environ, "PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, *own], env=environment, cwd=tree, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(params: int, rounds: int, threads: int) -> dict[str, float]:
    """Return the seconds of each stage. threads: 0 for code that has no such setting."""
    import torch

    from baton import clock
    from baton.policy.tensors import as_published, weights_digest
    from baton.types import PolicyVersion
    from baton.weights.fetcher import Fetcher
    from baton.weights.flat_buffer import flattened
    from baton.weights.manifest import TensorEntry
    from baton.weights.publisher import Publisher
    from baton.weights.settings import WeightsSettings
    from baton.weights.sources import StoreSource
    from baton.weights.store import Store
    from baton.weights.version_files import FlatFile, VersionFiles

    torch.set_num_threads(1)
    if threads:
        clock.CODERS = threads  # type: ignore[misc]
    random = torch.Generator().manual_seed(0)
    trained = {f"layer{i}": torch.randn(params // 24 // 4096, 4096, generator=random) * 0.02 for i in range(24)}
    first = as_published(trained, dict.fromkeys(trained, torch.bfloat16))
    versions = [first]
    for _ in range(2):
        after = {name: tensor.clone() for name, tensor in versions[-1].items()}
        for tensor in after.values():
            chosen = torch.rand(tensor.shape, generator=random) < DENSITY
            tensor.view(torch.int16)[chosen] += 1
        versions.append(after)
    found: dict[str, float] = {"bytes": float(sum(tensor.nbytes for tensor in first.values()))}

    def note(name: str, seconds: float) -> None:
        found[name] = min(seconds, found.get(name, seconds))

    def timed(name: str, work: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        begin = time.perf_counter()
        work(*arguments, **keywords)
        note(name, time.perf_counter() - begin)

    def temporary(entries: tuple[TensorEntry, ...]) -> FlatFile:
        return FlatFile(Path(memory or tempfile.gettempdir()), sum(entry.num_bytes for entry in entries))

    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for _ in range(rounds):
        timed("cast", as_published, trained, dict.fromkeys(trained, torch.bfloat16))
        timed("digest", weights_digest, first)
        timed("copy and digest", flattened, first, temporary)
        # in memory: the speed of a disk is not of interest here
        with tempfile.TemporaryDirectory(dir=memory) as scratch:
            store = Store(f"{scratch}/store")
            publisher = Publisher(store, WeightsSettings(keyframe_every=100), files=VersionFiles(Path(scratch) / "m"))
            follower = Fetcher([StoreSource(store)])
            version = PolicyVersion("benchmark", 0, weights_digest(first))
            timed("publish a keyframe", publisher.publish, first, version)
            timed("fetch a keyframe", follower.fetch, version, deadline_s=600)
            for number, tensors in enumerate(versions[1:], 1):
                version = PolicyVersion("benchmark", number, weights_digest(tensors))
                shared_s: list[float] = []
                # code without this argument has all of the publication before the announcement
                keywords = {"when_shared": lambda _, s=shared_s: s.append(time.perf_counter())} if threads else {}
                begin = time.perf_counter()
                timed("publish a delta", publisher.publish, tensors, version, **keywords)
                note("before workers of this machine load it", (shared_s or [time.perf_counter()])[0] - begin)
                timed("fetch a delta", follower.fetch, version, deadline_s=600)
    return found


def table(raw: dict[str, Any]) -> str:
    """Return a Markdown table of GB/s of bfloat16 by stage and number of threads."""
    columns = list(raw["seconds"])
    lines = [
        "| GB/s of bfloat16 | " + " | ".join(c if c == "before" else f"{c} thread(s)" for c in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for stage in raw["seconds"][columns[-1]]:
        if stage != "bytes":
            rates = [raw["seconds"][c] for c in columns]
            cells = [f"{r['bytes'] / r[stage] / 1e9:.2f}" if stage in r else "–" for r in rates]
            lines.append(f"| {stage} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
