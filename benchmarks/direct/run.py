"""Seconds from a trainer's tensors to an engine's, by path and size, with verification on every path.

    python benchmarks/direct/run.py [--mb 64 256 1024] [--write]

The replica is a plain process that copies the tensors. `digest`: the digest of a version alone, which `file`, `direct`
and `sparse` include. `store`: publish a delta of 1 % of the elements into a directory, then fetch and verify it.
`file`: write and map a file in shared memory, as for an engine in the run's own process. `direct`: gloo over loopback,
with checksums on both sides. `sparse`: the same, with only the elements that changed. torch has one thread; `store` and
the digests use `baton.clock.CODERS` threads. Other work on the machine changes the seconds more than the processor
seconds of this process and the replica's together. No figure here is of a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests" / "weights" / "direct")]

from machine import machine  # noqa: E402
from replica_process import ProcessLink  # noqa: E402

from baton.policy.tensors import weights_digest  # noqa: E402
from baton.types import PolicyVersion  # noqa: E402
from baton.weights.direct.gloo import GlooTransport  # noqa: E402
from baton.weights.direct.sender import DirectSender  # noqa: E402
from baton.weights.fetcher import Fetcher  # noqa: E402
from baton.weights.publisher import Publisher  # noqa: E402
from baton.weights.settings import WeightsSettings  # noqa: E402
from baton.weights.store import Store  # noqa: E402

ROOT = Path(__file__).parent
VERSIONS = 4
CHANGED = 0.01
TENSOR_BYTES = 32 * 2**20


def made(megabytes: int) -> dict[str, torch.Tensor]:
    """Return bfloat16 tensors of this size together."""
    count = max(1, megabytes * 2**20 // TENSOR_BYTES)
    elements = megabytes * 2**20 // 2 // count
    return {f"layers.{i}.weight": torch.randn(elements).to(torch.bfloat16) for i in range(count)}


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy, on the same device, of which one element in a hundred has changed by its last bit."""
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in found.values():
        words = torch.int16 if tensor.element_size() == 2 else torch.int32
        tensor.view(-1).view(words)[:: int(1 / CHANGED)] ^= 1
    return found


Seconds = tuple[float, float]
"""Seconds, and processor seconds of all processes."""


Load = Callable[[dict[str, torch.Tensor], int], object]
"""Function (tensors, number) that takes a version through a path."""


def seconds(path: Load, tensors: dict[str, torch.Tensor]) -> Seconds:
    """Return the medians per version after the first one."""
    return medians(timed(path, tensors))


def timed(path: Load, tensors: dict[str, torch.Tensor]) -> list[Seconds]:
    """Return the seconds of each version."""
    found = []
    for number in range(VERSIONS):
        tensors = changed(tensors)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin_s, begin_cpu_s = time.perf_counter(), processor_s()
        path(tensors, number)
        found.append((time.perf_counter() - begin_s, processor_s() - begin_cpu_s))
    return found


def medians(found: list[Seconds]) -> Seconds:
    """Return the medians without the first version, which builds connections and has no difference."""
    wall, processor = zip(*found[1:], strict=True)
    return statistics.median(wall), statistics.median(processor)


def processor_s() -> float:
    """Return the processor seconds so far of this process and of those that it has started."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def by_digest(tensors: dict[str, torch.Tensor]) -> Seconds:
    return seconds(lambda given, number: weights_digest(given), tensors)


def by_store(tensors: dict[str, torch.Tensor]) -> Seconds:
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        publisher, fetcher = Publisher(store, WeightsSettings(keyframe_every=100)), Fetcher([store])

        def load(given: dict[str, torch.Tensor], number: int) -> None:
            fetcher.fetch(publisher.publish(given, PolicyVersion("b", number)).manifest.version, deadline_s=600.0)

        return seconds(load, tensors)


def by_file(tensors: dict[str, torch.Tensor]) -> Seconds:
    path = Path("/dev/shm") / "baton-benchmark.safetensors"

    def load(given: dict[str, torch.Tensor], number: int) -> None:
        weights_digest(given)
        save_file(given, path)
        for tensor in load_file(path).values():
            tensor.clone()

    try:
        return seconds(load, tensors)
    finally:
        path.unlink(missing_ok=True)


def by_direct(tensors: dict[str, torch.Tensor], *, is_sparse: bool = False) -> Seconds:
    link = ProcessLink()
    sender = DirectSender(GlooTransport("127.0.0.1").connect, time.monotonic, is_sparse=is_sparse)

    def load(given: dict[str, torch.Tensor], number: int) -> None:
        version = PolicyVersion("b", number, weights_digest(given))
        sender.offer(given, version)
        sender.wait("replica", version, 600.0)

    try:
        sender.join("replica", link)
        return seconds(load, tensors)
    finally:
        sender.close()
        link.close()


def by_sparse(tensors: dict[str, torch.Tensor]) -> Seconds:
    return by_direct(tensors, is_sparse=True)


def computed(seconds_per_gb: float) -> str:
    """Return the Markdown table of computed seconds: bytes in bfloat16 over the nominal rate of a link, for a replica.

    seconds_per_gb: measured seconds of the store.
    """
    sparse = CHANGED * (4 + 2) / 2
    paths: dict[str, tuple[float, float]] = {
        "CUDA IPC, one H100: read and write at 3.35 TB/s": (3350.0, 2.0),
        "NVLink 4, 450 GB/s each way": (450.0, 1.0),
        "PCIe 5 x16, 64 GB/s": (64.0, 1.0),
    }
    for name, rate in (("400 Gb/s", 50.0), ("100 Gb/s", 12.5), ("10 Gb/s", 1.25)):
        paths |= {f"{name} network": (rate, 1.0), f"{name} network, `sparse`, 1 % changed": (rate, sparse)}
    paths["store, as measured above"] = (1 / seconds_per_gb, 1.0)
    lines = ["| computed | 8B, 16 GB | 32B, 64 GB | 235B, 470 GB |", "|---|---|---|---|"]
    for name, (rate, share) in paths.items():
        cells = ["does not fit" if "IPC" in name and gb > 80 else f"{gb * share / rate:.2g} s" for gb in (16, 64, 470)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all paths and print a line per size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for megabytes in given.mb:
        tensors = made(megabytes)
        row: dict[str, float] = {"mb": megabytes}
        for path in (by_digest, by_store, by_file, by_direct, by_sparse):
            name = path.__name__.removeprefix("by_")
            row[f"{name}_s"], row[f"{name}_processor_s"] = (round(each, 3) for each in path(tensors))
        print(row, flush=True)
        rows.append(row)
    print(computed(rows[-1]["store_s"] / (rows[-1]["mb"] * 2**20 / 1e9)))
    if given.write:
        result = {"machine": machine(), "versions": VERSIONS, "changed": CHANGED, "rows": rows}
        (ROOT / "results").mkdir(exist_ok=True)
        (ROOT / "results" / "raw.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
