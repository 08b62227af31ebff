"""What a policy version weighs on its way: whole runs of the quickstart's model, every version published and fetched.

    python benchmarks/publication/run.py                  # trains 50 steps at each learning rate, then measures
    python benchmarks/publication/run.py --kept DIRECTORY # keeps what was trained there, and uses it again

Weights are trained in float32 and published in bfloat16. Raw results: results/raw.json, the tables: results/table.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save_file

from baton.policy.tensors import as_published, weights_digest
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.evaluation import Evaluation
from baton.run.assemble import build_loop
from baton.types import PolicyVersion
from baton.weights.fetcher import Fetcher
from baton.weights.flat_buffer import flattened
from baton.weights.manifest import encode_manifest
from baton.weights.publisher import Publisher
from baton.weights.settings import WeightsSettings
from baton.weights.store import Store
from baton.weights.version_files import FlatFile

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RATES = ("1e-6", "3e-6", "1e-5")
STEPS = 50
SYNTHETIC = (0.001, 0.01, 0.05)
"""Densities of the larger model."""


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=Path, help="directory for the weights of every step")
    parser.add_argument("--params", type=int, default=50_000_000, help="of the larger model")
    arguments = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    raw: dict[str, Any] = {
        "commit": git.stdout.strip(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "recipe": "recipes/quickstart.toml, constant learning rate, no warm-up, 50 train steps",
    }
    with tempfile.TemporaryDirectory() as scratch:
        kept = arguments.kept or Path(scratch)
        for rate in RATES:
            if len(list((kept / rate).glob("*.safetensors"))) <= STEPS:
                train(rate, kept / rate)
        torch.set_num_threads(1)
        raw["load_average"] = os.getloadavg()
        raw["rates"] = {rate: measure([as_bf16(f) for f in sorted((kept / rate).iterdir())]) for rate in RATES}
        raw["synthetic"] = {str(d): measure(larger(arguments.params, d), with_others=False) for d in SYNTHETIC}
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "raw.json").write_text(json.dumps(raw, indent=1) + "\n")
    table = make_table(raw, arguments.params)
    (results / "table.md").write_text(table)
    print(table)


class Silent:
    """An observer that shows nothing."""

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Nothing is counted."""
        yield lambda done: None

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Nobody watches."""

    def evaluated(self, step: int, results: Sequence[Evaluation]) -> None:
        """Nobody watches."""

    def said(self, text: str) -> None:
        """Nobody listens."""


def train(rate: str, directory: Path) -> None:
    """Train the quickstart as `baton train` does; keep the weights of every version."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [f"run.directory={scratch}", f"run.steps={STEPS}", "eval.every=0", "eval.num_prompts=8"]
        overrides += ["checkpoint.every=10000", f"trainer.lr={rate}", "trainer.warmup_steps=0"]
        recipe = load_recipe(Recipe, ROOT / "recipes" / "quickstart.toml", [*overrides, "trainer.decay=constant"])
        loop = build_loop(recipe, Silent(), resume=False, overwrite=False)
        publish = loop.trainer.publish

        def kept() -> Any:
            weights = publish()
            save_file(dict(weights.tensors), directory / f"{weights.version.number:04d}.safetensors")
            return weights

        loop.trainer.publish = kept  # type: ignore[method-assign]
        loop.train()


def as_bf16(file: Path) -> dict[str, torch.Tensor]:
    """The weights of one version as they are published."""
    tensors = load_file(file)
    return as_published(tensors, dict.fromkeys(tensors, torch.bfloat16))


def larger(params: int, density: float) -> list[dict[str, torch.Tensor]]:
    """A model in bfloat16, and the same after changes of one unit in the last place in random places, thrice."""
    random = torch.Generator().manual_seed(0)
    rows = params // 4096
    versions = [{"weight": (torch.randn(rows, 4096, generator=random) * 0.02).bfloat16()}]
    for _ in range(3):
        after = versions[-1]["weight"].clone()
        chosen = torch.rand(after.shape, generator=random) < density
        steps = torch.randint(0, 2, (int(chosen.sum()),), generator=random, dtype=torch.int16) * 2 - 1
        after.view(torch.int16)[chosen] += steps
        versions.append({"weight": after})
    return versions


def measure(versions: list[dict[str, torch.Tensor]], *, with_others: bool = True) -> list[dict[str, float]]:
    """Publish and fetch versions in turn; a row for each but the first."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(scratch)
        publisher = Publisher(store, WeightsSettings(keyframe_every=10))
        follower = Fetcher([store])
        before: np.ndarray | None = None
        for number, tensors in enumerate(versions):
            version = PolicyVersion("benchmark", number, weights_digest(tensors))
            published = publisher.publish(tensors, version)
            begin = time.perf_counter()
            found = follower.fetch(version, deadline_s=600)
            fetch_s = time.perf_counter() - begin
            assert all(torch.equal(found[n].view(torch.int16), t.view(torch.int16)) for n, t in tensors.items())
            file = flattened(tensors, lambda entries: FlatFile(Path(scratch), sum(e.num_bytes for e in entries)))[1]
            now = file.bytes.view(np.uint16)
            if before is not None:
                manifest = published.manifest
                row = {
                    "density": published.density or 0.0,
                    "bytes": published.bytes,
                    "manifest_bytes": len(encode_manifest(manifest)),
                    "full_bytes": manifest.num_bytes,
                    "entropy_bytes": entropy_bytes(now, before),
                    "publish_s": published.seconds,
                    "fetch_s": fetch_s,
                    "whole_bytes": float(math.nan if manifest.whole is None else manifest.whole.size),
                    **(others(now, before) if with_others else {}),
                }
                rows.append({name: value for name, value in row.items() if value == value})
            before = now
    return rows


def entropy_bytes(now: np.ndarray, before: np.ndarray) -> float:
    """n·H2(density) for which elements changed, and the empirical entropy of the differences, of order zero."""
    changed = now != before
    share = changed.mean()
    where = now.size * sum(-p * math.log2(p) for p in (share, 1 - share) if p)
    _, counts = np.unique((now - before)[changed], return_counts=True)
    shares = counts / max(1, counts.sum())
    return float(where - counts.sum() * (shares * np.log2(shares)).sum()) / 8


def others(now: np.ndarray, before: np.ndarray) -> dict[str, float]:
    """Bytes that what one would try first takes: all tensors, zstd of them, indices of 32 bits with the new values."""
    places = np.flatnonzero(now != before)
    naive = places.astype(np.int32).tobytes() + now[places].tobytes()
    return {
        "zstd_full_bytes": len(zstandard.compress(now.tobytes(), 3)),
        "naive_bytes": len(naive),
        "naive_zstd_bytes": len(zstandard.compress(naive, 3)),
    }


def make_table(raw: dict[str, Any], params: int) -> str:
    """Markdown: a row per learning rate, and a row per density of the larger model."""
    lines = [
        "| lr | density: median (first step) | payload, bytes | of the full bf16 bytes | ÷ entropy: all (worst step) | "
        "manifest, bytes | zstd of all | int32 + value | the same, zstd | publish ms | fetch ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rate, rows in raw["rates"].items():

        def mid(name: str, rows: list[dict[str, float]] = rows) -> float:
            return statistics.median(row[name] for row in rows)

        full = rows[0]["full_bytes"]
        ratio = sum(r["bytes"] for r in rows) / sum(r["entropy_bytes"] for r in rows)
        worst = max(r["bytes"] / r["entropy_bytes"] for r in rows)
        shares = [f"{mid(name) / full:.2%}" for name in ("zstd_full_bytes", "naive_bytes", "naive_zstd_bytes")]
        lines.append(
            f"| {rate} | {mid('density'):.2%} ({rows[0]['density']:.2%}) | {mid('bytes'):,.0f} | "
            f"{mid('bytes') / full:.2%} ({rows[0]['bytes'] / full:.2%}) | {ratio:.3f} ({worst:.3f}) | "
            f"{mid('manifest_bytes'):,.0f} | {' | '.join(shares)} | {mid('publish_s') * 1000:.1f} | "
            f"{mid('fetch_s') * 1000:.1f} |"
        )
    lines += [
        f"\nA model of {params / 1e6:.0f} M parameters with random changes of one unit in the last place:\n",
        "| density | payload, MB | of the full bf16 bytes | ÷ entropy | publish MB/s | fetch MB/s |",
        "|---|---|---|---|---|---|",
    ]
    for density, rows in raw["synthetic"].items():
        row = rows[-1]
        full = row["full_bytes"] / 1e6
        publish_s, fetch_s = (min(r[name] for r in rows) for name in ("publish_s", "fetch_s"))
        lines.append(
            f"| {float(density):.1%} | {row['bytes'] / 1e6:.2f} | {row['bytes'] / row['full_bytes']:.3%} | "
            f"{row['bytes'] / row['entropy_bytes']:.3f} | {full / publish_s:,.0f} | {full / fetch_s:,.0f} |"
        )
    wholes = [r["whole_bytes"] / r["full_bytes"] for rows in raw["rates"].values() for r in rows if "whole_bytes" in r]
    lines.append(f"\nWhole versions, one in ten: {statistics.median(wholes):.1%} of the full bf16 bytes.")
    return "\n".join(lines) + "\n"


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
