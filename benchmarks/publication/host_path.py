"""Rates of a version's way through the host: write, code, store, fetch, with one thread and with several.

    python benchmarks/publication/host_path.py                      # all numbers of threads up to the number of cores
    python benchmarks/publication/host_path.py --out FILE --before COMMIT --before COMMIT

The model is random: weights of normal distribution in bfloat16, and changes of one unit in the last place at random
places. --before measures the code of another commit too, in a temporary worktree. All variants run in turn, --turns
times, each in a process of its own with one torch thread. "processes": as many processes at once as the machine has
cores, each with one thread; their rates are added. This is the most that threads could give. "bound": each coding
thread may run on one core only, so that the system cannot place two of them on the same core. Each figure is the median
of all rounds; beside it are the processor's seconds. Files are in memory (/dev/shm). Raw results:
results/host_path.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DENSITY = 0.01
DELTAS = 4


def main() -> None:
    """Measure in processes of their own, write the results, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=32_000_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--before", action="append", default=[], help="another commit to measure")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "host_path.json")
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bound", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.threads is not None:
        if given.bound:
            bind_coders()
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
        "bytes": 2 * (given.params // 24 // 4096 * 4096 * 24),
        "seconds": {},
    }
    cores = raw["cores"]
    with ExitStack() as stack:
        trees = {"": str(ROOT)}
        for commit in given.before:
            trees[f"{commit}, "] = tree = stack.enter_context(tempfile.TemporaryDirectory()) + "/tree"
            subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
            stack.callback(subprocess.run, ["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
        for _ in range(given.turns):
            for name, tree in trees.items():
                for threads in range(1, cores + 1):
                    add(raw, f"{name}{threads} threads", measured(given, threads, tree, 1))
                if not name:
                    add(raw, f"{cores} threads, bound", measured(given, cores, tree, 1, "--bound"))
                add(raw, f"{name}{cores} processes", measured(given, 1, tree, cores))
                given.out.write_text(json.dumps(raw, indent=1) + "\n")
    print(table(raw))


def add(raw: dict[str, Any], variant: str, measured: list[dict[str, list[float]]]) -> None:
    """Append the seconds of processes that ran at once to the raw results of a variant."""
    stages = raw["seconds"].setdefault(variant, {})
    for process in measured:
        for stage, seconds in process.items():
            at_once = 1 if stage.endswith(", processor") else len(measured)
            stages.setdefault(stage, []).extend(round(s / at_once, 5) for s in seconds)


def bind_coders() -> None:
    """Bind each thread named "coder", when it starts, to one core: the first to the first core, and so on in turn."""
    run, cores = threading.Thread.run, itertools.cycle(sorted(os.sched_getaffinity(0)))

    def bound(thread: threading.Thread) -> None:
        if thread.name == "coder":
            os.sched_setaffinity(0, {next(cores)})  # 0: the calling thread, not the process
        run(thread)

    threading.Thread.run = bound  # type: ignore[method-assign]


def measured(
    given: argparse.Namespace, threads: int, tree: str, processes: int, *options: str
) -> list[dict[str, list[float]]]:
    """Run `measure` in processes at once, which import Baton from `tree`."""
    own = ["--params", str(given.params), "--rounds", str(given.rounds), "--threads", str(threads), *options]
    environment = {**os.environ, "PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, __file__, *own], env=environment, cwd=tree, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    found = [process.communicate(timeout=600)[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"the measurement of {tree} failed")
    return [json.loads(text.splitlines()[-1]) for text in found]


def measure(params: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Return the seconds of each stage in each round, and its seconds of processor time as "<stage>, processor"."""
    import torch

    from baton import clock
    from baton.policy.tensors import weights_digest
    from baton.types import PolicyVersion
    from baton.weights import sources
    from baton.weights.fetcher import Fetcher
    from baton.weights.store import Store

    source: Callable[[Any], Any] = getattr(sources, "StoreSource", lambda store: store)  # a class of older commits
    torch.set_num_threads(1)
    clock.CODERS = threads  # type: ignore[misc]
    random = torch.Generator().manual_seed(0)
    shape = params // 24 // 4096, 4096
    versions = [{f"layer{i}": (torch.randn(shape, generator=random) * 0.02).bfloat16() for i in range(24)}]
    for _ in range(DELTAS):
        after = {name: tensor.clone() for name, tensor in versions[-1].items()}
        for tensor in after.values():
            chosen = torch.rand(tensor.shape, generator=random) < DENSITY
            tensor.view(torch.int16)[chosen] += 1
        versions.append(after)
    digests = [weights_digest(tensors) for tensors in versions]
    found: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        begin, cpu = time.perf_counter(), time.process_time()
        work(*arguments, **keywords)
        found.setdefault(name, []).append(time.perf_counter() - begin)
        found.setdefault(f"{name}, processor", []).append(time.process_time() - cpu)

    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for _ in range(rounds):
        # in memory: the speed of a disk is not of interest here
        with tempfile.TemporaryDirectory(dir=memory) as scratch:
            store = Store(f"{scratch}/store")
            publish = publishing(store, Path(scratch), timed)
            follower = Fetcher([source(store)])
            tempfile.tempdir = scratch  # the follower's files
            for number, (tensors, digest) in enumerate(zip(versions, digests, strict=True)):
                version = PolicyVersion("benchmark", number, digest)
                publish(tensors, version)
                # the third version is the first that is written into an earlier version's file
                new = " into a new file" if number in (1, 2) else ""
                kind = f"delta{new}" if number else "keyframe"
                timed(f"fetch a {kind}", follower.fetch, version, deadline_s=600)
            tempfile.tempdir = None
    return found


def publishing(store: Any, scratch: Path, timed: Callable[..., None]) -> Callable[[Any, Any], None]:
    """Return a function that publishes tensors as the trainer and the hub do, and notes the seconds with `timed`."""
    from baton.policy.tensors import tensor_digest
    from baton.weights.flat_buffer import flattened
    from baton.weights.publisher import Publisher
    from baton.weights.settings import WeightsSettings

    def stage(version: Any) -> str:
        return f"publish a {'delta' if version.number else 'keyframe'}"

    settings = WeightsSettings(keyframe_every=100)
    try:
        from baton.trainer.trainer import PublishedWeights
        from baton.weights.version_files import FlatFile, VersionFiles
    except ImportError:  # a commit that kept versions in memory; a publication includes the copy
        from baton.weights.shared import SharedMemory

        old = Publisher(store, settings, shared=SharedMemory(scratch / "m"))
        return lambda tensors, version: timed(stage(version), old.publish, tensors, version)
    publisher = Publisher(store, settings, files=VersionFiles(scratch / "m"))

    def publish(tensors: Any, version: Any) -> None:
        path = scratch / f"trainer-{version.number}.safetensors"
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        timed("the trainer writes the file", flattened, tensors, partial(FlatFile.of_tensors, path), dtypes)
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        given = (version, path, digests)[: len(signature(PublishedWeights.of_file).parameters)]
        published = PublishedWeights.of_file(*given)  # without digests at older commits
        timed(stage(version), publisher.publish, published.tensors, version)
        path.unlink(missing_ok=True)

    return publish


def table(raw: dict[str, Any]) -> str:
    """Return a Markdown table of GB/s of bfloat16, with seconds of processor time per GB, by stage and variant."""
    columns = list(raw["seconds"])
    lines = ["| GB/s (processor s/GB) | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for stage in raw["seconds"][columns[-1]]:
        if not stage.endswith(", processor"):
            cells = []
            for stages in (raw["seconds"][c] for c in columns):
                seconds, used = (median(stages.get(name, [0.0])) for name in (stage, f"{stage}, processor"))
                cells.append(f"{raw['bytes'] / seconds / 1e9:.2f} ({used / raw['bytes'] * 1e9:.2f})" if seconds else "")
            lines.append(f"| {stage} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
