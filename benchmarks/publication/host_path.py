"""Rates of a version's way through the host: write, code, store, fetch, with one thread and with several.

    python benchmarks/publication/host_path.py                      # all numbers of threads up to the number of cores
    python benchmarks/publication/host_path.py --out FILE --before COMMIT

The model is random: float32 weights of normal distribution, published in bfloat16, and changes of one unit in the last
place at random places. --before measures the code of another commit too, in a temporary worktree. All variants run in
turn, --turns times, each in a process of its own with one torch thread. Each figure is the best of all rounds; it has
the seconds and the processor's seconds. Files are in memory (/dev/shm). Raw results: results/host_path.json.
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
from contextlib import ExitStack
from functools import partial
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
    parser.add_argument("--turns", type=int, default=2)
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
        "turns": given.turns,
        "seconds": {},
    }
    counts = range(1, raw["cores"] + 1)
    with ExitStack() as stack:
        variants = [(f"{threads}", threads, str(ROOT)) for threads in counts]
        if given.before:
            raw["before"] = given.before
            tree = stack.enter_context(tempfile.TemporaryDirectory()) + "/tree"
            subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, given.before], cwd=ROOT, check=True)
            stack.callback(subprocess.run, ["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
            variants = [(f"before, {threads}", threads, tree) for threads in counts] + variants
        for _ in range(given.turns):
            for name, threads, tree in variants:
                best = raw["seconds"].setdefault(name, {})
                for stage, seconds in measured(given, threads, tree).items():
                    best[stage] = min(seconds, best.get(stage, seconds))
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
    """Return the seconds of each stage, and its seconds of processor time as "<stage>, processor"."""
    import torch

    from baton import clock
    from baton.policy.tensors import as_published, weights_digest
    from baton.trainer.trainer import PublishedWeights
    from baton.types import PolicyVersion
    from baton.weights.fetcher import Fetcher
    from baton.weights.publisher import Publisher
    from baton.weights.settings import WeightsSettings
    from baton.weights.sources import StoreSource
    from baton.weights.store import Store
    from baton.weights.version_files import VersionFiles

    torch.set_num_threads(1)
    clock.CODERS = threads  # type: ignore[misc]
    random = torch.Generator().manual_seed(0)
    versions = [{f"layer{i}": torch.randn(params // 24 // 4096, 4096, generator=random) * 0.02 for i in range(24)}]
    dtypes = dict.fromkeys(versions[0], torch.bfloat16)
    for _ in range(2):
        after = as_published(versions[-1], dtypes)
        for tensor in after.values():
            chosen = torch.rand(tensor.shape, generator=random) < DENSITY
            tensor.view(torch.int16)[chosen] += 1
        versions.append({name: tensor.float() for name, tensor in after.items()})
    digests = [weights_digest(as_published(tensors, dtypes)) for tensors in versions]
    found: dict[str, float] = {"bytes": 2.0 * sum(tensor.numel() for tensor in versions[0].values())}

    def note(name: str, seconds: float) -> None:
        found[name] = min(seconds, found.get(name, seconds))

    def timed(name: str, work: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        begin, cpu = time.perf_counter(), time.process_time()
        work(*arguments, **keywords)
        note(name, time.perf_counter() - begin)
        note(f"{name}, processor", time.process_time() - cpu)

    write = writer(dtypes)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for _ in range(rounds):
        # in memory: the speed of a disk is not of interest here
        with tempfile.TemporaryDirectory(dir=memory) as scratch:
            store = Store(f"{scratch}/store")
            publisher = Publisher(store, WeightsSettings(keyframe_every=100), files=VersionFiles(Path(scratch) / "m"))
            follower = Fetcher([StoreSource(store)])
            tempfile.tempdir = scratch  # the follower's files
            for number, (tensors, digest) in enumerate(zip(versions, digests, strict=True)):
                kind, path = "delta" if number else "keyframe", Path(scratch) / f"trainer-{number}.safetensors"
                timed("the trainer writes the file", write, tensors, path)
                version, shared_s = PolicyVersion("benchmark", number, digest), []
                published = PublishedWeights.of_file(version, path)
                begin = time.perf_counter()
                timed(
                    f"publish a {kind}",
                    publisher.publish,
                    published.tensors,
                    version,
                    when_shared=lambda _, s=shared_s: s.append(time.perf_counter()),
                )
                note("of this, until workers of this machine load it", shared_s[0] - begin)
                del published
                path.unlink(missing_ok=True)
                timed(f"fetch a {kind}", follower.fetch, version, deadline_s=600)
            tempfile.tempdir = None
    return found


def writer(dtypes: dict[str, Any]) -> Callable[[dict[str, Any], Path], object]:
    """Return the trainer's function that casts tensors and writes a version's file."""
    try:
        from baton.weights.flat_buffer import flattened
        from baton.weights.version_files import FlatFile

        of_tensors = FlatFile.of_tensors
    except AttributeError:  # an earlier commit
        from baton.policy.stored_tensors import TensorFile, write_gathered

        def write(tensors: dict[str, Any], path: Path) -> None:
            with TensorFile(path, {name: (dtypes[name], tensor.shape) for name, tensor in tensors.items()}) as file:
                write_gathered(tensors, file.put, lambda _, tensor: tensor, dtypes)

        return write
    return lambda tensors, path: flattened(tensors, partial(of_tensors, path), dtypes)


def table(raw: dict[str, Any]) -> str:
    """Return a Markdown table of GB/s of bfloat16, with seconds of processor time per GB, by stage and variant."""
    columns = list(raw["seconds"])
    lines = ["| GB/s (processor s/GB) | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for stage in raw["seconds"][columns[-1]]:
        if stage != "bytes" and not stage.endswith(", processor"):
            cells = []
            for r in (raw["seconds"][c] for c in columns):
                used = r.get(f"{stage}, processor")
                cells.append(
                    f"{r['bytes'] / r[stage] / 1e9:.2f}" + (f" ({used / r['bytes'] * 1e9:.2f})" if used else "")
                )
            lines.append(f"| {stage} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
